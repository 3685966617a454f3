/* The backward pass of a norm, and the update of the weights. */
#define SUM_BLOCK 1024 /* squares that are summed in the type of the elements */

INLINE TARGET REAL NAME(sum_of)(int64_t n, const REAL *x)
{
    const int64_t whole = n / LANES * LANES;
    VECTOR sums = {0};
    REAL total = 0;
    for (int64_t i = 0; i < whole; i += LANES)
        sums += READ(x + i);
    for (int64_t i = 0; i < LANES; i++)
        total += sums[i];
    for (int64_t i = whole; i < n; i++)
        total += x[i];
    return total;
}

INLINE TARGET REAL NAME(sum_of_products)(int64_t n, const REAL *x, const REAL *y)
{
    const int64_t whole = n / LANES * LANES;
    VECTOR sums = {0};
    REAL total = 0;
    for (int64_t i = 0; i < whole; i += LANES)
        sums += READ(x + i) * READ(y + i);
    for (int64_t i = 0; i < LANES; i++)
        total += sums[i];
    for (int64_t i = whole; i < n; i++)
        total += x[i] * y[i];
    return total;
}

TARGET static void NAME(norm_backward)(const struct norm_backward *one, void *const *bases)
{
    const int64_t n = one->width;
    for (int64_t row = 0; row < one->count; row++) {
        const REAL *x = AT_ONE(x) + row * n, *grad = AT_ONE(grad) + row * n;
        REAL *to = AT_ONE(to) + row * n;
        const REAL mean = NAME(sum_of)(n, x) / n;
        for (int64_t i = 0; i < n; i++)
            to[i] = x[i] - mean;
        const REAL scale = 1 / MATH(sqrt)(NAME(sum_of_products)(n, to, to) / n + (REAL)one->eps);
        const REAL of_mean = NAME(sum_of)(n, grad) / n;
        const REAL of_scale = NAME(sum_of_products)(n, to, grad) / n * scale * scale;
        for (int64_t i = 0; i < n; i++)
            to[i] = scale * (grad[i] - of_mean - to[i] * of_scale);
    }
}

TARGET static double NAME(squares)(int64_t count, const void *elements)
{
    const REAL *x = elements;
    double total = 0;
    for (int64_t begin = 0; begin < count; begin += SUM_BLOCK)
        total += NAME(sum_of_products)(count - begin < SUM_BLOCK ? count - begin : SUM_BLOCK, x + begin, x + begin);
    return total;
}

TARGET static void NAME(change)(const struct update *update, const struct parameter *parameter)
{
    const int64_t n = parameter->count;
    REAL *restrict w = (REAL *)parameter->weights, *restrict first = (REAL *)parameter->first;
    REAL *restrict second = (REAL *)parameter->second;
    const REAL *restrict gradient = (const REAL *)parameter->gradient;
    const REAL scale = (REAL)update->scale, eps = (REAL)update->eps, keep = (REAL)update->beta2;
    const REAL add = (REAL)(1 - update->beta2);
    if (update->kind == 0) {
        const REAL mix = (REAL)(1 - update->beta1), rate = (REAL)(parameter->learning_rate / update->correction1);
        const REAL root = (REAL)(1 / sqrt(update->correction2));
        for (int64_t i = 0; i < n; i++) {
            const REAL g = gradient[i] * scale;
            first[i] += mix * (g - first[i]);
            second[i] = keep * second[i] + add * g * g;
            w[i] -= rate * first[i] / (MATH(sqrt)(second[i]) * root + eps);
        }
    } else {
        const REAL rate = (REAL)parameter->learning_rate;
        for (int64_t i = 0; i < n; i++) {
            const REAL g = gradient[i] * scale;
            second[i] = keep * second[i] + add * g * g;
            w[i] -= rate * g / (MATH(sqrt)(second[i]) + eps);
        }
    }
}
