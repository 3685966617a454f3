"""Functions in C that an exported step calls."""

import re
from collections.abc import Mapping

# Only those in use are written, after those that they call; NAME_ becomes the prefix of the file's names.
HELPERS = {
    "sigmoid": "static float NAME_sigmoid(float x) {\n    return 1.0f / (1.0f + expf(-x));\n}",
    "softplus": "static float NAME_softplus(float x) {\n    return x > 20.0f ? x : log1pf(expf(x));\n}",
    "gelu": ("static float NAME_gelu(float x) {\n    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));\n}"),
    "quantize": """/* x as 16-bit integers times scale[0]; the largest is `most`, so that sums of products fit. */
static void NAME_quantize(const float *x, float most, int16_t *y, float *scale, int size) {
    float largest = 0.0f;
    int finite = 1;
    for (int i = 0; i < size; i++) {
        const float magnitude = fabsf(x[i]);
        finite &= magnitude < INFINITY;
        if (magnitude > largest) largest = magnitude;
    }
    if (!finite || !(largest > 1e-30f)) { /* NaN reaches every output */
        for (int i = 0; i < size; i++) y[i] = (int16_t)!finite;
        *scale = finite ? 0.0f : NAN;
        return;
    }
    const float factor = most / largest;
    *scale = largest / most;
    /* 1.5 * 2^23 rounds to an integer; rintf would be a call for each element. */
    for (int i = 0; i < size; i++) y[i] = (int16_t)(x[i] * factor + 12582912.0f - 12582912.0f);
}""",
    "linear": """/* y = scale * (table x) + bias, where there is one; -O2 vectorizes a loop of fixed length. */
static void NAME_linear(const int8_t *table, const float *scale, const float *bias, const int16_t *x,
                        const float *x_scale, float *y, int outputs, int inputs) {
    for (int k = 0; k < outputs; k++, table += inputs) {
        int64_t total = 0;
        int i = 0;
        for (; i + 64 <= inputs; i += 64) {
            const int8_t *row = table + i;
            const int16_t *part = x + i;
            int32_t sum = 0;
            for (int j = 0; j < 64; j++) sum += (int16_t)row[j] * part[j];
            total += sum;
        }
        for (i = inputs - inputs % 64; i < inputs; i++) total += (int32_t)table[i] * x[i];
        y[k] = (float)total * (*x_scale * scale[k]) + (bias ? bias[k] : 0.0f);
    }
}""",
    "dot": """/* Eight partial sums, which compilers may keep in one vector. */
static float NAME_dot(const float *x, const float *y, int size) {
    float sums[8] = {0.0f}, total = 0.0f;
    int i = 0;
    for (; i + 8 <= size; i += 8) {
        for (int k = 0; k < 8; k++) sums[k] += x[i + k] * y[i + k];
    }
    for (i = size - size % 8; i < size; i++) total += x[i] * y[i];
    for (int k = 0; k < 8; k++) total += sums[k];
    return total;
}""",
    "sum": """static float NAME_sum(const float *x, int size) {
    float sums[8] = {0.0f}, total = 0.0f;
    int i = 0;
    for (; i + 8 <= size; i += 8) {
        for (int k = 0; k < 8; k++) sums[k] += x[i + k];
    }
    for (i = size - size % 8; i < size; i++) total += x[i];
    for (int k = 0; k < 8; k++) total += sums[k];
    return total;
}""",
    "layer_norm": """/* Mean 0 and variance 1, then weight and bias, where there are any. */
static void NAME_layer_norm(const float *weight, const float *bias, float eps, const float *x, float *y, int size) {
    const float mean = NAME_sum(x, size) / (float)size;
    for (int i = 0; i < size; i++) y[i] = x[i] - mean;
    const float factor = 1.0f / sqrtf(NAME_dot(y, y, size) / (float)size + eps);
    for (int i = 0; i < size; i++) y[i] = y[i] * factor * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f);
}""",
    "rms_norm": """/* Mean square 1, then weight, where there is one. */
static void NAME_rms_norm(const float *weight, const float *bias, float eps, const float *x, float *y, int size) {
    (void)bias;
    const float factor = 1.0f / sqrtf(NAME_dot(x, x, size) / (float)size + eps);
    for (int i = 0; i < size; i++) y[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}""",
    "softmax": """static void NAME_softmax(const float *x, float *y, int size) {
    float most = x[0], total = 0.0f;
    for (int i = 1; i < size; i++) most = fmaxf(most, x[i]);
    for (int i = 0; i < size; i++) total += y[i] = expf(x[i] - most);
    for (int i = 0; i < size; i++) y[i] /= total;
}""",
    "product": """/* y (rows, width) = a (rows, depth) times b (depth, width). */
static void NAME_product(const float *a, const float *b, float *y, int rows, int depth, int width) {
    for (int row = 0; row < rows; row++, y += width) {
        for (int i = 0; i < width; i++) y[i] = 0.0f;
        for (int k = 0; k < depth; k++) {
            for (int i = 0; i < width; i++) y[i] += a[row * depth + k] * b[k * width + i];
        }
    }
}""",
    "attend": """/* One query over all keys; mask, where there is one, is added to the scores. */
static void NAME_attend(const float *q, const float *k, const float *v, const float *mask, float scale, float *scores,
                        float *y, int keys, int width) {
    for (int j = 0; j < keys; j++) {
        scores[j] = NAME_dot(q, k + j * width, width) * scale + (mask ? mask[j] : 0.0f);
    }
    NAME_softmax(scores, scores, keys);
    for (int i = 0; i < width; i++) y[i] = 0.0f;
    for (int j = 0; j < keys; j++) {
        for (int i = 0; i < width; i++) y[i] += scores[j] * v[j * width + i];
    }
}""",
    "ngrams": """/* Rows of a table at the hashes of the last bytes: a window of ids + 1, newest last, 0 for none. */
static void NAME_ngrams(const int8_t *table, const float *scale, const uint32_t *factors, const uint16_t *lengths,
                        const float *window, float *y, int orders, int rows, int length, int width) {
    uint64_t sum = 0;
    for (int order = 0, lag = 0; order < orders; order++) {
        for (; lag < lengths[order]; lag++) {
            const float id = window[length - 1 - lag];
            if (id >= 1.0f && id <= 16777216.0f) sum += (uint64_t)factors[lag] * (uint64_t)id;
        }
        const long row = order * (long)rows + (long)(sum % 2147483647u % (uint64_t)rows);
        for (int i = 0; i < width; i++) y[order * width + i] = scale[row] * (float)table[row * width + i];
    }
}""",
    "wide": """/* The float of a half-precision number. */
static float NAME_wide(uint16_t half) {
    const float sign = half & 0x8000 ? -1.0f : 1.0f;
    const int exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 0) return sign * ldexpf((float)fraction, -24);
    return sign * ldexpf((float)(fraction + 1024), exponent - 25);
}""",
    "narrow": """/* The nearest half-precision number, ties to even; the largest one for those beyond. */
static uint16_t NAME_narrow(float x) {
    const uint16_t sign = x < 0.0f ? 0x8000 : 0;
    int exponent = -13; /* of numbers below 2^-14, zero among them */
    x = fabsf(x);
    if (!(x < 65504.0f)) return (uint16_t)(sign | 0x7bff);
    if (x >= 6.103515625e-05f) (void)frexpf(x, &exponent);
    const float scaled = ldexpf(x, 11 - exponent);
    int rounded = (int)scaled;
    const float rest = scaled - (float)rounded;
    if (rest > 0.5f || (rest == 0.5f && (rounded & 1))) rounded++;
    /* A fraction of 2048 carries into the exponent. */
    return (uint16_t)(sign | (rounded + ((exponent + 13) << 10)));
}""",
}


def helpers_of(text: str, helpers: Mapping[str, str] = HELPERS) -> list[str]:
    """The functions that C text calls, and those that these call, in the order of `helpers`."""
    found = text
    names: set[str] = set()
    while new := {name for name in helpers if re.search(rf"NAME_{name}\(", found)} - names:
        names |= new
        found = "\n".join(helpers[name] for name in new)
    return [text for name, text in helpers.items() if name in names]
