/* The element-wise parts of a layer, forward and backward, row by row: a row stays in the inner cache. */
#define EACH_VECTOR for (int64_t i = 0, left = width; left > 0; i += LANES, left -= LANES)
#define OF(pointer) NAME(load)((pointer) + i, left)
#define PUT(pointer, x) NAME(store)((pointer) + i, x, left)
#define READ_ROW(name) const REAL *name = (const REAL *)one->name + row * width
#define WRITE_ROW(name) REAL *name = (REAL *)one->name + row * width

/* A product that is not fused with the addition after it, whatever the compiler: the same bits as in earlier builds. */
#undef ROUNDED
#if LEVEL_NUMBER == 2
#define ROUNDED(x) __asm__("" : "+v"(x))
#else
#define ROUNDED(x)
#endif

INLINE TARGET REAL NAME(scale_of)(REAL variance, REAL eps)
{
    return 1 / MATH(sqrt)(variance + eps);
}

/* 1 / x, and sqrt(x) with its reciprocal, of positive numbers, where neither these nor the results are denormal. With
 * AVX-512 by an estimate of 14 bits and a step of Newton's method, because a division of a vector takes 16 cycles. */
#if IS_FLOAT && LEVEL_NUMBER == 2
INLINE TARGET VECTOR NAME(reciprocal)(VECTOR x)
{
    const VECTOR y = (VECTOR)_mm512_rcp14_ps((__m512)x);
    return y + y * (1 - x * y);
}

INLINE TARGET VECTOR NAME(root)(VECTOR x, VECTOR *reciprocal)
{
    const VECTOR y = (VECTOR)_mm512_rsqrt14_ps((__m512)x);
    *reciprocal = y + y * 0.5f * (1 - x * y * y);
    return x * *reciprocal;
}
#else
INLINE TARGET VECTOR NAME(reciprocal)(VECTOR x)
{
    return 1 / x;
}

INLINE TARGET VECTOR NAME(root)(VECTOR x, VECTOR *reciprocal)
{
    VECTOR root = x;
    NAME(square_root)(&root);
    *reciprocal = 1 / root;
#if IS_FLOAT && LEVEL_NUMBER == 1
    return root;
#else
    return x * *reciprocal; /* the same bits as in earlier builds */
#endif
}
#endif

#define TOGETHER 4 /* rows whose sums are added up side by side, because each addition waits for the one before */

/* Mean and 1 / standard deviation of `rows` rows, in two numbers of every six. */
INLINE TARGET void NAME(moments_of)(const int rows, int64_t width, const REAL *x, REAL eps, REAL *moments)
{
    VECTOR sums[TOGETHER], squares[TOGETHER];
    UNROLL
    for (int r = 0; r < rows; r++)
        sums[r] = squares[r] = (VECTOR){0};
    EACH_VECTOR
        UNROLL
        for (int r = 0; r < rows; r++)
            sums[r] += OF(x + r * width);
    UNROLL
    for (int r = 0; r < rows; r++)
        moments[r * 6] = NAME(sum)(sums + r) / width;
    EACH_VECTOR
        UNROLL
        for (int r = 0; r < rows; r++) {
            const VECTOR centered = NAME(only)(OF(x + r * width) - moments[r * 6], left);
            squares[r] += centered * centered;
        }
    UNROLL
    for (int r = 0; r < rows; r++)
        moments[r * 6 + 1] = NAME(scale_of)(NAME(sum)(squares + r) / width, eps);
}

TARGET static void NAME(moments)(int64_t rows, int64_t width, const REAL *x, REAL eps, REAL *moments)
{
    if (rows == TOGETHER)
        NAME(moments_of)(TOGETHER, width, x, eps, moments);
    else
        for (int64_t row = 0; row < rows; row++)
            NAME(moments_of)(1, width, x + row * width, eps, moments + row * 6);
}

/* ---- LN( GeLU(LN(gate)) ∘ LN(value) ), as in modeling/block/gated_norm.py ---- */

TARGET static void NAME(gated_norm)(const struct gated_norm *one, int64_t first, int64_t end)
{
    const int64_t width = one->width;
    const REAL eps = (REAL)one->eps;
    for (int64_t begin = first; begin < end; begin += TOGETHER) {
        const int64_t stop = begin + TOGETHER < end ? begin + TOGETHER : end;
        REAL *moments = (REAL *)one->moments + begin * 6;
        NAME(moments)(stop - begin, width, (const REAL *)one->gate + begin * width, eps, moments);
        NAME(moments)(stop - begin, width, (const REAL *)one->value + begin * width, eps, moments + 2);
        for (int64_t row = begin; row < stop; row++) {
            READ_ROW(gate);
            READ_ROW(value);
            WRITE_ROW(to);
            const REAL *m = (const REAL *)one->moments + row * 6;
            EACH_VECTOR
                PUT(to, NAME(opened_by)((OF(gate) - m[0]) * m[1]) * ((OF(value) - m[2]) * m[3]));
        }
        NAME(moments)(stop - begin, width, (const REAL *)one->to + begin * width, eps, moments + 4);
        for (int64_t row = begin; row < stop; row++) {
            WRITE_ROW(to);
            const REAL *m = (const REAL *)one->moments + row * 6;
            EACH_VECTOR
                PUT(to, (OF(to) - m[4]) * m[5]);
        }
    }
}

/* `to`: the output once more, where it is not 0. */
TARGET static void NAME(gated_norm_backward)(const struct gated_norm *one, int64_t first, int64_t end)
{
    const int64_t width = one->width;
    for (int64_t row = first; row < end; row++) {
        READ_ROW(gate);
        READ_ROW(value);
        READ_ROW(grad);
        WRITE_ROW(grad_gate);
        WRITE_ROW(grad_value);
        REAL *to = one->to ? (REAL *)one->to + row * width : NULL;
        const REAL *m = (const REAL *)one->moments + row * 6;
        VECTOR sums[4] = {{0}, {0}, {0}, {0}};
        EACH_VECTOR {
            const VECTOR normed = (OF(value) - m[2]) * m[3], of_output = OF(grad);
            VECTOR slope;
            const VECTOR opened = NAME(opened_and_slope)((OF(gate) - m[0]) * m[1], &slope);
            VECTOR product = opened * normed;
            ROUNDED(product);
            const VECTOR output = (product - m[4]) * m[5];
            sums[0] += of_output;
            sums[1] += of_output * NAME(only)(output, left);
            if (to)
                PUT(to, output);
            PUT(grad_value, opened);
            PUT(grad_gate, slope);
        }
        const REAL mean = NAME(sum)(sums) / width, projected = NAME(sum)(sums + 1) / width;
        sums[0] = sums[1] = (VECTOR){0};
        EACH_VECTOR {
            const VECTOR normed_gate = (OF(gate) - m[0]) * m[1], normed = (OF(value) - m[2]) * m[3];
            const VECTOR opened = OF(grad_value);
            const VECTOR of_product =
                NAME(only)(m[5] * (OF(grad) - mean - (opened * normed - m[4]) * m[5] * projected), left);
            const VECTOR of_gate = of_product * normed * OF(grad_gate), of_value = of_product * opened;
            sums[0] += of_gate;
            sums[1] += of_gate * normed_gate;
            sums[2] += of_value;
            sums[3] += of_value * normed;
            PUT(grad_gate, of_gate);
            PUT(grad_value, of_value);
        }
        REAL means[4];
        for (int i = 0; i < 4; i++)
            means[i] = NAME(sum)(sums + i) / width;
        EACH_VECTOR {
            const VECTOR normed_gate = (OF(gate) - m[0]) * m[1], normed = (OF(value) - m[2]) * m[3];
            PUT(grad_gate, m[1] * (OF(grad_gate) - means[0] - normed_gate * means[1]));
            PUT(grad_value, m[3] * (OF(grad_value) - means[2] - normed * means[3]));
        }
    }
}

/* ---- GeLU(gate) ∘ value ---- */

TARGET static void NAME(gated_gelu)(const struct gated_norm *one, int64_t first, int64_t end)
{
    const int64_t width = one->width;
    for (int64_t row = first; row < end; row++) {
        READ_ROW(gate);
        READ_ROW(value);
        WRITE_ROW(to);
        EACH_VECTOR
            PUT(to, NAME(opened_by)(OF(gate)) * OF(value));
    }
}

/* `to`: the output once more, where it is not 0. */
TARGET static void NAME(gated_gelu_backward)(const struct gated_norm *one, int64_t first, int64_t end)
{
    const int64_t width = one->width;
    for (int64_t row = first; row < end; row++) {
        READ_ROW(gate);
        READ_ROW(value);
        READ_ROW(grad);
        WRITE_ROW(grad_gate);
        WRITE_ROW(grad_value);
        REAL *to = one->to ? (REAL *)one->to + row * width : NULL;
        EACH_VECTOR {
            VECTOR slope;
            const VECTOR opened = NAME(opened_and_slope)(OF(gate), &slope), of_output = OF(grad);
            if (to)
                PUT(to, opened * OF(value));
            PUT(grad_value, of_output * opened);
            PUT(grad_gate, of_output * OF(value) * slope);
        }
    }
}

/* ---- Decay and scaled input of a gated unit, as in modeling/units/gate_coefficients.py ---- */

#define SMALLEST_SQUARED_GAMMA ((REAL)1e-12)

/* A pass that is compiled for input gates with and without a sigmoid. */
#define BOTH_INPUT_GATES(name, structure) \
    TARGET static void NAME(name)(const struct structure *one, int64_t first, int64_t end) \
    { \
        if (one->sigmoid_gate) \
            NAME(name##_of)(1, one, first, end); \
        else \
            NAME(name##_of)(0, one, first, end); \
    }

/* σ(z) */
INLINE TARGET VECTOR NAME(gate_of)(VECTOR z)
{
#if HAS_SHORT_EXPONENTIAL
    VECTOR n, opposite = -z;
    NAME(at_most)(&opposite, 87);
    const VECTOR of_opposite = NAME(rest_of_power)(opposite, &n);
    return NAME(reciprocal)(1 + NAME(scaled)(1 + of_opposite, n));
#else
    return NAME(sigmoid_of)(z);
#endif
}

/* σ(z), r = exp(-rate σ(z)) and γ² = 1 - r². */
INLINE TARGET VECTOR NAME(decay)(VECTOR z, VECTOR rate, VECTOR *power, VECTOR *squared)
{
    VECTOR less_one;
    const VECTOR gate = NAME(gate_of)(z);
#if HAS_SHORT_EXPONENTIAL
    VECTOR n;
    const VECTOR of_decay = NAME(rest_of_power)(-rate * gate, &n), scale = NAME(scaled)(ALL(1), n);
    const VECTOR rest = NAME(scaled)(of_decay, n);
    *power = scale + rest;
    less_one = rest + (scale - 1);
#else
    const VECTOR log_decay = -rate * gate;
    NAME(exponential)(&log_decay, power, &less_one);
#endif
    *squared = -less_one * (1 + *power); /* 1 - r² = (1 - r) (1 + r), without loss where r → 1 */
    return gate;
}

/* γ ∘ input_gate ∘ inputs, and the decay r. */
INLINE TARGET VECTOR NAME(scaled_inputs)(
    const int sigmoid_gate, VECTOR z, VECTOR rate, VECTOR input_gate, VECTOR inputs, VECTOR *power)
{
    VECTOR gamma, unused;
    if (sigmoid_gate)
        input_gate = NAME(gate_of)(input_gate);
    NAME(decay)(z, rate, power, &gamma);
    NAME(at_least)(&gamma, SMALLEST_SQUARED_GAMMA);
    return NAME(root)(gamma, &unused) * input_gate * inputs;
}

/* Gradients from those of the scaled inputs and of the decay: of z, input_gate and inputs; returns -1 times the rate's. */
INLINE TARGET VECTOR NAME(coefficient_gradients)(
    const int sigmoid_gate, VECTOR z, VECTOR rate, VECTOR input_gate, VECTOR inputs, VECTOR of_scaled, VECTOR of_decay, VECTOR *of_z,
    VECTOR *of_input_gate, VECTOR *of_inputs, VECTOR *power)
{
    VECTOR squared;
    const VECTOR gate = NAME(decay)(z, rate, power, &squared);
    if (sigmoid_gate)
        input_gate = NAME(gate_of)(input_gate);
    VECTOR bounded = squared, by_gamma;
    NAME(at_least)(&bounded, SMALLEST_SQUARED_GAMMA);
    const VECTOR gamma = NAME(root)(bounded, &by_gamma);
    *of_input_gate = of_scaled * gamma * inputs;
    if (sigmoid_gate)
        *of_input_gate *= input_gate * (1 - input_gate);
    *of_inputs = of_scaled * gamma * input_gate;
    /* dγ / d log r = -r² / γ */
    const VECTOR of_gamma = SELECT(
        squared < ALL(SMALLEST_SQUARED_GAMMA), ALL(0), of_scaled * input_gate * inputs * *power * by_gamma);
    const VECTOR of_log_decay = (of_decay - of_gamma) * *power * gate;
    *of_z = of_log_decay * rate * (gate - 1);
    return of_log_decay;
}

INLINE const REAL *NAME(rate_of)(const struct gate_coefficients *one, int64_t row)
{
    return (const REAL *)one->rate + (one->rates == 1 ? 0 : row * one->width);
}

INLINE TARGET void NAME(gate_coefficients_of)(
    const int sigmoid_gate, const struct gate_coefficients *one, int64_t first, int64_t end)
{
    const int64_t width = one->width;
    for (int64_t row = first; row < end; row++) {
        const REAL *rate = NAME(rate_of)(one, row);
        READ_ROW(recurrence_gate);
        READ_ROW(input_gate);
        READ_ROW(inputs);
        WRITE_ROW(decay);
        WRITE_ROW(scaled);
        EACH_VECTOR {
            VECTOR power;
            const VECTOR of_inputs = NAME(scaled_inputs)(
                sigmoid_gate, OF(recurrence_gate), OF(rate), OF(input_gate), OF(inputs), &power);
            PUT(decay, power);
            PUT(scaled, of_inputs);
        }
    }
}

BOTH_INPUT_GATES(gate_coefficients, gate_coefficients)

/* The rows' sum for the rate is one row of `grad_rate`; where each row has a rate, each has a gradient of it. */
INLINE TARGET void NAME(gate_coefficients_backward_of)(
    const int sigmoid_gate, const struct gate_coefficients *one, int64_t first, int64_t end)
{
    const int64_t width = one->width;
    for (int64_t row = first; row < end; row++) {
        const REAL *rate = NAME(rate_of)(one, row);
        REAL *grad_rate = (REAL *)one->grad_rate + (one->rates == 1 ? first / CHUNK : row) * width;
        if (row == first || one->rates > 1)
            memset(grad_rate, 0, width * sizeof(REAL));
        READ_ROW(recurrence_gate);
        READ_ROW(input_gate);
        READ_ROW(inputs);
        READ_ROW(grad_decay);
        READ_ROW(grad_scaled);
        WRITE_ROW(grad_recurrence_gate);
        WRITE_ROW(grad_input_gate);
        WRITE_ROW(grad_inputs);
        EACH_VECTOR {
            VECTOR power, of_z, of_opened, of_x;
            const VECTOR of_log_decay = NAME(coefficient_gradients)(
                sigmoid_gate, OF(recurrence_gate), OF(rate), OF(input_gate), OF(inputs), OF(grad_scaled),
                OF(grad_decay), &of_z, &of_opened, &of_x, &power);
            PUT(grad_input_gate, of_opened);
            PUT(grad_inputs, of_x);
            PUT(grad_rate, OF(grad_rate) - of_log_decay);
            PUT(grad_recurrence_gate, of_z);
        }
    }
}

BOTH_INPUT_GATES(gate_coefficients_backward, gate_coefficients)

/* ---- RMSNorm: weight ∘ x / sqrt(mean(x²) + eps) ---- */

INLINE TARGET VECTOR NAME(weight_at)(const REAL *weight, int64_t i, int64_t left)
{
    if (weight)
        return NAME(load)(weight + i, left);
    return ALL(1);
}

/* Of `rows` rows, whose sums are added up side by side. */
INLINE TARGET void NAME(rms_norm_of)(const int rows, const struct rms_norm *one, int64_t row)
{
    const int64_t width = one->width;
    const REAL *weight = (const REAL *)one->weight;
    READ_ROW(x);
    WRITE_ROW(to);
    VECTOR squares[TOGETHER];
    UNROLL
    for (int r = 0; r < rows; r++)
        squares[r] = (VECTOR){0};
    EACH_VECTOR
        UNROLL
        for (int r = 0; r < rows; r++)
            squares[r] += OF(x + r * width) * OF(x + r * width);
    UNROLL
    for (int r = 0; r < rows; r++)
        ((REAL *)one->scales)[row + r] = NAME(scale_of)(NAME(sum)(squares + r) / width, (REAL)one->eps);
    for (int r = 0; r < rows; r++, x += width, to += width) {
        const REAL scale = ((const REAL *)one->scales)[row + r];
        EACH_VECTOR
            PUT(to, OF(x) * scale * NAME(weight_at)(weight, i, left));
    }
}

TARGET static void NAME(rms_norm)(const struct rms_norm *one, int64_t first, int64_t end)
{
    for (; first + TOGETHER <= end; first += TOGETHER)
        NAME(rms_norm_of)(TOGETHER, one, first);
    for (; first < end; first++)
        NAME(rms_norm_of)(1, one, first);
}

/* The rows' sum for the weight is added to `grad_weight`, row by row. */
INLINE TARGET void NAME(rms_norm_backward_of)(
    const int rows, const struct rms_norm *one, int64_t row, REAL *grad_weight)
{
    const int64_t width = one->width;
    const REAL *weight = (const REAL *)one->weight, *scales = (const REAL *)one->scales + row;
    READ_ROW(x);
    READ_ROW(grad);
    WRITE_ROW(to);
    const REAL *plus = one->plus ? (const REAL *)one->plus + row * width : NULL;
    REAL *normed = one->normed ? (REAL *)one->normed + row * width : NULL;
    VECTOR projected[TOGETHER];
    UNROLL
    for (int r = 0; r < rows; r++)
        projected[r] = (VECTOR){0};
    EACH_VECTOR {
        const VECTOR factor = NAME(weight_at)(weight, i, left);
        VECTOR sum = {0};
        if (weight)
            sum = OF(grad_weight);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const VECTOR product = OF(grad + r * width) * OF(x + r * width) * scales[r];
            sum += product;
            VECTOR part = product * factor;
            ROUNDED(part);
            projected[r] += part;
        }
        if (weight)
            PUT(grad_weight, sum);
    }
    REAL means[TOGETHER];
    UNROLL
    for (int r = 0; r < rows; r++)
        means[r] = NAME(sum)(projected + r) / width * scales[r];
    for (int r = 0; r < rows; r++) {
        const REAL scale = scales[r], mean = means[r];
        EACH_VECTOR {
            const VECTOR factor = NAME(weight_at)(weight, i, left), input = OF(x);
            VECTOR of_norm = OF(grad) * factor;
            ROUNDED(of_norm);
            VECTOR of_x = scale * (of_norm - input * mean);
            ROUNDED(of_x);
            if (plus)
                of_x += OF(plus);
            if (normed)
                PUT(normed, input * scale * factor);
            PUT(to, of_x);
        }
        x += width, grad += width, to += width;
        plus = plus ? plus + width : NULL, normed = normed ? normed + width : NULL;
    }
}

/* The rows' sum for the weight is one row of `grad_weight`; `normed`: the output once more, where it is not 0. */
TARGET static void NAME(rms_norm_backward)(const struct rms_norm *one, int64_t first, int64_t end)
{
    REAL *grad_weight = one->weight ? (REAL *)one->grad_weight + first / CHUNK * one->width : NULL;
    if (grad_weight)
        memset(grad_weight, 0, one->width * sizeof(REAL));
    for (; first + TOGETHER <= end; first += TOGETHER)
        NAME(rms_norm_backward_of)(TOGETHER, one, first, grad_weight);
    for (; first < end; first++)
        NAME(rms_norm_backward_of)(1, one, first, grad_weight);
}
