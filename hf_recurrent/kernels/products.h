/* Matrix products with many rows: tiles of sums that fill the registers. Sums run over the depth in one order, whatever
 * the tile and the number of threads. */
#undef PART_ROWS
#if LEVEL_NUMBER == 2
#define TILE_ROWS 14
#define PART_ROWS (4 * TILE_ROWS) /* rows for which a panel is read once */
#else
#define TILE_ROWS 6
#define PART_ROWS (11 * TILE_ROWS)
#endif
#define PANEL (2 * LANES) /* columns of a tile */
#define DEPTH 256         /* steps of the sums for which a panel of b stays in the inner cache */
#define PANELS 12         /* panels of that depth that stay in the next cache */
#define LINE 64           /* bytes that memory gives at once */
#define PACE 32           /* bytes of memory asked for in each step of the sums: a line in two of them */
#define NEAR_ROWS 256     /* elements from one row to the next, up to which b is read where it is */
#define MOST_AHEAD (1 << 18) /* bytes of a matrix that the next cache takes before they are read */
#define HIDDEN(x) __asm__("" : "+r"(x)) /* a value of its own to the compiler */
#define SERIAL_PACKING (1 << 17) /* fewer elements are packed before another thread wakes up */

/* A step of the sums of `rows` rows of a tile. Five rows for each pointer, so that one register has the distance of one,
 * two and four of them. */
#define STEP_OF_SUMS(a_depth, b_row) \
    do { \
        const VECTOR left = READ(b), right = READ(b + LANES); \
        UNROLL \
        for (int i = 0; i < (rows + 4) / 5; i++) \
            HIDDEN(of_rows[i]); \
        UNROLL \
        for (int r = 0; r < rows; r++) { \
            const REAL factor = of_rows[r / 5][r % 5 * a_row]; \
            sums[r][0] += factor * left; \
            sums[r][1] += factor * right; \
        } \
        UNROLL \
        for (int i = 0; i < (rows + 4) / 5; i++) \
            of_rows[i] += (a_depth); \
        b += (b_row); \
    } while (0)

/* The first `columns` of the sums go to `to`; `add`: added to it, and `plus` too where it is not null. */
INLINE TARGET void NAME(put_sums)(
    const int rows, VECTOR sums[][2], REAL *to, int64_t to_row, int64_t columns, int add, const REAL *plus)
{
    const int64_t right = columns - LANES;
    UNROLL
    for (int r = 0; r < rows; r++) {
        REAL *row = to + r * to_row;
        if (add)
            sums[r][0] += NAME(load)(row, columns);
        if (plus)
            sums[r][0] += NAME(load)(plus + r * to_row, columns);
        NAME(store)(row, sums[r][0], columns);
        if (right > 0) {
            if (add)
                sums[r][1] += NAME(load)(row + LANES, right);
            if (plus)
                sums[r][1] += NAME(load)(plus + r * to_row + LANES, right);
            NAME(store)(row + LANES, sums[r][1], right);
        }
    }
}

/* `rows` rows of a panel of to = a · b, of which the first `columns` are stored; `add`: added to `to`. Steps of
 * the sums ask for lines of memory that a later tile reads, beginning with `ahead`: rows are too short and too far
 * apart for the processor to see which one is next. */
INLINE TARGET void NAME(tile)(
    const int rows, int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b, int64_t b_row,
    REAL *to, int64_t to_row, int64_t columns, int add, const REAL *plus, const char *ahead)
{
    VECTOR sums[TILE_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = (VECTOR){0};
    const REAL *of_rows[3] = {a, a + 5 * a_row, a + 10 * a_row};
    for (int64_t k = 0; k < depth; k++) {
        STEP_OF_SUMS(a_depth, b_row);
        __builtin_prefetch(ahead, 0, 2);
        ahead += PACE;
    }
    NAME(put_sums)(rows, sums, to, to_row, columns, add, plus);
}

/* Tiles of all `rows`, each by tile(count). */
#undef EACH_TILE
#define SMALL_TILES(tile) \
    do { \
        if (rows >= 4) \
            tile(4); \
        if (rows >= 2) \
            tile(2); \
        if (rows >= 1) \
            tile(1); \
    } while (0)
#if TILE_ROWS > 8
#define EACH_TILE(tile) \
    do { \
        while (rows >= TILE_ROWS) \
            tile(TILE_ROWS); \
        if (rows >= 8) \
            tile(8); \
        SMALL_TILES(tile); \
    } while (0)
#else
#define EACH_TILE(tile) \
    do { \
        while (rows >= TILE_ROWS) \
            tile(TILE_ROWS); \
        SMALL_TILES(tile); \
    } while (0)
#endif

#define TILE(count) \
    do { \
        NAME(tile)(count, depth, a, a_row, a_depth, b, b_row, to, to_row, columns, add, plus, ahead); \
        a += (count) * a_row, to += (count) * to_row, rows -= (count), ahead += (count) * ahead_row; \
        plus = plus ? plus + (count) * to_row : plus; \
    } while (0)

TARGET static void NAME(tiles)(
    int64_t rows, int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b, int64_t b_row,
    REAL *to, int64_t to_row, int64_t columns, int add, const REAL *plus, const char *ahead, int64_t ahead_row)
{
    EACH_TILE(TILE);
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

/* Steps `begin` to `begin` + `depth` of panel `panel` of b, (depth, PANEL) in order, with zeros after the last column. */
TARGET static void NAME(pack)(const struct product *one, int64_t panel, int64_t begin, int64_t depth, REAL *to)
{
    const int64_t by_depth = one->b_depth, by_column = one->b_column;
    const REAL *from = (const REAL *)one->b + panel * PANEL * by_column + begin * by_depth;
    const int64_t left = one->width - panel * PANEL, width = left < PANEL ? left : PANEL;
    int64_t k = 0;
    if (width == PANEL && by_column == 1)
        for (; k < depth; k++) {
            AT(to + k * PANEL) = READ(from + k * by_depth);
            AT(to + k * PANEL + LANES) = READ(from + k * by_depth + LANES);
        }
    else if (width == PANEL && by_depth == 1)
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

#define PANELS_OF(one) (((one)->width + PANEL - 1) / PANEL)
#define UP(x, y) (((x) + (y) - 1) / (y))
#define LESS(x, y) ((x) < (y) ? (x) : (y))
#define STEPS(index, begin, end, size) for (int64_t index = begin; index < (end); index += (size))

/* What is added to the tile of a panel after a block of the sums that begins with step k; null but for the last one. */
INLINE const REAL *NAME(plus_of)(const struct product *one, int64_t first, int64_t panel, int64_t k)
{
    if (!one->plus || k + DEPTH < one->depth)
        return NULL;
    return (const REAL *)one->plus + first * one->to_row + panel * PANEL;
}

/* What is asked for during products: rows of some matrices, one after the other. */
struct NAME(ahead) {
    const struct given *given, *end;
    int64_t first, rows; /* of all of them */
    int64_t done;        /* bytes of the first one */
};

/* The address after `bytes` more of them. */
INLINE const char *NAME(take_ahead)(struct NAME(ahead) *ahead, int64_t bytes)
{
    if (ahead->given == ahead->end)
        return (const char *)ahead;
    const struct given *given = ahead->given;
    const char *from = (const char *)given->from + ahead->first * given->row_bytes + ahead->done;
    if ((ahead->done += bytes) >= ahead->rows * given->row_bytes)
        ahead->given++, ahead->done = 0;
    return from;
}

/* Rows `first` to `end` of to = a · b, whose panels are packed. Without `others`, the next rows of a are asked for. */
TARGET static void NAME(product)(const struct product *one, int64_t first, int64_t end, struct NAME(ahead) *others)
{
    STEPS(begin, 0, PANELS_OF(one), PANELS)
        STEPS(k, 0, one->depth, DEPTH)
            STEPS(panel, begin, LESS(PANELS_OF(one), begin + PANELS), 1) {
                const int64_t depth = LESS(one->depth - k, DEPTH);
                int64_t ahead_row = one->a_row * (int64_t)sizeof(REAL);
                const char *ahead = (const char *)((const REAL *)one->a + (first + TILE_ROWS) * one->a_row + TILE_ROWS * k);
                if (others) {
                    ahead_row = depth * PACE / TILE_ROWS;
                    ahead = NAME(take_ahead)(others, (end - first) * ahead_row);
                }
                NAME(tiles)(
                    end - first, depth, (const REAL *)one->a + first * one->a_row + k, one->a_row, 1,
                    (const REAL *)one->packed + (panel * one->depth + k) * PANEL, PANEL,
                    (REAL *)one->to + first * one->to_row + panel * PANEL, one->to_row, one->width - panel * PANEL,
                    k > 0 || one->add, NAME(plus_of)(one, first, panel, k), ahead, ahead_row);
            }
}

/* What the next block of the sums reads: `done` bytes of its b, or after them of its a. */
INLINE const char *NAME(next_block)(const struct product *one, int64_t next, int64_t done)
{
    const int64_t of_b = LESS(one->b_depth * DEPTH * (int64_t)sizeof(REAL), MOST_AHEAD);
    const REAL *a = (const REAL *)one->a + next * one->a_depth, *b = (const REAL *)one->b + next * one->b_depth;
    return done < of_b ? (const char *)b + done : (const char *)a + LESS(done - of_b, MOST_AHEAD);
}

/* True where a whole panel of b is read where it is: its rows are neighbours, and near enough to each other. */
INLINE int NAME(is_in_place)(const struct product *one, int64_t panel)
{
    return one->b_column == 1 && one->b_depth <= NEAR_ROWS && (panel + 1) * PANEL <= one->width;
}

/* A block of the sums of the same with a transposed a: steps k to k + depth of rows `first` to `end`, from packed panels
 * `begin` to `stop`. */
TARGET static void NAME(transposed_block)(
    const struct product *one, int64_t k, int64_t depth, int64_t first, int64_t end, int64_t begin, int64_t stop,
    const REAL *packed)
{
    REAL tile[TILE_ROWS * DEPTH + LANES] __attribute__((aligned(64)));
    int64_t done = 0; /* bytes of the next block that were asked for */
    STEPS(row, first, end, TILE_ROWS) {
        const int64_t rows = LESS(end - row, TILE_ROWS);
        NAME(pack_tile)(
            rows, depth, (const REAL *)one->a + row + k * one->a_depth, one->a_depth, one->rows - row - rows, tile);
        for (int64_t panel = begin; panel < stop; panel++, done += depth * PACE) {
            const int in_place = NAME(is_in_place)(one, panel);
            const REAL *b = in_place ? (const REAL *)one->b + k * one->b_depth + panel * PANEL
                                     : packed + (panel - begin) * depth * PANEL;
            NAME(tiles)(
                rows, depth, tile, 1, TILE_ROWS, b, in_place ? one->b_depth : PANEL,
                (REAL *)one->to + row * one->to_row + panel * PANEL, one->to_row, one->width - panel * PANEL,
                k > 0 || one->add, NULL, NAME(next_block)(one, k + DEPTH, done), 0);
        }
    }
}

/* Tiles `first` to `end` of the rows of a group of products with a transposed a, as gradients of weights have, and one b.
 * The depth is long, so that panels are packed in turn. */
TARGET static void NAME(transposed_products)(
    const struct product *group, int64_t first, int64_t end, int64_t begin, int64_t stop)
{
    REAL *packed = (REAL *)own_panels;
    STEPS(k, 0, group->depth, DEPTH) {
        const int64_t depth = LESS(group->depth - k, DEPTH);
        STEPS(panel, begin, stop, 1)
            if (!NAME(is_in_place)(group, panel))
                NAME(pack)(group, panel, k, depth, packed + (panel - begin) * depth * PANEL);
        const struct product *one = group;
        for (int64_t before = 0; before < end; before += UP(one->rows, TILE_ROWS), one++) {
            const int64_t row = first > before ? (first - before) * TILE_ROWS : 0;
            const int64_t last = LESS((end - before) * TILE_ROWS, one->rows);
            if (row < last)
                NAME(transposed_block)(one, k, depth, row, last, begin, stop, packed);
        }
    }
}

#if IS_FLOAT && LEVEL_NUMBER == 2
#include "products_bf16.h"
#define HAS_ROUNDED 1
#else
#define HAS_ROUNDED 0
#endif

/* ---- Parts, which threads claim: rows of a product, and of those that are added to its result ----
 *
 * The last products come first: parts of transposed products, the gradients of weights, are the longest, and at the end
 * other threads would wait for them. */

/* True where a product belongs to the group of the one before: they share b, which a part packs once. One thread takes a whole
 * product at a time, whose result and next rows stay in the caches. */
INLINE int NAME(joins)(const struct products *all, const struct product *one)
{
    return one->shares && !all->rounds && all->threads > 1;
}

/* Rows of a product, or tiles of a group of transposed ones. */
INLINE int64_t NAME(size_of)(const struct products *all, const struct product *one)
{
    if (one->packed)
        return one->rows;
    int64_t tiles = UP(one->rows, TILE_ROWS);
    while (++one < all->list + all->count && NAME(joins)(all, one))
        tiles += UP(one->rows, TILE_ROWS);
    return tiles;
}

/* The same of a part. Parts of transposed products read b again, so they are as large as the threads allow. */
INLINE int64_t NAME(size_of_part)(const struct products *all, const struct product *one)
{
    if (one->packed)
        return PART_ROWS;
    const int64_t wanted = UP(NAME(size_of)(all, one), all->threads > 1 ? 2 * all->threads : 1);
    return wanted < 4 ? 4 : wanted;
}

INLINE int64_t NAME(parts_of_product)(const struct products *all, const struct product *one)
{
    const int64_t parts = UP(NAME(size_of)(all, one), NAME(size_of_part)(all, one));
    return parts * (one->packed ? 1 : UP(PANELS_OF(one), PANELS));
}

TARGET static void NAME(product_part)(const void *argument, int64_t part)
{
    const struct products *all = argument;
    const struct product *const last = all->list + all->count, *one = last;
    for (;;) {
        do
            one--;
        while (one->continues || NAME(joins)(all, one));
        if (part < NAME(parts_of_product)(all, one))
            break;
        part -= NAME(parts_of_product)(all, one);
    }
    const int64_t size = NAME(size_of_part)(all, one), whole = NAME(size_of)(all, one), blocks = UP(whole, size);
    const int64_t first = part % blocks * size, end = LESS(first + size, whole);
    const int64_t panel = part / blocks * PANELS;
    const int64_t stop = LESS(panel + PANELS, PANELS_OF(one));
    do {
#if HAS_ROUNDED
        if (all->rounds && one->packed)
            product_bf16(one, first, end);
        else if (all->rounds)
            transposed_product_bf16(one, first * TILE_ROWS, LESS(end * TILE_ROWS, one->rows), panel, stop);
        else
#endif
        if (one->packed)
            NAME(product)(one, first, end, NULL);
        else
            NAME(transposed_products)(one, first, end, panel, stop);
        one++;
    } while (one < last && one->continues);
}

TARGET static void NAME(pack_part)(const void *argument, int64_t part)
{
    const struct products *all = argument;
    const struct product *one = all->list;
    for (; !one->packs || part >= PANELS_OF(one); one++)
        part -= one->packs ? PANELS_OF(one) : 0;
#if HAS_ROUNDED
    if (all->rounds) {
        pack_bf16(one, part, 0, one->depth, (uint32_t *)one->packed + part * UP(one->depth, 2) * PANEL);
        return;
    }
#endif
    NAME(pack)(one, part, 0, one->depth, (REAL *)one->packed + part * one->depth * PANEL);
}

static void NAME(products)(const struct products *all)
{
    struct call packing = {.run = NAME(pack_part), .argument = all}, products = {.run = NAME(product_part), .argument = all};
    int64_t packed = 0;
    for (const struct product *one = all->list; one < all->list + all->count; one++) {
        packing.parts += one->packs ? PANELS_OF(one) : 0;
        packed += one->packs ? one->depth * one->width : 0;
        products.parts += one->continues || NAME(joins)(all, one) ? 0 : NAME(parts_of_product)(all, one);
    }
    share(&packing, packed < SERIAL_PACKING ? 1 : all->threads);
    share(&products, all->threads);
}
