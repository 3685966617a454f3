/* Recurrences of a block, and the sensitivities of real-time recurrent learning. */
#define MOST_CHANNELS 4 /* of a group */

TARGET static void NAME(scan)(const struct scan *one, void *const *bases)
{
    const int64_t n = one->width, size = one->steps * n;
    const REAL *a = AT_ONE(a), *b = AT_ONE(b), *state = AT_ONE(state), *reset = AT_ONE(reset);
    const REAL *a_imag = AT_ONE(a_imag), *b_imag = AT_ONE(b_imag), *state_imag = AT_ONE(state_imag);
    REAL *to = AT_ONE(to), *to_imag = to + size;
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
    const REAL *reset = AT_ONE(reset);
    const REAL *const a[2] = {AT_ONE(a), AT_ONE(a_imag)}, *const h[2] = {AT_ONE(h), AT_ONE(h_imag)};
    const REAL *const state[2] = {AT_ONE(state), AT_ONE(state_imag)};
    const REAL *const grad_h[2] = {AT_ONE(grad_h), AT_ONE(grad_h_imag)};
    const REAL *const grad_final[2] = {AT_ONE(grad_final), AT_ONE(grad_final_imag)};
    REAL *const to = AT_ONE(to);
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
        VECTOR inputs[VECTORS];
        for (int v = 0; v < vectors; v++)
            inputs[v] = READ(x + t * n + i + v * LANES);
        for (int c = 0; c < channels; c++)
            for (int r = 0; r < rows; r++) {
                const REAL factor = of_rows[(t * channels + c) * all_rows + row + r];
                for (int v = 0; v < vectors; v++)
                    after[c][r][v] += factor * inputs[v];
            }
    }
    for (int c = 0; c < channels; c++)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                AT(carried + (c * all_rows + row + r) * n + i + v * LANES) = after[c][r][v];
}

/* The same for one element, whose column may belong to a vector (I = 1, x = 1). */
TARGET static void NAME(advance_element)(
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
    REAL *const carried = AT_ONE(carried), *const to = AT_ONE(to);
    const REAL *transition = AT_ONE(transition), *of_rows = AT_ONE(of_rows), *x = AT_ONE(inputs);
    const REAL *grad_state = AT_ONE(grad_state), *a = AT_ONE(a), *b = AT_ONE(b);
    const REAL *gradient = a ? to : AT_ONE(gradient);
    for (int64_t row = 0, together; row < rows; row += together) {
        int64_t i = 0;
        together = 1;
        if (x && channels == 1 && rows - row >= ROWS)
            together = ROWS;
        else if (x && channels == 2 && rows - row >= ROWS / 2)
            together = ROWS / 2;
        if (a)
            NAME(outer)(together, n, a + row, b, to + row * n);
        if (!x)
            i = 0;
        else if (channels == 1 && together == ROWS)
            ADVANCE_ROWS(1, ROWS);
        else if (channels == 2 && together == ROWS / 2)
            ADVANCE_ROWS(2, ROWS / 2);
        else if (channels == 1)
            ADVANCE_ROWS(1, 1);
        else if (channels == 2)
            ADVANCE_ROWS(2, 1);
        else if (channels == 4)
            ADVANCE_ROWS(4, 1);
        for (; i < n; i++)
            for (int64_t r = row; r < row + together; r++)
                NAME(advance_element)(one, r, i, carried, transition, of_rows, x, grad_state, gradient, to);
    }
}
