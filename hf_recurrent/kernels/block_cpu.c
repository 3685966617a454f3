/* Learning from one block of one stream, forward and backward pass, and the update of the weights, on a CPU.
 *
 * A network of a few hundred thousand weights takes less time to compute than a thousand calls of small operations.
 * The list of operations is that of step_cpu.c, whose operations run there, and those here, which a backward pass
 * needs too. Plain C without Python.h: block_program.py writes the list, block_cpu.py passes pointers.
 *
 * The functions are this file included by itself, once for each element type and instruction set: see the end.
 */
#ifndef REAL

#include "kernel.h"
#include <math.h>

#define ROWS 6 /* of a product that are summed side by side, */
#define VECTORS 2 /* in so many vectors each */
#define WIDE 8 /* vectors of a single row */
#define DOTS 4 /* rows of a matrix whose products with one vector are summed side by side */
#define SUM_BLOCK 1024 /* squares that are summed in the type of the numbers */
#define MOST_CHANNELS 4 /* of a group; block_program.py checks it */

/* What block_cpu.py and block_program.py pack; raise VERSION with every change. */
#define VERSION 1
enum operation { /* after those of step_cpu.c */
    MATMUL = 100, BROADCAST, SCAN, SCAN_BACKWARD, NORM_BACKWARD, PICK, PICK_BACKWARD, LOOK_UP, LOOK_UP_BACKWARD,
    SENSITIVITIES, FINITE
};
enum outcome { DONE, CHANGED, NOT_FINITE }; /* CHANGED is that of step_cpu.c */

/* As in step_cpu.c, for one stream: bases[base] + scaled + offset; an absent operand has base -1. */
struct operand {
    int64_t base, scaled, offset, stride;
};

/* The words of an operation after `operation` and `words`, the number of all its words. */
struct matmul { /* to (rows, width) = a · b; a[r, k] = a[r a_row + k a_depth], b[k, i] = b[k b_depth + i b_width] */
    int64_t rows, depth, width, a_row, a_depth, b_depth, b_width;
    struct operand a, b, to, packed; /* `packed`, where b_width is not 1: memory for b with its rows padded */
};
struct broadcast { /* (outer, inner) -> (outer, count, inner) */
    int64_t outer, count, inner;
    struct operand x, to;
};
struct scan { /* h_t = a_t h_{t-1} + b_t, (steps, width); imaginary parts follow the real ones in `to` */
    int64_t steps, width;
    struct operand a, b, state, a_imag, b_imag, state_imag, reset, to;
};
struct scan_backward { /* to: gradients of a, b (steps, width) and the state (width), each with its imaginary part */
    int64_t steps, width;
    struct operand a, h, state, grad_h, grad_final;
    struct operand a_imag, h_imag, state_imag, grad_h_imag, grad_final_imag, reset, to;
};
struct norm_backward { /* of a LayerNorm without weights */
    int64_t count, width;
    double eps;
    struct operand x, grad, to;
};
struct pick { /* to[t] = -x[t, label[t]]; backward: to[t, label[t]] = -grad[t], zero elsewhere; none if label < 0 */
    int64_t steps, width, one_grad;
    struct operand x, labels, to; /* x: the gradient, in the backward pass */
};
struct look_up { /* to[t] = table[id[t]]; backward: to[id[t]] += x[t], zero elsewhere */
    int64_t steps, height, width;
    struct operand x, ids, to;
};
struct sensitivities { /* see hf_recurrent/learning_rules/sensitivities.py */
    int64_t steps, channels, rows, groups, columns;
    struct operand carried;    /* S (C, rows, G, I), in place: S <- J S + sum_t e_t x_t^T */
    struct operand transition; /* J (C, C, G) */
    struct operand of_rows;    /* e (T, C, rows, G) */
    struct operand inputs;     /* x (T, I); absent for a vector, whose I is 1 */
    struct operand grad_state; /* d (C, G), absent without a gradient */
    struct operand gradient;   /* (rows, G, I) */
    struct operand to;         /* gradient + sum_C d S, of the old S */
};
struct finite {
    struct operand x;
};

/* One parameter of an update. Pointers are integers. */
struct parameter {
    int64_t weights, first, second, gradient, count;
    double learning_rate;
};
struct update {
    int64_t kind; /* 0: AdamW, 1: RMSProp */
    double scale; /* of all gradients */
    double beta1, beta2, eps, correction1, correction2; /* RMSProp: beta2 is alpha */
};

typedef int64_t step_run(
    int64_t is_double, int64_t streams, int64_t chain, const int64_t *words, const int64_t *spans, int64_t count,
    void *const *bases);
typedef int64_t program(const int64_t *word, const int64_t *end, void *const *bases);
typedef void updater(const struct update *update, const struct parameter *parameter);
typedef double sum_of_squares(int64_t count, const void *numbers);

#define REAL float
#define SUFFIX float32
#define MATH(function) function##f
#include "block_cpu.c"

#define REAL double
#define SUFFIX float64
#define MATH(function) function
#include "block_cpu.c"

/* ---- Choosing a version ---- */

#ifdef X86_LEVELS
#define CHOOSE(type, name) \
    static type *const name##s[2][3] = { \
        {name##_float32_base, name##_float32_avx2, name##_float32_avx512}, \
        {name##_float64_base, name##_float64_avx2, name##_float64_avx512}}; \
    type *const name = name##s[is_double][level()]
#else
#define CHOOSE(type, name) type *const name = is_double ? name##_float64_base : name##_float32_base
#endif

EXPORT int64_t hf_block_version(void) { return VERSION; }

/* Runs the operations; `spans` are triples of first word, end, and whether these are operations of `step`, the function
 * hf_step_run. Returns an outcome; after another than DONE, nothing was changed but scratch memory and outputs. */
EXPORT int64_t hf_block_run(
    step_run *step, int64_t is_double, const int64_t *words, const int64_t *spans, int64_t count, void *const *bases)
{
    CHOOSE(program, run);
    for (const int64_t *span = spans; span < spans + 3 * count; span += 3) {
        const int64_t of_step[3] = {span[0], span[1], 0};
        const int64_t outcome = span[2] ? step(is_double, 1, 0, words, of_step, 1, bases)
                                        : run(words + span[0], words + span[1], bases);
        if (outcome != DONE)
            return outcome;
    }
    return DONE;
}

EXPORT double hf_block_norm(int64_t is_double, int64_t count, const void *numbers)
{
    CHOOSE(sum_of_squares, squares);
    return sqrt(squares(count, numbers));
}

EXPORT void hf_block_update(
    int64_t is_double, const struct update *update, const struct parameter *parameters, int64_t count)
{
    CHOOSE(updater, change);
    for (const struct parameter *parameter = parameters; parameter < parameters + count; parameter++)
        change(update, parameter);
}

#elif !defined(LEVEL)

#define LEVEL base
#define VECTOR_BYTES 16
#define TARGET
#include "block_cpu.c"

#ifdef X86_LEVELS
#define LEVEL avx2
#define VECTOR_BYTES 32
#define TARGET __attribute__((target("avx2,fma")))
#include "block_cpu.c"

#define LEVEL avx512
#define VECTOR_BYTES 64
#define TARGET __attribute__((target("avx2,fma,avx512f")))
#include "block_cpu.c"
#endif

#undef REAL
#undef SUFFIX
#undef MATH

#else

#define LANES (VECTOR_BYTES / (int64_t)sizeof(REAL))
typedef REAL NAME(lanes) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#define VECTOR NAME(lanes)
#define AT(pointer) (*(VECTOR *)(pointer))
#define READ(pointer) (*(const VECTOR *)(pointer))

INLINE TARGET REAL *NAME(at)(const struct operand *x, void *const *bases)
{
    return x->base < 0 ? 0 : (REAL *)bases[x->base] + x->scaled + x->offset;
}
#define PLACE(x) NAME(at)(&one->x, bases)

/* ---- Matrix products ---- */

/* `rows` rows and `vectors` vectors of columns of to = a · b, of which the first `columns` are stored. */
INLINE TARGET void NAME(block)(
    const int rows, const int vectors, int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b,
    int64_t b_depth, REAL *to, int64_t to_row, int64_t to_column, int64_t columns)
{
    VECTOR sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = (VECTOR){0};
    for (int64_t k = 0; k < depth; k++) {
        VECTOR numbers[WIDE];
        for (int v = 0; v < vectors; v++)
            numbers[v] = READ(b + k * b_depth + v * LANES);
        for (int r = 0; r < rows; r++) {
            const REAL factor = a[r * a_row + k * a_depth];
            for (int v = 0; v < vectors; v++)
                sums[r][v] += factor * numbers[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            if (to_column == 1 && (v + 1) * LANES <= columns)
                AT(to + r * to_row + v * LANES) = sums[r][v];
            else
                for (int64_t i = 0; i < LANES && v * LANES + i < columns; i++)
                    to[r * to_row + (v * LANES + i) * to_column] = sums[r][v][i];
        }
}

#define BLOCK(rows, vectors) \
    NAME(block)(rows, vectors, depth, a, a_row, a_depth, b, b_depth, to, to_row, to_column, columns)
#define BLOCKS(rows) \
    do { \
        if (vectors == 1) BLOCK(rows, 1); \
        else BLOCK(rows, VECTORS); \
    } while (0)

TARGET static void NAME(some_rows)(
    int64_t rows, int64_t vectors, int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b,
    int64_t b_depth, REAL *to, int64_t to_row, int64_t to_column, int64_t columns)
{
    switch (rows) {
    case 1: BLOCKS(1); break;
    case 2: BLOCKS(2); break;
    case 3: BLOCKS(3); break;
    case 4: BLOCKS(4); break;
    case 5: BLOCKS(5); break;
    default: BLOCKS(ROWS);
    }
}

TARGET static void NAME(wide_row)(
    int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b, int64_t b_depth, REAL *to,
    int64_t to_row, int64_t to_column, int64_t columns)
{
    BLOCK(1, WIDE);
}

/* b with neighbouring columns next to one another; `whole` of them can be read, the first `width` are stored. */
TARGET static void NAME(multiply)(
    int64_t rows, int64_t depth, int64_t width, int64_t whole, const REAL *a, int64_t a_row, int64_t a_depth,
    const REAL *b, int64_t b_depth, REAL *to, int64_t to_row, int64_t to_column)
{
    int64_t column = 0;
    if (depth == 1 && to_column == 1) { /* a single step: one pass over the result */
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < width; i++)
                to[row * to_row + i] = a[row * a_row] * b[i];
        return;
    }
    for (; rows == 1 && column + WIDE * LANES <= whole; column += WIDE * LANES)
        NAME(wide_row)(
            depth, a, a_row, a_depth, b + column, b_depth, to + column * to_column, to_row, to_column, width - column);
    while (column + LANES <= whole) {
        const int64_t vectors = column + VECTORS * LANES <= whole ? VECTORS : 1;
        for (int64_t row = 0; row < rows; row += ROWS)
            NAME(some_rows)(
                rows - row < ROWS ? rows - row : ROWS, vectors, depth, a + row * a_row, a_row, a_depth, b + column,
                b_depth, to + row * to_row + column * to_column, to_row, to_column, width - column);
        column += vectors * LANES;
    }
    for (; column < width; column++)
        for (int64_t row = 0; row < rows; row++) {
            REAL sum = 0;
            for (int64_t k = 0; k < depth; k++)
                sum += a[row * a_row + k * a_depth] * b[k * b_depth + column];
            to[row * to_row + column * to_column] = sum;
        }
}

/* Products of `rows` rows, `distance` apart, with one vector. */
INLINE TARGET void NAME(dots)(
    const int rows, int64_t depth, const REAL *matrix, int64_t distance, const REAL *x, REAL *to)
{
    const int64_t whole = depth / LANES * LANES;
    VECTOR sums[DOTS];
    for (int r = 0; r < rows; r++)
        sums[r] = (VECTOR){0};
    for (int64_t i = 0; i < whole; i += LANES)
        for (int r = 0; r < rows; r++)
            sums[r] += READ(matrix + r * distance + i) * READ(x + i);
    for (int r = 0; r < rows; r++) {
        REAL total = 0;
        for (int64_t i = 0; i < LANES; i++)
            total += sums[r][i];
        for (int64_t i = whole; i < depth; i++)
            total += matrix[r * distance + i] * x[i];
        to[r] = total;
    }
}

TARGET static void NAME(matmul)(const struct matmul *one, void *const *bases)
{
    const int64_t rows = one->rows, depth = one->depth, width = one->width;
    const REAL *a = PLACE(a), *b = PLACE(b);
    REAL *to = PLACE(to), *packed = PLACE(packed);
    if (one->b_width == 1) {
        NAME(multiply)(rows, depth, width, width, a, one->a_row, one->a_depth, b, one->b_depth, to, width, 1);
    } else if (rows == 1 && one->a_depth == 1 && one->b_depth == 1) {
        int64_t i = 0;
        for (; i + DOTS <= width; i += DOTS)
            NAME(dots)(DOTS, depth, b + i * one->b_width, one->b_width, a, to + i);
        for (; i < width; i++)
            NAME(dots)(1, depth, b + i * one->b_width, one->b_width, a, to + i);
    } else { /* to^T = b^T · a^T, with a^T, the smaller one, rearranged */
        const int64_t padded = (rows + LANES - 1) / LANES * LANES;
        for (int64_t k = 0; k < depth; k++)
            for (int64_t r = 0; r < padded; r++)
                packed[k * padded + r] = r < rows ? a[r * one->a_row + k * one->a_depth] : 0;
        NAME(multiply)(
            width, depth, rows, padded, b, one->b_width, one->b_depth, packed, padded, to, 1, width);
    }
}

/* ---- Recurrence ---- */

TARGET static void NAME(scan)(const struct scan *one, void *const *bases)
{
    const int64_t n = one->width, size = one->steps * n;
    const REAL *a = PLACE(a), *b = PLACE(b), *state = PLACE(state), *reset = PLACE(reset);
    const REAL *a_imag = PLACE(a_imag), *b_imag = PLACE(b_imag), *state_imag = PLACE(state_imag);
    REAL *to = PLACE(to), *to_imag = to + size;
    for (int64_t t = 0; t < one->steps; t++) {
        const REAL *before = t ? to + (t - 1) * n : state, *before_imag = t ? to_imag + (t - 1) * n : state_imag;
        const int64_t at = t * n;
        if (reset && reset[t] != 0) {
            memcpy(to + at, b + at, n * sizeof(REAL));
            if (a_imag)
                memcpy(to_imag + at, b_imag + at, n * sizeof(REAL));
        } else if (a_imag) {
            for (int64_t i = 0; i < n; i++) {
                to[at + i] = a[at + i] * before[i] - a_imag[at + i] * before_imag[i] + b[at + i];
                to_imag[at + i] = a[at + i] * before_imag[i] + a_imag[at + i] * before[i] + b_imag[at + i];
            }
        } else {
            for (int64_t i = 0; i < n; i++)
                to[at + i] = a[at + i] * before[i] + b[at + i];
        }
    }
}

/* With g_t the gradient of h_t through all later steps: of b_t it is g_t, of a_t g_t conj(h_{t-1}). */
TARGET static void NAME(scan_backward)(const struct scan_backward *one, void *const *bases)
{
    const int64_t n = one->width, size = one->steps * n, is_complex = one->a_imag.base >= 0;
    const REAL *reset = PLACE(reset);
    const REAL *const a[2] = {PLACE(a), PLACE(a_imag)}, *const h[2] = {PLACE(h), PLACE(h_imag)};
    const REAL *const state[2] = {PLACE(state), PLACE(state_imag)};
    const REAL *const grad_h[2] = {PLACE(grad_h), PLACE(grad_h_imag)};
    const REAL *const grad_final[2] = {PLACE(grad_final), PLACE(grad_final_imag)};
    REAL *const to = PLACE(to);
    REAL *const grad_a[2] = {to, to + 2 * size + n}, *const grad_b[2] = {to + size, to + 3 * size + n};
    REAL *const grad_state[2] = {to + 2 * size, to + 4 * size + n};
    for (int64_t t = one->steps - 1; t >= 0; t--) {
        const int64_t at = t * n, last = t == one->steps - 1, cut = reset && reset[t] != 0;
        const int64_t cut_after = !last && reset && reset[t + 1] != 0;
        for (int64_t part = 0; part <= is_complex; part++)
            for (int64_t i = 0; i < n; i++) {
                REAL g = grad_h[part] ? grad_h[part][at + i] : 0;
                if (last && grad_final[part])
                    g += grad_final[part][i];
                grad_b[part][at + i] = g;
            }
        for (int64_t i = 0; !last && !cut_after && i < n; i++) {
            const REAL later = grad_b[0][at + n + i], factor = a[0][at + n + i];
            if (is_complex) {
                const REAL later_imag = grad_b[1][at + n + i], factor_imag = a[1][at + n + i];
                grad_b[0][at + i] += factor * later + factor_imag * later_imag;
                grad_b[1][at + i] += factor * later_imag - factor_imag * later;
            } else
                grad_b[0][at + i] += factor * later;
        }
        for (int64_t i = 0; i < n; i++) {
            const REAL before = cut ? 0 : t ? h[0][at - n + i] : state[0][i], g = grad_b[0][at + i];
            if (is_complex) {
                const REAL before_imag = cut ? 0 : t ? h[1][at - n + i] : state[1][i], g_imag = grad_b[1][at + i];
                grad_a[0][at + i] = g * before + g_imag * before_imag;
                grad_a[1][at + i] = g_imag * before - g * before_imag;
                if (!t) {
                    grad_state[0][i] = cut ? 0 : a[0][i] * g + a[1][i] * g_imag;
                    grad_state[1][i] = cut ? 0 : a[0][i] * g_imag - a[1][i] * g;
                }
            } else {
                grad_a[0][at + i] = g * before;
                if (!t)
                    grad_state[0][i] = cut ? 0 : a[0][i] * g;
            }
        }
    }
}

/* ---- Others ---- */

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
        const REAL *x = PLACE(x) + row * n, *grad = PLACE(grad) + row * n;
        REAL *to = PLACE(to) + row * n;
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

/* S and the gradient for `rows` rows from `row` on, each with its channels, and `vectors` vectors of columns from `i` on.
 * Everything is read before it is written. */
INLINE TARGET void NAME(advance)(
    const struct sensitivities *one, const int channels, const int rows, const int vectors, int64_t row, int64_t i,
    REAL *carried, const REAL *transition, const REAL *of_rows, const REAL *x, const REAL *grad_state,
    const REAL *gradient, REAL *to)
{
    const int64_t n = one->columns, groups = one->groups, all_rows = one->rows * groups;
    VECTOR before[MOST_CHANNELS][ROWS][VECTORS], after[MOST_CHANNELS][ROWS][VECTORS];
    for (int c = 0; c < channels; c++)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                before[c][r][v] = READ(carried + (c * all_rows + row + r) * n + i + v * LANES);
    for (int r = 0; to && r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            VECTOR sum = READ(gradient + (row + r) * n + i + v * LANES);
            for (int c = 0; c < channels; c++)
                sum += grad_state[c * groups + (row + r) % groups] * before[c][r][v];
            AT(to + (row + r) * n + i + v * LANES) = sum;
        }
    for (int c = 0; c < channels; c++)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) {
                after[c][r][v] = (VECTOR){0};
                for (int d = 0; d < channels; d++)
                    after[c][r][v] += transition[(c * channels + d) * groups + (row + r) % groups] * before[d][r][v];
            }
    for (int64_t t = 0; t < one->steps; t++) {
        VECTOR numbers[VECTORS];
        for (int v = 0; v < vectors; v++)
            numbers[v] = READ(x + t * n + i + v * LANES);
        for (int c = 0; c < channels; c++)
            for (int r = 0; r < rows; r++) {
                const REAL factor = of_rows[(t * channels + c) * all_rows + row + r];
                for (int v = 0; v < vectors; v++)
                    after[c][r][v] += factor * numbers[v];
            }
    }
    for (int c = 0; c < channels; c++)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                AT(carried + (c * all_rows + row + r) * n + i + v * LANES) = after[c][r][v];
}

/* The same for a number, whose column may be that of a vector (I = 1, x = 1). */
TARGET static void NAME(advance_number)(
    const struct sensitivities *one, int64_t row, int64_t i, REAL *carried, const REAL *transition,
    const REAL *of_rows, const REAL *x, const REAL *grad_state, const REAL *gradient, REAL *to)
{
    const int64_t n = one->columns, groups = one->groups, rows = one->rows * groups, group = row % groups;
    REAL before[MOST_CHANNELS];
    for (int64_t c = 0; c < one->channels; c++)
        before[c] = carried[(c * rows + row) * n + i];
    if (to) {
        REAL sum = gradient[row * n + i];
        for (int64_t c = 0; c < one->channels; c++)
            sum += grad_state[c * groups + group] * before[c];
        to[row * n + i] = sum;
    }
    for (int64_t c = 0; c < one->channels; c++) {
        REAL after = 0;
        for (int64_t d = 0; d < one->channels; d++)
            after += transition[(c * one->channels + d) * groups + group] * before[d];
        for (int64_t t = 0; t < one->steps; t++)
            after += of_rows[(t * one->channels + c) * rows + row] * (x ? x[t * n + i] : 1);
        carried[(c * rows + row) * n + i] = after;
    }
}

#define ADVANCE(channels, rows, vectors) \
    NAME(advance)( \
        one, channels, rows, vectors, row, i, carried, transition, of_rows, x, grad_state, gradient, to)
#define ADVANCE_ROWS(channels, rows) \
    do { \
        for (; i + VECTORS * LANES <= n; i += VECTORS * LANES) \
            ADVANCE(channels, rows, VECTORS); \
        for (; i + LANES <= n; i += LANES) \
            ADVANCE(channels, rows, 1); \
    } while (0)

TARGET static void NAME(sensitivities)(const struct sensitivities *one, void *const *bases)
{
    const int64_t channels = one->channels, n = one->columns, rows = one->rows * one->groups;
    REAL *const carried = PLACE(carried), *const to = PLACE(to);
    const REAL *transition = PLACE(transition), *of_rows = PLACE(of_rows), *x = PLACE(inputs);
    const REAL *grad_state = PLACE(grad_state), *gradient = PLACE(gradient);
    for (int64_t row = 0, together; row < rows; row += together) {
        int64_t i = 0;
        together = 1;
        if (!x)
            i = 0;
        else if (channels == 1 && rows - row >= ROWS) {
            together = ROWS;
            ADVANCE_ROWS(1, ROWS);
        } else if (channels == 2 && rows - row >= ROWS / 2) {
            together = ROWS / 2;
            ADVANCE_ROWS(2, ROWS / 2);
        } else if (channels == 1)
            ADVANCE_ROWS(1, 1);
        else if (channels == 2)
            ADVANCE_ROWS(2, 1);
        else if (channels == 4)
            ADVANCE_ROWS(4, 1);
        for (; i < n; i++)
            for (int64_t r = row; r < row + together; r++)
                NAME(advance_number)(one, r, i, carried, transition, of_rows, x, grad_state, gradient, to);
    }
}

TARGET static int64_t NAME(run)(const int64_t *word, const int64_t *end, void *const *bases)
{
    for (; word < end; word += word[1]) {
        const void *fields = word + 2;
        switch (word[0]) {
        case MATMUL: NAME(matmul)(fields, bases); break;
        case BROADCAST: {
            const struct broadcast *one = fields;
            const REAL *x = PLACE(x);
            REAL *to = PLACE(to);
            for (int64_t o = 0; o < one->outer; o++, x += one->inner)
                for (int64_t c = 0; c < one->count; c++, to += one->inner) {
                    if (one->inner == 1)
                        *to = *x;
                    else
                        memcpy(to, x, one->inner * sizeof(REAL));
                }
            break;
        }
        case SCAN: NAME(scan)(fields, bases); break;
        case SCAN_BACKWARD: NAME(scan_backward)(fields, bases); break;
        case NORM_BACKWARD: NAME(norm_backward)(fields, bases); break;
        case PICK: {
            const struct pick *one = fields;
            const REAL *x = PLACE(x), *labels = PLACE(labels);
            REAL *to = PLACE(to);
            for (int64_t t = 0; t < one->steps; t++)
                to[t] = labels[t] < 0 ? 0 : -x[t * one->width + (int64_t)labels[t]];
            break;
        }
        case PICK_BACKWARD: {
            const struct pick *one = fields;
            const REAL *grad = PLACE(x), *labels = PLACE(labels);
            REAL *to = PLACE(to);
            memset(to, 0, one->steps * one->width * sizeof(REAL));
            for (int64_t t = 0; t < one->steps; t++)
                if (labels[t] >= 0)
                    to[t * one->width + (int64_t)labels[t]] = -grad[one->one_grad ? 0 : t];
            break;
        }
        case LOOK_UP: {
            const struct look_up *one = fields;
            const REAL *x = PLACE(x), *ids = PLACE(ids);
            for (int64_t t = 0; t < one->steps; t++)
                memcpy(PLACE(to) + t * one->width, x + (int64_t)ids[t] * one->width, one->width * sizeof(REAL));
            break;
        }
        case LOOK_UP_BACKWARD: {
            const struct look_up *one = fields;
            const REAL *x = PLACE(x), *ids = PLACE(ids);
            REAL *to = PLACE(to);
            memset(to, 0, one->height * one->width * sizeof(REAL));
            for (int64_t t = 0; t < one->steps; t++)
                for (int64_t i = 0; i < one->width; i++)
                    to[(int64_t)ids[t] * one->width + i] += x[t * one->width + i];
            break;
        }
        case SENSITIVITIES: NAME(sensitivities)(fields, bases); break;
        case FINITE: {
            const struct finite *one = fields;
            if (!isfinite(*PLACE(x)))
                return NOT_FINITE;
            break;
        }
        }
    }
    return DONE;
}

/* ---- Update ---- */

TARGET static double NAME(squares)(int64_t count, const void *numbers)
{
    const REAL *x = numbers;
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

#undef LANES
#undef VECTOR
#undef AT
#undef READ
#undef PLACE
#undef BLOCK
#undef BLOCKS
#undef ADVANCE
#undef ADVANCE_ROWS
#undef LEVEL
#undef VECTOR_BYTES
#undef TARGET

#endif
