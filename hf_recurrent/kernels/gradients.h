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

/* to (rows, n) = a b^T. A function of its own, so that each product is rounded before something is added. */
__attribute__((noinline)) TARGET static void NAME(outer)(
    int64_t rows, int64_t n, const REAL *restrict a, const REAL *restrict b, REAL *restrict to)
{
    for (int64_t row = 0; row < rows; row++, to += n)
        for (int64_t i = 0; i < n; i++)
            to[i] = a[row] * b[i];
}

/* The squares of an outer product add up to the product of two sums; infinite where one of its elements may be. */
TARGET static double NAME(squares_of_product)(const struct parameter *parameter)
{
    const REAL *vectors[2] = {(const REAL *)parameter->rows, (const REAL *)parameter->columns};
    const int64_t sizes[2] = {parameter->count / parameter->width, parameter->width};
    double product = 1;
    for (int vector = 0; vector < 2; vector++) {
        const int64_t n = sizes[vector], whole = n / LANES * LANES;
        const REAL *x = vectors[vector];
        double sums[LANES] = {0}, total = 0;
        for (int64_t i = 0; i < whole; i += LANES)
            for (int64_t lane = 0; lane < LANES; lane++)
                sums[lane] += (double)x[i + lane] * x[i + lane];
        for (int64_t i = whole; i < n; i++)
            total += (double)x[i] * x[i];
        for (int64_t lane = 0; lane < LANES; lane++)
            total += sums[lane];
        product *= total;
    }
    return (REAL)product;
}

/* Of all gradients, one after another, in blocks that do not depend on where a parameter ends. */
TARGET static double NAME(squares)(const struct parameter *parameters, int64_t count)
{
    REAL block[SUM_BLOCK];
    int64_t filled = 0;
    double total = 0;
    for (const struct parameter *one = parameters; one < parameters + count; one++) {
        if (one->rows) {
            total += NAME(squares_of_product)(one);
            continue;
        }
        for (int64_t first = 0, n; first < one->count; first += n) {
            n = one->count - first < SUM_BLOCK - filled ? one->count - first : SUM_BLOCK - filled;
            const REAL *x = (const REAL *)one->gradient + first;
            if (n < SUM_BLOCK) {
                memcpy(block + filled, x, n * sizeof(REAL));
                x = block;
            }
            filled = (filled + n) % SUM_BLOCK;
            if (!filled)
                total += NAME(sum_of_products)(SUM_BLOCK, x, x);
        }
    }
    return total + NAME(sum_of_products)(filled, block, block);
}

/* `n` elements of a parameter, whose gradient is `gradient`, or with `is_product` `factor` times that. */
INLINE TARGET void NAME(change_row)(
    const int is_product, const struct update *update, double learning_rate, int64_t n, REAL factor,
    const REAL *restrict gradient, REAL *restrict w, REAL *restrict first, REAL *restrict second)
{
    const REAL scale = (REAL)update->scale, eps = (REAL)update->eps, keep = (REAL)update->beta2;
    const REAL add = (REAL)(1 - update->beta2);
    if (update->kind == 0) {
        const REAL mix = (REAL)(1 - update->beta1), rate = (REAL)(learning_rate / update->correction1);
        const REAL root = (REAL)(1 / sqrt(update->correction2));
        for (int64_t i = 0; i < n; i++) {
            const REAL g = (is_product ? factor * gradient[i] : gradient[i]) * scale;
            first[i] += mix * (g - first[i]);
            second[i] = keep * second[i] + add * g * g;
            w[i] -= rate * first[i] / (MATH(sqrt)(second[i]) * root + eps);
        }
    } else {
        const REAL rate = (REAL)learning_rate;
        for (int64_t i = 0; i < n; i++) {
            const REAL g = (is_product ? factor * gradient[i] : gradient[i]) * scale;
            second[i] = keep * second[i] + add * g * g;
            w[i] -= rate * g / (MATH(sqrt)(second[i]) + eps);
        }
    }
}

TARGET static void NAME(change)(const struct update *update, const struct parameter *parameter)
{
    const int64_t n = parameter->count, width = parameter->width;
    const double rate = parameter->learning_rate;
    REAL *w = (REAL *)parameter->weights, *first = (REAL *)parameter->first, *second = (REAL *)parameter->second;
    const REAL *rows = (const REAL *)parameter->rows, *columns = (const REAL *)parameter->columns;
    if (!rows)
        NAME(change_row)(0, update, rate, n, 1, (const REAL *)parameter->gradient, w, first, second);
    else
        for (int64_t i = 0; i < n; i += width)
            NAME(change_row)(1, update, rate, width, *rows++, columns, w + i, first ? first + i : 0, second + i);
}

/* ---- Tables of which a block reads some rows ---- */

TARGET static int64_t NAME(tables_are_finite)(const struct blocks *blocks)
{
    double total = 0;
    for (const struct trained_table *one = blocks->trained_tables; one < blocks->trained_tables + blocks->tables; one++)
        for (int64_t i = 0; i < blocks->step_count * one->width; i++)
            total += ((const REAL *)one->gradient)[i];
    return total - total == 0;
}

/* Each row changes by the sum of the gradients of the steps that read it. */
TARGET static void NAME(change_tables)(const struct blocks *blocks)
{
    const int64_t *rows = blocks->rows, *steps = blocks->steps;
    for (const struct trained_table *one = blocks->trained_tables; one < blocks->trained_tables + blocks->tables; one++)
        for (int64_t at = 0, next; at < blocks->lookups; at = next) {
            const int64_t width = one->width;
            REAL *to = (REAL *)one->gradient + steps[at] * width;
            for (next = at + 1; next < blocks->lookups && rows[next] == rows[at]; next++)
                ;
            REAL sums[next - at > 1 ? width : 1];
            if (next - at > 1) {
                memcpy(sums, to, width * sizeof(REAL));
                for (int64_t k = at + 1; k < next; k++)
                    for (int64_t i = 0; i < width; i++)
                        sums[i] += ((const REAL *)one->gradient + steps[k] * width)[i];
                to = sums;
            }
            NAME(adagrad_row)(
                width, to, (REAL *)one->table + rows[at] * width, (REAL *)one->row_sums + rows[at], (REAL)one->rate,
                (REAL)one->eps);
        }
}
