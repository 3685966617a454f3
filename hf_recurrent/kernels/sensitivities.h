/* The pass for one type of elements, NUMBER; NAME(x) is a name of this version. */

#define ELEMENTS ((int64_t)(LINE / sizeof(NUMBER))) /* of a line */
#define ASK_FOR(s) __builtin_prefetch((const char *)(s) + AHEAD)

/* Elements `first` to `end` of a row of one stream. Loops over a line stay loops, of which compilers make vectors. */
INLINE void NAME(of_one)(
    int64_t first, int64_t end, NUMBER *restrict s, NUMBER *restrict gradient, const NUMBER *restrict x, NUMBER j,
    NUMBER e, NUMBER d)
{
#pragma GCC unroll 1
    for (int64_t i = first; i < end; i++) {
        const NUMBER before = s[i];
        gradient[i] += d * before;
        s[i] = j * before + e * x[i];
    }
}

VECTOR static void NAME(row)(
    int64_t n, NUMBER *restrict s, NUMBER *restrict gradient, const NUMBER *restrict x, NUMBER j, NUMBER e, NUMBER d)
{
    int64_t i = 0;
    for (; i + ELEMENTS <= n; i += ELEMENTS) {
        ASK_FOR(s + i);
        NAME(of_one)(i, i + ELEMENTS, s, gradient, x, j, e, d);
    }
    NAME(of_one)(i, n, s, gradient, x, j, e, d);
}

INLINE void NAME(without_gradient)(
    int64_t first, int64_t end, NUMBER *restrict s, const NUMBER *restrict x, NUMBER j, NUMBER e)
{
#pragma GCC unroll 1
    for (int64_t i = first; i < end; i++)
        s[i] = j * s[i] + e * x[i];
}

VECTOR static void NAME(row_without_gradient)(
    int64_t n, NUMBER *restrict s, const NUMBER *restrict x, NUMBER j, NUMBER e)
{
    int64_t i = 0;
    for (; i + ELEMENTS <= n; i += ELEMENTS) {
        ASK_FOR(s + i);
        NAME(without_gradient)(i, i + ELEMENTS, s, x, j, e);
    }
    NAME(without_gradient)(i, n, s, x, j, e);
}

/* The same of four streams, with the sums in the same order. */
INLINE void NAME(of_four)(
    int64_t first, int64_t end, int64_t n, NUMBER *restrict s0, NUMBER *restrict s1, NUMBER *restrict s2,
    NUMBER *restrict s3, NUMBER *restrict gradient, const NUMBER *restrict x, const NUMBER *j, const NUMBER *e,
    const NUMBER *d)
{
#pragma GCC unroll 1
    for (int64_t i = first; i < end; i++) {
        const NUMBER before0 = s0[i], before1 = s1[i], before2 = s2[i], before3 = s3[i];
        NUMBER sum = gradient[i];
        sum += d[0] * before0;
        sum += d[1] * before1;
        sum += d[2] * before2;
        sum += d[3] * before3;
        gradient[i] = sum;
        s0[i] = j[0] * before0 + e[0] * x[i];
        s1[i] = j[1] * before1 + e[1] * x[n + i];
        s2[i] = j[2] * before2 + e[2] * x[2 * n + i];
        s3[i] = j[3] * before3 + e[3] * x[3 * n + i];
    }
}

VECTOR static void NAME(rows)(
    int64_t n, NUMBER *restrict s0, NUMBER *restrict s1, NUMBER *restrict s2, NUMBER *restrict s3,
    NUMBER *restrict gradient, const NUMBER *restrict x, const NUMBER *of_j, const NUMBER *of_e, const NUMBER *of_d)
{
    const NUMBER j[] = {of_j[0], of_j[1], of_j[2], of_j[3]}, e[] = {of_e[0], of_e[1], of_e[2], of_e[3]};
    const NUMBER d[] = {of_d[0], of_d[1], of_d[2], of_d[3]};
    int64_t i = 0;
    for (; i + ELEMENTS <= n; i += ELEMENTS) {
        ASK_FOR(s0 + i);
        ASK_FOR(s1 + i);
        ASK_FOR(s2 + i);
        ASK_FOR(s3 + i);
        NAME(of_four)(i, i + ELEMENTS, n, s0, s1, s2, s3, gradient, x, j, e, d);
    }
    NAME(of_four)(i, n, n, s0, s1, s2, s3, gradient, x, j, e, d);
}

static void NAME(part)(const void *argument, int64_t part)
{
    const struct pass *p = argument;
    const int64_t parts = parts_of(p, sizeof(NUMBER));
    const int64_t first_row = p->rows * part / parts, end_row = p->rows * (part + 1) / parts;
    const int64_t m = p->columns, g = p->groups, of_stream = p->rows * m;
    const NUMBER *j = (const NUMBER *)p->transition, *d = (const NUMBER *)p->grad_state;
    const NUMBER *e = (const NUMBER *)p->of_rows, *x = (const NUMBER *)p->inputs;
    NUMBER *gradient = (NUMBER *)p->gradient;
    for (int64_t first = 0, count; first < p->batch; first += count) {
        const int64_t left = p->batch - first;
        count = left < TOGETHER ? left : TOGETHER;
        for (int64_t r = first_row; r < end_row; r++) {
            NUMBER *s = (NUMBER *)p->sensitivities + first * of_stream + r * m;
            NUMBER js[TOGETHER], es[TOGETHER], ds[TOGETHER];
            for (int64_t k = 0; k < count; k++) {
                const int64_t group = (first + k) * g + r % g;
                js[k] = j[group];
                es[k] = e[(first + k) * p->rows + r];
                ds[k] = gradient ? d[group] : 0;
            }
            if (gradient && count == TOGETHER) {
                NAME(rows)(
                    m, s, s + of_stream, s + 2 * of_stream, s + 3 * of_stream, gradient + r * m, x + first * m, js,
                    es, ds);
                continue;
            }
            for (int64_t k = 0; k < count; k++) {
                if (gradient)
                    NAME(row)(m, s + k * of_stream, gradient + r * m, x + (first + k) * m, js[k], es[k], ds[k]);
                else
                    NAME(row_without_gradient)(m, s + k * of_stream, x + (first + k) * m, js[k], es[k]);
            }
        }
    }
}

EXPORT void NAME(hf_sensitivities)(const struct pass *p)
{
    struct call call = {.run = NAME(part), .argument = p, .parts = parts_of(p, sizeof(NUMBER))};
    share(&call, p->threads);
}

#undef ASK_FOR
#undef ELEMENTS
