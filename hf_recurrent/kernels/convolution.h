/* The temporal convolution, as in modeling/block/recurrent_blocks.py: y_t = Σ_k w_k ∘ x_{t-k}, where no reset lies between.
 * Before a stream's first step come its taps, oldest first. */

/* Lags from 0 on whose inputs belong to the episode of step `step`. */
INLINE int64_t NAME(lags_back)(const struct temporal_convolution *one, int64_t row, int64_t step)
{
    int64_t lags = 1;
    while (lags < one->lags && !(lags <= step + 1 && one->resets && ((const uint8_t *)one->resets)[row - lags + 1]))
        lags++;
    return lags;
}

/* The input `lag` steps before a row. */
INLINE const REAL *NAME(input_before)(const struct temporal_convolution *one, int64_t row, int64_t lag)
{
    const int64_t step = row % one->steps, taps = one->lags - 1;
    if (lag <= step)
        return (const REAL *)one->inputs + (row - lag) * one->width;
    return (const REAL *)one->taps + (row / one->steps * taps + taps + step - lag) * one->width;
}

/* The row in `last` of a row's input; negative where it is not one of the last. */
INLINE int64_t NAME(place_in_last)(const struct temporal_convolution *one, int64_t row)
{
    const int64_t count = LESS(one->lags - 1, one->steps), left = one->steps - row % one->steps;
    return left > count ? -1 : (row / one->steps + 1) * count - left;
}

TARGET static void NAME(temporal_convolution)(const struct temporal_convolution *one, int64_t first, int64_t end)
{
    const int64_t width = one->width;
    const REAL *weight = (const REAL *)one->weight;
    for (int64_t row = first; row < end; row++) {
        const int64_t step = row % one->steps, lags = NAME(lags_back)(one, row, step), place = NAME(place_in_last)(one, row);
        READ_ROW(inputs);
        WRITE_ROW(to);
        if (one->last && place >= 0)
            memcpy((REAL *)one->last + place * width, inputs, width * sizeof(REAL));
        for (int64_t lag = 0; lag < lags; lag++) {
            const REAL *x = NAME(input_before)(one, row, lag), *factor = weight + lag * width;
            EACH_VECTOR
                PUT(to, (lag ? OF(to) : (VECTOR){0}) + OF(factor) * OF(x));
        }
    }
}

/* The gradient of the input of a step, which may be before the block: Σ_k w_k ∘ the gradient of step + k. */
TARGET static void NAME(input_gradient)(
    const struct temporal_convolution *one, int64_t stream, int64_t step, REAL *to)
{
    const int64_t width = one->width, row = stream * one->steps + step;
    const REAL *weight = (const REAL *)one->weight, *grads = (const REAL *)one->grad;
    const uint8_t *resets = (const uint8_t *)one->resets;
    int written = 0;
    for (int64_t lag = 0; lag < one->lags && step + lag < one->steps; lag++) {
        if (step + lag < 0)
            continue;
        if (lag && resets && resets[row + lag])
            break;
        const REAL *grad = grads + (row + lag) * width, *factor = weight + lag * width;
        EACH_VECTOR
            PUT(to, (written ? OF(to) : (VECTOR){0}) + OF(factor) * OF(grad));
        written = 1;
    }
    if (!written)
        memset(to, 0, width * sizeof(REAL));
}

/* The rows' sums for the weights are one matrix of `grad_weight`. */
TARGET static void NAME(temporal_convolution_backward)(
    const struct temporal_convolution *one, int64_t first, int64_t end)
{
    const int64_t width = one->width, taps = one->lags - 1;
    REAL *grad_weights = (REAL *)one->grad_weight + first / CHUNK * one->lags * width;
    memset(grad_weights, 0, one->lags * width * sizeof(REAL));
    for (int64_t row = first; row < end; row++) {
        const int64_t stream = row / one->steps, step = row % one->steps, lags = NAME(lags_back)(one, row, step);
        READ_ROW(grad);
        WRITE_ROW(grad_inputs);
        NAME(input_gradient)(one, stream, step, grad_inputs);
        const int64_t place = NAME(place_in_last)(one, row);
        if (one->grad_last && place >= 0) {
            const REAL *grad_last = (const REAL *)one->grad_last + place * width;
            EACH_VECTOR
                PUT(grad_inputs, OF(grad_inputs) + OF(grad_last));
        }
        if (step == 0)
            for (int64_t tap = 0; tap < taps; tap++)
                NAME(input_gradient)(one, stream, tap - taps, (REAL *)one->grad_taps + (stream * taps + tap) * width);
        for (int64_t lag = 0; lag < lags; lag++) {
            const REAL *x = NAME(input_before)(one, row, lag);
            REAL *grad_weight = grad_weights + lag * width;
            EACH_VECTOR
                PUT(grad_weight, OF(grad_weight) + OF(grad) * OF(x));
        }
    }
}
