/* Matrix products with few rows, as of streams that take one step. They read a large matrix, the weights of a map,
 * about once, so that products.h would take a good part of the time to pack it. Here it is read in the order of its
 * memory, ahead of the sums. Those run in the same order as there, so that results have the same bits. */
#define SLICE (4 * TILE_ROWS) /* columns of a part, where b is transposed in memory */
#define MOST_PANELS 16        /* of a part, where it is not */
#define PANELS_OF_ROWS(one) UP((one)->rows, PANEL)

/* Memory that the sums ask for, a line every second step: runs of `lines` lines, `gap` bytes between them. */
struct NAME(lines_ahead) {
    const char *line;
    int64_t left, runs; /* lines of this run, and runs after it */
    int64_t lines, gap;
};

INLINE struct NAME(lines_ahead) NAME(ahead_of)(const REAL *begin, int64_t runs, int64_t columns, int64_t row)
{
    const int64_t lines = UP(columns * (int64_t)sizeof(REAL), LINE);
    return (struct NAME(lines_ahead)){(const char *)begin, lines, runs, lines, row * (int64_t)sizeof(REAL) - lines * LINE};
}

/* `rows` rows of a panel of to = a · b, as in products.h. */
INLINE TARGET void NAME(few_tile)(
    const int rows, int64_t depth, const REAL *a, int64_t a_row, const REAL *b, REAL *to, int64_t to_row,
    int64_t columns, int add, struct NAME(lines_ahead) *ahead)
{
    VECTOR sums[TILE_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = (VECTOR){0};
    const REAL *of_rows[3] = {a, a + 5 * a_row, a + 10 * a_row};
    for (int64_t pairs = depth / 2; pairs > 0;) {
        const int64_t now = LESS(pairs, ahead->left);
        const char *line = ahead->line;
        for (int64_t i = 0; i < now; i++) {
            STEP_OF_SUMS(1, PANEL);
            __builtin_prefetch(line, 0, 2);
            STEP_OF_SUMS(1, PANEL);
            line += LINE;
        }
        pairs -= now;
        ahead->left -= now;
        ahead->line = line;
        if (!ahead->left) {
            ahead->left = ahead->lines;
            ahead->line += ahead->runs-- > 1 ? ahead->gap : -ahead->lines * LINE;
        }
    }
    if (depth % 2)
        STEP_OF_SUMS(1, PANEL);
    NAME(put_sums)(rows, sums, to, to_row, columns, add, NULL);
}

TARGET static void NAME(few_tiles)(
    int64_t rows, int64_t depth, const REAL *a, int64_t a_row, const REAL *b, REAL *to, int64_t to_row,
    int64_t columns, int add, struct NAME(lines_ahead) *ahead)
{
#define FEW_TILE(count) \
    do { \
        NAME(few_tile)(count, depth, a, a_row, b, to, to_row, columns, add, ahead); \
        a += (count) * a_row, to += (count) * to_row, rows -= (count); \
    } while (0)
    EACH_TILE(FEW_TILE);
#undef FEW_TILE
}

/* Where b is transposed in memory, as weights are: toᵀ = bᵀ · aᵀ, with the small aᵀ packed. Columns `first` to `end`. */
TARGET static void NAME(sliced_product)(const struct product *one, int64_t first, int64_t end)
{
    const int64_t rows = PANELS_OF_ROWS(one) * PANEL, columns = end - first;
    REAL *slice = (REAL *)own_panels, *to = (REAL *)one->to + first;
    const REAL *b = (const REAL *)one->b + first * one->b_column;
    struct NAME(lines_ahead) ahead = NAME(ahead_of)(b + SLICE * one->b_column, SLICE, one->depth, one->b_column);
    if (one->add)
        for (int64_t i = 0; i < columns; i++)
            for (int64_t r = 0; r < one->rows; r++)
                slice[i * rows + r] = to[r * one->to_row + i];
    STEPS(k, 0, one->depth, DEPTH)
        STEPS(panel, 0, PANELS_OF_ROWS(one), 1)
            NAME(few_tiles)(
                columns, LESS(one->depth - k, DEPTH), b + k, one->b_column,
                (const REAL *)one->packed + (panel * one->depth + k) * PANEL, slice + panel * PANEL, rows, PANEL,
                k > 0 || one->add, &ahead);
    STEPS(i, 0, columns, LANES)
        STEPS(row, 0, one->rows, LANES) {
            VECTOR x[LANES];
            UNROLL
            for (int lane = 0; lane < LANES; lane++)
                x[lane] = READ(slice + (i + lane) * rows + row);
            NAME(transpose)(x);
            for (int lane = 0; lane < LANES && row + lane < one->rows; lane++)
                NAME(store)(to + (row + lane) * one->to_row + i, x[lane], columns - i);
        }
}

/* Where rows of b are rows in memory: panels `begin` to `stop`. */
TARGET static void NAME(panel_product)(const struct product *one, int64_t begin, int64_t stop)
{
    REAL *packed = (REAL *)own_panels;
    STEPS(k, 0, one->depth, DEPTH) {
        const int64_t depth = LESS(one->depth - k, DEPTH), width = (stop - begin) * PANEL;
        const int64_t is_last = k + DEPTH >= one->depth;
        const int64_t ahead_at = is_last ? stop * PANEL : begin * PANEL + (k + DEPTH) * one->b_depth;
        const REAL *next = (const REAL *)one->b + ahead_at;
        struct NAME(lines_ahead) ahead = NAME(ahead_of)(next, DEPTH, width, one->b_depth);
        STEPS(panel, begin, stop, 1)
            NAME(pack)(one, panel, k, depth, packed + (panel - begin) * depth * PANEL);
        STEPS(panel, begin, stop, 1)
            NAME(few_tiles)(
                one->rows, depth, (const REAL *)one->a + k, one->a_row, packed + (panel - begin) * depth * PANEL,
                (REAL *)one->to + panel * PANEL, one->to_row, one->width - panel * PANEL, k > 0 || one->add, &ahead);
    }
}

/* Panels of a part: as many parts as threads, or a multiple of it. */
INLINE int64_t NAME(part_of_panels)(const struct products *all, const struct product *one)
{
    const int64_t parts = all->threads * UP(PANELS_OF(one), all->threads * MOST_PANELS);
    return UP(PANELS_OF(one), parts);
}

INLINE int64_t NAME(parts_of_few)(const struct products *all, const struct product *one)
{
    return one->packed ? UP(one->width, SLICE) : UP(PANELS_OF(one), NAME(part_of_panels)(all, one));
}

TARGET static void NAME(few_part)(const void *argument, int64_t part)
{
    const struct products *all = argument;
    const struct product *one = all->list;
    for (; one->continues || part >= NAME(parts_of_few)(all, one); one++)
        part -= one->continues ? 0 : NAME(parts_of_few)(all, one);
    do {
        const int64_t size = one->packed ? SLICE : NAME(part_of_panels)(all, one);
        const int64_t end = one->packed ? one->width : PANELS_OF(one);
        (one->packed ? NAME(sliced_product) : NAME(panel_product))(one, part * size, LESS((part + 1) * size, end));
        one++;
    } while (one < all->list + all->count && one->continues);
}

/* A panel of aᵀ. */
TARGET static void NAME(few_pack)(const void *argument, int64_t part)
{
    const struct products *all = argument;
    const struct product *one = all->list;
    for (; !one->packs || part >= PANELS_OF_ROWS(one); one++)
        part -= one->packs ? PANELS_OF_ROWS(one) : 0;
    const struct product turned = {.width = one->rows, .b = one->a, .b_depth = 1, .b_column = one->a_row};
    NAME(pack)(&turned, part, 0, one->depth, (REAL *)one->packed + part * one->depth * PANEL);
}

static void NAME(few_products)(const struct products *all)
{
    struct call packing = {.run = NAME(few_pack), .argument = all};
    struct call products = {.run = NAME(few_part), .argument = all};
    for (const struct product *one = all->list; one < all->list + all->count; one++) {
        packing.parts += one->packs ? PANELS_OF_ROWS(one) : 0;
        products.parts += one->continues ? 0 : NAME(parts_of_few)(all, one);
    }
    share(&packing, 1);
    share(&products, all->threads);
}
