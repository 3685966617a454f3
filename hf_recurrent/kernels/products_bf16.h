/* Matrix products of float32 matrices whose elements are rounded to bfloat16, with sums in float32: for processors that
 * multiply pairs of bfloat16 numbers (AVX512-BF16). Two steps of the sums are a pair; the second one is zero at an odd end.
 *
 * A part of products.h for float32 and AVX-512, with its tiles, panels and order of the blocks of the sums.
 */
#define TARGET_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512bf16")))
#define PAIRS (DEPTH / 2)

/* Rows of a that a thread rounds for itself. */
static _Thread_local uint32_t own_pairs[PART_ROWS * PAIRS] __attribute__((aligned(64)));

/* Lane i is the pair of lane i of both, rounded. */
INLINE TARGET_BF16 __m512i interleaved(__m512 first, __m512 second)
{
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
        16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

INLINE TARGET_BF16 __mmask16 first_lanes(int64_t count)
{
    return count <= 0 ? 0 : count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
}

/* 32 neighbours, zeros after the first `count`, as 16 pairs. */
INLINE TARGET_BF16 __m512i neighbour_pairs(const float *from, int64_t count)
{
    const __m512 low = _mm512_maskz_loadu_ps(first_lanes(count), from);
    const __m512 high = _mm512_maskz_loadu_ps(first_lanes(count - 16), from + 16);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

INLINE TARGET_BF16 void tile_bf16(
    const int rows, int64_t pairs, const uint32_t *a, int64_t a_row, int64_t a_pair, const uint32_t *b, float *to,
    int64_t to_row, int64_t columns, int add, const float *plus)
{
    const __mmask16 low = first_lanes(columns), high = first_lanes(columns - 16);
    __m512 sums[TILE_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        const __m512bh left = (__m512bh)_mm512_loadu_si512(b + k * PANEL);
        const __m512bh right = (__m512bh)_mm512_loadu_si512(b + k * PANEL + 16);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m512bh factor = (__m512bh)_mm512_set1_epi32((int)a[r * a_row + k * a_pair]);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], factor, left);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], factor, right);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        float *row = to + r * to_row;
        if (add) {
            sums[r][0] += _mm512_maskz_loadu_ps(low, row);
            sums[r][1] += _mm512_maskz_loadu_ps(high, row + 16);
        }
        if (plus) {
            sums[r][0] += _mm512_maskz_loadu_ps(low, plus + r * to_row);
            sums[r][1] += _mm512_maskz_loadu_ps(high, plus + r * to_row + 16);
        }
        _mm512_mask_storeu_ps(row, low, sums[r][0]);
        _mm512_mask_storeu_ps(row + 16, high, sums[r][1]);
    }
}

#define TILE_BF16(count) \
    do { \
        tile_bf16(count, pairs, a, a_row, a_pair, b, to, to_row, columns, add, plus); \
        a += (count) * a_row, to += (count) * to_row, rows -= (count); \
        plus = plus ? plus + (count) * to_row : plus; \
    } while (0)

TARGET_BF16 static void tiles_bf16(
    int64_t rows, int64_t pairs, const uint32_t *a, int64_t a_row, int64_t a_pair, const uint32_t *b, float *to,
    int64_t to_row, int64_t columns, int add, const float *plus)
{
    EACH_TILE(TILE_BF16);
}

/* Steps `begin` to `begin` + `depth` of a panel of b, (pairs, PANEL) in order, with zeros after the last column. */
TARGET_BF16 static void pack_bf16(const struct product *one, int64_t panel, int64_t begin, int64_t depth, uint32_t *to)
{
    const int64_t by_depth = one->b_depth, by_column = one->b_column, width = one->width - panel * PANEL;
    const float *from = (const float *)one->b + panel * PANEL * by_column + begin * by_depth;
    if (by_column == 1)
        for (int64_t k = 0; k < depth; k += 2)
            for (int side = 0; side < 2; side++) {
                const __mmask16 lanes = first_lanes(width - 16 * side);
                const float *at = from + k * by_depth + 16 * side;
                const __m512 first = _mm512_maskz_loadu_ps(lanes, at);
                const __m512 second = k + 1 < depth ? _mm512_maskz_loadu_ps(lanes, at + by_depth) : _mm512_setzero_ps();
                _mm512_storeu_si512(to + k / 2 * PANEL + 16 * side, interleaved(first, second));
            }
    else
        for (int64_t k = 0; k < depth; k += 32)
            for (int side = 0; side < 2; side++) {
                VECTOR x[16];
                UNROLL
                for (int i = 0; i < 16; i++) {
                    const int64_t column = 16 * side + i;
                    x[i] = (VECTOR)neighbour_pairs(
                        from + (column < width ? column * by_column : 0) + k, column < width ? depth - k : 0);
                }
                NAME(transpose)(x);
                UNROLL
                for (int i = 0; i < 16; i++)
                    if (k + 2 * i < depth)
                        _mm512_storeu_si512(to + (k / 2 + i) * PANEL + 16 * side, (__m512i)x[i]);
            }
}

TARGET_BF16 static void product_bf16(const struct product *one, int64_t first, int64_t end)
{
    const int64_t panels = PANELS_OF(one), all_pairs = UP(one->depth, 2);
    STEPS(begin, 0, panels, PANELS)
        STEPS(k, 0, one->depth, DEPTH) {
            const int64_t depth = LESS(one->depth - k, DEPTH), pairs = UP(depth, 2);
            for (int64_t row = first; row < end; row++)
                STEPS(i, 0, depth, 32)
                    _mm512_mask_storeu_epi32(
                        own_pairs + (row - first) * PAIRS + i / 2, first_lanes(pairs - i / 2),
                        neighbour_pairs((const float *)one->a + row * one->a_row + k + i, depth - i));
            STEPS(panel, begin, LESS(panels, begin + PANELS), 1)
                tiles_bf16(
                    end - first, pairs, own_pairs, PAIRS, 1,
                    (const uint32_t *)one->packed + (panel * all_pairs + k / 2) * PANEL,
                    (float *)one->to + first * one->to_row + panel * PANEL, one->to_row,
                    one->width - panel * PANEL, k > 0 || one->add, NAME(plus_of)(one, first, panel, k));
        }
}

TARGET_BF16 static void transposed_product_bf16(
    const struct product *one, int64_t first, int64_t end, int64_t begin, int64_t stop)
{
    uint32_t *packed = (uint32_t *)own_panels;
    STEPS(k, 0, one->depth, DEPTH) {
        const int64_t depth = LESS(one->depth - k, DEPTH), pairs = UP(depth, 2);
        STEPS(panel, begin, stop, 1)
            pack_bf16(one, panel, k, depth, packed + (panel - begin) * pairs * PANEL);
        STEPS(row, first, end, TILE_ROWS) {
            const int64_t rows = LESS(end - row, TILE_ROWS);
            for (int64_t pair = 0; pair < pairs; pair++) {
                const float *at = (const float *)one->a + row + (k + 2 * pair) * one->a_depth;
                const __m512 x = _mm512_maskz_loadu_ps(first_lanes(rows), at);
                const __m512 y = _mm512_maskz_loadu_ps(first_lanes(2 * pair + 1 < depth ? rows : 0), at + one->a_depth);
                _mm512_mask_storeu_epi32(own_pairs + pair * 16, first_lanes(rows), interleaved(x, y));
            }
            STEPS(panel, begin, stop, 1)
                tiles_bf16(
                    rows, pairs, own_pairs, 1, 16, packed + (panel - begin) * pairs * PANEL,
                    (float *)one->to + row * one->to_row + panel * PANEL, one->to_row,
                    one->width - panel * PANEL, k > 0 || one->add, NULL);
        }
    }
}
