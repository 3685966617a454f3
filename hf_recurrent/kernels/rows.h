/* Operations on the rows of a stream: norms, sums, softmax, attention, embeddings. */

/* to = (x - mean) / sqrt(variance + eps), or without the mean, times the weight and plus the bias if there are. */
TARGET static void NAME(norm)(
    int64_t width, int64_t center, REAL *to, const REAL *x, const REAL *weight, const REAL *bias, REAL eps)
{
    const int64_t whole = width / LANES * LANES, pairs = width / (2 * LANES) * (2 * LANES);
    REAL mean = 0, squares = 0;
    VECTOR sums = {0}, others = {0}; /* two, because each addition waits for the one before */
    if (center) {
        for (int64_t i = 0; i < pairs; i += 2 * LANES) {
            sums += READ(x + i);
            others += READ(x + i + LANES);
        }
        if (pairs < whole)
            sums += READ(x + pairs);
        sums += others;
        mean = NAME(sum)(&sums);
        for (int64_t i = whole; i < width; i++)
            mean += x[i];
        mean /= width;
        sums = others = (VECTOR){0};
    }
    for (int64_t i = 0; i < pairs; i += 2 * LANES) {
        sums += (READ(x + i) - mean) * (READ(x + i) - mean);
        others += (READ(x + i + LANES) - mean) * (READ(x + i + LANES) - mean);
    }
    if (pairs < whole)
        sums += (READ(x + pairs) - mean) * (READ(x + pairs) - mean);
    sums += others;
    squares = NAME(sum)(&sums);
    for (int64_t i = whole; i < width; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    const REAL scale = 1 / MATH(sqrt)(squares / width + eps);
    if (weight)
        for (int64_t i = 0; i < width; i++)
            to[i] = (x[i] - mean) * scale * weight[i];
    else
        for (int64_t i = 0; i < width; i++)
            to[i] = (x[i] - mean) * scale;
    if (bias)
        for (int64_t i = 0; i < width; i++)
            to[i] += bias[i];
}

INLINE TARGET REAL NAME(dot)(int64_t width, const REAL *x, const REAL *y)
{
    const int64_t whole = width / LANES * LANES;
    VECTOR sums = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        sums += READ(x + i) * READ(y + i);
    REAL total = NAME(sum)(&sums);
    for (int64_t i = whole; i < width; i++)
        total += x[i] * y[i];
    return total;
}

TARGET static void NAME(softmax)(int64_t width, REAL *to, const REAL *x)
{
    REAL most = -INFINITY, total = 0;
    for (int64_t i = 0; i < width; i++)
        most = x[i] > most ? x[i] : most;
    const REAL shift = most == -INFINITY ? 0 : most; /* exp(-infinity) is 0 */
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t count = width - i < LANES ? width - i : LANES;
        VECTOR lanes = {0};
        memcpy(&lanes, x + i, count * sizeof(REAL));
        lanes = NAME(exp_of)(lanes - shift);
        memcpy(to + i, &lanes, count * sizeof(REAL));
    }
    for (int64_t i = 0; i < width; i++)
        total += to[i];
    for (int64_t i = 0; i < width; i++)
        to[i] /= total;
}

TARGET static void NAME(attention)(
    const struct attention *one, const REAL *q, const REAL *k, const REAL *v, const REAL *mask, REAL *scores, REAL *to)
{
    const int64_t width = one->width, whole = width / LANES * LANES;
    for (int64_t head = 0; head < one->heads; head++)
        for (int64_t i = 0; i < one->queries; i++) {
            const REAL *query = q + (head * one->queries + i) * width;
            REAL *output = to + (head * one->queries + i) * width;
            for (int64_t j = 0; j < one->keys; j++) {
                scores[j] = NAME(dot)(width, query, k + (head * one->keys + j) * width) * (REAL)one->scale;
                if (one->causal && j > i)
                    scores[j] = -INFINITY;
                if (mask)
                    scores[j] += mask[(head * one->queries + i) * one->keys + j];
            }
            NAME(softmax)(one->keys, scores, scores);
            const REAL *values = v + head * one->keys * width;
            for (int64_t n = 0; n < whole; n += LANES) {
                VECTOR total = {0};
                for (int64_t j = 0; j < one->keys; j++)
                    total += scores[j] * READ(values + j * width + n);
                AT(output + n) = total;
            }
            for (int64_t n = whole; n < width; n++) {
                output[n] = 0;
                for (int64_t j = 0; j < one->keys; j++)
                    output[n] += scores[j] * values[j * width + n];
            }
        }
}

TARGET static void NAME(reduce)(const struct reduce *one, const REAL *x, REAL *to)
{
    const int64_t inner = one->inner, count = one->count;
    const REAL sign = one->kind == MINIMUM ? -1 : 1;
    for (int64_t outer = 0; outer < one->outer; outer++, x += count * inner, to += inner) {
        if (inner == 1 && one->kind <= MEAN) {
            VECTOR sums = {0};
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES)
                sums += READ(x + i);
            to[0] = NAME(sum)(&sums);
            for (; i < count; i++)
                to[0] += x[i];
        } else
            for (int64_t i = 0; i < inner; i++) {
                to[i] = x[i];
                for (int64_t k = 1; k < count; k++) {
                    const REAL next = x[k * inner + i];
                    if (one->kind <= MEAN)
                        to[i] += next;
                    else if (sign * next > sign * to[i] || next != next)
                        to[i] = next;
                }
            }
        if (one->kind == MEAN)
            for (int64_t i = 0; i < inner; i++)
                to[i] /= count;
    }
}

TARGET static void NAME(product)(const struct product *one, const REAL *a, const REAL *b, REAL *to)
{
    for (int64_t m = 0; m < one->matrices; m++, b += one->depth * one->width)
        for (int64_t row = 0; row < one->rows; row++, a += one->depth, to += one->width) {
            for (int64_t n = 0; n < one->width; n++)
                to[n] = 0;
            for (int64_t k = 0; k < one->depth; k++)
                for (int64_t n = 0; n < one->width; n++)
                    to[n] += a[k] * b[k * one->width + n];
        }
}

#if IS_FLOAT
/* The largest |x| becomes `most`, so small that no sum of products with int8 values overflows 32 bits in 4 lanes. */
TARGET static void NAME(quantize)(int64_t width, const float *x, int16_t *to, float *scale)
{
    int64_t most = ((int64_t)1 << 33) / (127 * width);
    most = most > 32767 ? 32767 : most;
    const int64_t whole = width / LANES * LANES;
    VECTOR sizes = {0};
    INTEGERS is_nan = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        const VECTOR size = (VECTOR)((INTEGERS)READ(x + i) & INT32_MAX);
        sizes = SELECT(size > sizes, size, sizes);
        is_nan |= size != size;
    }
    float largest = 0;
    int has_nan = 0;
    for (int i = 0; i < LANES; i++) {
        largest = sizes[i] > largest ? sizes[i] : largest;
        has_nan |= is_nan[i] != 0;
    }
    for (int64_t i = whole; i < width; i++) {
        largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        has_nan |= x[i] != x[i];
    }
    largest = has_nan ? NAN : largest;
    if (!(largest > 1e-30f && largest < INFINITY)) { /* zeros stay zeros, and NaN reaches every output */
        memset(to, 0, width * sizeof *to);
        *scale = largest <= 1e-30f ? 0 : NAN;
        for (int64_t i = 0; i < width && *scale != *scale; i++)
            to[i] = 1;
        return;
    }
    const float factor = (float)most / largest;
    *scale = largest / (float)most;
    for (int64_t i = 0; i < whole; i += LANES) {
        const VECTOR rounded = (READ(x + i) * factor + 12582912) - 12582912; /* 1.5 * 2^23 */
        *(NAME(shorts) *)(to + i) = __builtin_convertvector(rounded, NAME(shorts));
    }
    for (int64_t i = whole; i < width; i++)
        to[i] = (int16_t)rintf(x[i] * factor);
}
#endif

TARGET static void NAME(embedding)(const struct embedding *one, const void *table, const REAL *scale, int64_t id, REAL *to)
{
    const int64_t begin = id * one->pitch;
#if IS_FLOAT
    if (one->type == BFLOAT16) {
        for (int64_t i = 0; i < one->width; i++) {
            const int64_t half = PAIR_BLOCK / 2, offset = i / PAIR_BLOCK * PAIR_BLOCK + i % half * 2 + i / half % 2;
            const uint32_t bits = (uint32_t)((const uint16_t *)table)[begin + offset] << 16;
            memcpy(to + i, &bits, sizeof bits);
        }
        return;
    }
    if (one->type == INT8) {
        for (int64_t i = 0; i < one->width; i++)
            to[i] = ((const int8_t *)table)[begin + i] * scale[id];
        return;
    }
#endif
    (void)scale;
    memcpy(to, (const REAL *)table + begin, one->width * sizeof(REAL));
}

/* The rows of n-grams of several windows, one after another; a value that is not an id counts as no byte. */
TARGET static void NAME(ngrams)(
    const struct ngrams *one, const void *table, const REAL *scale, const int64_t *factors, const int64_t *lengths,
    const REAL *window, REAL *to)
{
    const struct embedding row = {one->width, one->pitch, one->type, {0}, {0}, {0}, {0}};
    for (int64_t step = 0; step < one->steps; step++, window += one->length) {
        uint64_t sum = 0;
        int64_t lag = 0;
        for (int64_t order = 0; order < one->orders; order++, to += one->width) {
            for (; lag < lengths[order]; lag++) {
                const REAL id = window[one->length - 1 - lag];
                if (id >= 1 && id <= MOST_NGRAM_ID)
                    sum += (uint64_t)factors[lag] * (uint64_t)id;
            }
            NAME(embedding)(&row, table, scale, order * one->rows + (int64_t)(sum % NGRAM_MODULUS) % one->rows, to);
        }
    }
}
