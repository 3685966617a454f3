/* Matrix products with many rows: tiles of sums that fill the registers. Sums run over the depth in one order, whatever
 * the tile and the number of threads. */
#if LEVEL_NUMBER == 2
#define TILE_ROWS 14
#else
#define TILE_ROWS 6
#endif
#define PANEL (2 * LANES) /* columns of a tile */
#define DEPTH 256         /* steps of the sums for which a panel of b stays in the inner cache */
#define PANELS 12         /* panels of that depth that stay in the next cache */

/* `rows` rows of a panel of to = a · b, of which the first `columns` are stored; `add`: added to `to`. */
INLINE TARGET void NAME(tile)(
    const int rows, int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b, REAL *to,
    int64_t to_row, int64_t columns, int add)
{
    VECTOR sums[TILE_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = (VECTOR){0};
    for (int64_t k = 0; k < depth; k++) {
        const VECTOR left = READ(b + k * PANEL), right = READ(b + k * PANEL + LANES);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const REAL factor = a[r * a_row + k * a_depth];
            sums[r][0] += factor * left;
            sums[r][1] += factor * right;
        }
    }
    const int64_t right = columns - LANES;
    UNROLL
    for (int r = 0; r < rows; r++) {
        REAL *row = to + r * to_row;
        if (add)
            sums[r][0] += NAME(load)(row, columns);
        NAME(store)(row, sums[r][0], columns);
        if (right > 0) {
            if (add)
                sums[r][1] += NAME(load)(row + LANES, right);
            NAME(store)(row + LANES, sums[r][1], right);
        }
    }
}

#define TILE(count) \
    do { \
        NAME(tile)(count, depth, a, a_row, a_depth, b, to, to_row, columns, add); \
        a += (count) * a_row, to += (count) * to_row, rows -= (count); \
    } while (0)

TARGET static void NAME(tiles)(
    int64_t rows, int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b, REAL *to,
    int64_t to_row, int64_t columns, int add)
{
    while (rows >= TILE_ROWS)
        TILE(TILE_ROWS);
#if TILE_ROWS > 8
    if (rows >= 8)
        TILE(8);
#endif
    if (rows >= 4)
        TILE(4);
    if (rows >= 2)
        TILE(2);
    if (rows >= 1)
        TILE(1);
}

/* Lane j of vector i becomes lane i of vector j. */
INLINE TARGET void NAME(transpose)(VECTOR *x)
{
#define LOW(i, half) ((i) & (half) ? LANES + ((i) ^ (half)) : (i))
#define HIGH(i, half) ((i) & (half) ? LANES + (i) : ((i) ^ (half)))
#define EXCHANGE(half) \
    UNROLL \
    for (int i = 0; i < LANES; i++) \
        if (!(i & (half))) { \
            const VECTOR low = SHUFFLE(x[i], x[i + (half)], EACH_LANE(LOW, half)); \
            x[i + (half)] = SHUFFLE(x[i], x[i + (half)], EACH_LANE(HIGH, half)); \
            x[i] = low; \
        }
    HALVES(EXCHANGE)
#undef EXCHANGE
#undef HIGH
#undef LOW
}

/* Panels `first` to `end` of b, each (depth, PANEL) in order, with zeros after the last column. */
TARGET static void NAME(pack)(const struct product *one, int64_t first, int64_t end)
{
    const int64_t depth = one->depth, by_depth = one->b_depth, by_column = one->b_column;
    for (int64_t panel = first; panel < end; panel++) {
        REAL *to = (REAL *)one->packed + panel * depth * PANEL;
        const REAL *from = (const REAL *)one->b + panel * PANEL * by_column;
        const int64_t left = one->width - panel * PANEL, width = left < PANEL ? left : PANEL;
        const int is_whole = width == PANEL;
        int64_t k = 0;
        if (is_whole && by_column == 1)
            for (; k < depth; k++) {
                AT(to + k * PANEL) = READ(from + k * by_depth);
                AT(to + k * PANEL + LANES) = READ(from + k * by_depth + LANES);
            }
        else if (is_whole && by_depth == 1)
            for (; k + LANES <= depth; k += LANES)
                for (int side = 0; side < 2; side++) {
                    VECTOR x[LANES];
                    UNROLL
                    for (int i = 0; i < LANES; i++)
                        x[i] = READ(from + (side * LANES + i) * by_column + k);
                    NAME(transpose)(x);
                    UNROLL
                    for (int i = 0; i < LANES; i++)
                        AT(to + (k + i) * PANEL + side * LANES) = x[i];
                }
        for (; k < depth; k++)
            for (int64_t i = 0; i < PANEL; i++)
                to[k * PANEL + i] = i < width ? from[k * by_depth + i * by_column] : 0;
    }
}

/* A tile of a, whose rows are neighbours in memory, as (depth, TILE_ROWS); `left` elements follow the last one. */
INLINE TARGET void NAME(pack_tile)(int64_t rows, int64_t depth, const REAL *a, int64_t a_depth, int64_t left, REAL *to)
{
    int64_t k = 0;
    if (rows == TILE_ROWS && TILE_ROWS <= LANES) /* the lanes too many are overwritten by the next step */
        for (; k < depth && k * a_depth + LANES <= (depth - 1) * a_depth + rows + left; k++)
            AT(to + k * TILE_ROWS) = READ(a + k * a_depth);
    for (; k < depth; k++)
        for (int64_t r = 0; r < rows; r++)
            to[k * TILE_ROWS + r] = a[r + k * a_depth];
}

/* Rows `first` to `end` of to = a · b in the given panels. */
TARGET static void NAME(product)(
    const struct product *one, int64_t first, int64_t end, int64_t first_panel, int64_t end_panel)
{
    const int is_transposed = one->a_depth != 1;
    const int64_t step = (is_transposed ? 1 : 8) * TILE_ROWS;
    REAL own[TILE_ROWS * DEPTH + LANES] __attribute__((aligned(64)));
    for (int64_t begin = first_panel; begin < end_panel; begin += PANELS)
        for (int64_t k = 0; k < one->depth; k += DEPTH) {
            const int64_t depth = one->depth - k < DEPTH ? one->depth - k : DEPTH;
            for (int64_t row = first; row < end; row += step) {
                const int64_t rows = end - row < step ? end - row : step;
                const REAL *a = (const REAL *)one->a + row * one->a_row + k * one->a_depth;
                if (is_transposed)
                    NAME(pack_tile)(rows, depth, a, one->a_depth, one->rows - row - rows, own);
                for (int64_t panel = begin; panel < end_panel && panel < begin + PANELS; panel++)
                    NAME(tiles)(
                        rows, depth, is_transposed ? own : a, is_transposed ? 1 : one->a_row,
                        is_transposed ? TILE_ROWS : 1, (const REAL *)one->packed + (panel * one->depth + k) * PANEL,
                        (REAL *)one->to + row * one->to_row + panel * PANEL, one->to_row, one->width - panel * PANEL,
                        k > 0 || one->add);
            }
        }
}

#define PANELS_OF(one) (((one)->width + PANEL - 1) / PANEL)

TARGET static void NAME(products)(const struct products *all)
{
    int64_t first, end;
    for (const struct product *one = all->list; one < all->list + all->count; one++)
        if (one->packs) {
            own_part(&all->team, PANELS_OF(one), &first, &end);
            NAME(pack)(one, first, end);
        }
    if (all->barrier)
        all->barrier();
    for (const struct product *one = all->list; one < all->list + all->count; one++) {
        /* A thread's part is a range of tiles, row by row: the end of a row, whole rows, the beginning of one. */
        const int64_t panels = PANELS_OF(one), rows = one->rows;
        own_part(&all->team, (rows + TILE_ROWS - 1) / TILE_ROWS * panels, &first, &end);
        for (int64_t tile = first; tile < end;) {
            const int64_t row = tile / panels, panel = tile % panels;
            const int64_t whole = panel == 0 ? (end - tile) / panels : 0;
            const int64_t count = whole ? whole * panels : (end - tile < panels - panel ? end - tile : panels - panel);
            const int64_t last = (row + (whole ? whole : 1)) * TILE_ROWS;
            NAME(product)(one, row * TILE_ROWS, last < rows ? last : rows, panel, whole ? panels : panel + count);
            tile += count;
        }
    }
}
#undef TILE_ROWS
