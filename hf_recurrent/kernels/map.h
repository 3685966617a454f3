/* Element-wise passes. */
#define MAP_TILE 256 /* elements of an element-wise pass */
#define MOST_TEMPORARIES 24

#define LOOP(expression) \
    do { \
        for (int64_t i = 0; i < width; i += LANES) { \
            const VECTOR x = READ(a + i), y = READ(b + i), z = READ(c + i); \
            (void)x, (void)y, (void)z; \
            AT(to + i) = (expression); \
        } \
    } while (0)

INLINE TARGET VECTOR NAME(root_of)(VECTOR x)
{
    NAME(square_root)(&x);
    return x;
}

INLINE TARGET VECTOR NAME(least_of)(VECTOR x, REAL scalar)
{
    NAME(at_least)(&x, scalar);
    return x;
}

INLINE TARGET VECTOR NAME(most_of)(VECTOR x, REAL scalar)
{
    NAME(at_most)(&x, scalar);
    return x;
}

/* One function over a tile of whole vectors. */
TARGET static void NAME(apply)(
    enum function function, int64_t width, REAL *to, const REAL *a, const REAL *b, const REAL *c, REAL scalar)
{
    const VECTOR one = ALL(1), zero = ALL(0);
    switch (function) {
    case F_COPY: LOOP(x); break;
    case F_SPLAT: {
        const VECTOR value = ALL(a[0]);
        for (int64_t i = 0; i < width; i += LANES)
            AT(to + i) = value;
        break;
    }
    case F_SET:
        for (int64_t i = 0; i < width; i += LANES)
            AT(to + i) = ALL(scalar);
        break;
    case F_ADD: LOOP(x + y); break;
    case F_SUB: LOOP(x - y); break;
    case F_MUL: LOOP(x * y); break;
    case F_DIV: LOOP(x / y); break;
    case F_MAX: LOOP(SELECT((x > y) | (x != x), x, y)); break;
    case F_MIN: LOOP(SELECT((x < y) | (x != x), x, y)); break;
    case F_ADD_SCALAR: LOOP(x + scalar); break;
    case F_MUL_SCALAR: LOOP(x * scalar); break;
    case F_RSUB_SCALAR: LOOP(scalar - x); break;
    case F_AT_LEAST: LOOP(NAME(least_of)(x, scalar)); break;
    case F_AT_MOST: LOOP(NAME(most_of)(x, scalar)); break;
    case F_NEG: LOOP(-x); break;
    case F_ABS: LOOP(SELECT(x < zero, -x, x)); break;
    case F_SQRT: LOOP(NAME(root_of)(x)); break;
    case F_RSQRT: LOOP(1 / NAME(root_of)(x)); break;
    case F_RECIPROCAL: LOOP(1 / x); break;
    case F_EXP: LOOP(NAME(exp_of)(x)); break;
    case F_EXPM1: LOOP(NAME(expm1_of)(x)); break;
    case F_LOG: LOOP(NAME(log_of)(x)); break;
    case F_LOG1P: LOOP(NAME(log1p_of)(x)); break;
    case F_SIGMOID: LOOP(NAME(sigmoid_of)(x)); break;
    case F_TANH: LOOP(NAME(tanh_of)(x)); break;
    case F_GELU: LOOP(NAME(gelu_of)(x)); break;
    case F_SOFTPLUS: LOOP(NAME(softplus_of)(x)); break;
    case F_SIN: LOOP(NAME(sin_of)(x)); break;
    case F_COS: LOOP(NAME(cos_of)(x)); break;
    case F_ERF: LOOP(NAME(erf_of)(x)); break;
    case F_POW: LOOP(NAME(pow_of)(x, scalar)); break;
    case F_FLOOR: LOOP(NAME(floor_of)(x)); break;
    case F_ROUND: LOOP(NAME(rint_of)(x)); break;
    case F_MUL_ADD: LOOP(x + y * z); break;
    case F_WHERE: LOOP(SELECT(x != zero, y, z)); break;
    case F_EQ: LOOP(SELECT(x == y, one, zero)); break;
    case F_LT: LOOP(SELECT(x < y, one, zero)); break;
    case F_LE: LOOP(SELECT(x <= y, one, zero)); break;
    }
}

/* All functions on a tile before the next tile; the rows of a stream are not multiples of whole vectors, so the last
 * few elements go through a buffer. */
TARGET static void NAME(map)(const struct map *one, int64_t streams, int64_t first, int64_t count, void *const *bases)
{
    const struct operand *operands = (const struct operand *)(one + 1);
    const struct element_function *functions = (const struct element_function *)(operands + one->operands);
    REAL temporaries[MOST_TEMPORARIES][MAP_TILE] __attribute__((aligned(64)));
    REAL edges[4][16] __attribute__((aligned(64)));
    for (int64_t stream = first; stream < first + count; stream++)
        for (int64_t begin = 0; begin < one->width; begin += MAP_TILE) {
            const int64_t left = one->width - begin < MAP_TILE ? one->width - begin : MAP_TILE;
            const int64_t whole = left / LANES * LANES, rest = left - whole;
            for (const struct element_function *f = functions; f < functions + one->functions; f++) {
                const int64_t operand_of[4] = {f->to, f->a, f->b, f->c};
                REAL *at[4];
                for (int k = 0; k < 4; k++) {
                    if (operand_of[k] < 0)
                        at[k] = k ? at[0] : 0;
                    else if (operand_of[k] >= one->operands)
                        at[k] = temporaries[operand_of[k] - one->operands];
                    else
                        at[k] = ROW(operands[operand_of[k]], stream) + (k == 1 && f->function == F_SPLAT ? 0 : begin);
                }
                /* An absent operand is read too, and must be memory that can be. */
                for (int k = 1; k < 4; k++)
                    if (operand_of[k] < 0)
                        at[k] = k > 1 && operand_of[1] >= 0 && f->function != F_SPLAT ? at[1] : temporaries[0];
                NAME(apply)(f->function, whole, at[0], at[1], at[2], at[3], (REAL)f->scalar);
                if (!rest)
                    continue;
                for (int k = 1; k < 4; k++) {
                    const int64_t elements = k == 1 && f->function == F_SPLAT ? 1 : rest;
                    memset(edges[k], 0, sizeof edges[k]);
                    memcpy(edges[k], at[k] + (elements == rest && f->function != F_SPLAT ? whole : 0), elements * sizeof(REAL));
                }
                NAME(apply)(f->function, LANES, edges[0], edges[1], edges[2], edges[3], (REAL)f->scalar);
                memcpy(at[0] + whole, edges[0], rest * sizeof(REAL));
            }
        }
}
