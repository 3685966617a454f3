/* Matrix products of a block, of which neither side is arranged for reading. */
#define ROWS 6 /* of a product that are summed side by side, */
#define VECTORS 2 /* vectors of each */
#define WIDE 8 /* vectors of a single row */
#define DOTS 4 /* rows of a matrix whose products with one vector are summed side by side */
#define AT_ONE(x) NAME(at)(&one->x, 1, bases) /* the memory of an operand, with one stream */

/* `rows` rows and `vectors` vectors of columns of to = a · b, of which the first `columns` are stored. */
INLINE TARGET void NAME(panel)(
    const int rows, const int vectors, int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b,
    int64_t b_depth, REAL *to, int64_t to_row, int64_t to_column, int64_t columns)
{
    VECTOR sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = (VECTOR){0};
    for (int64_t k = 0; k < depth; k++) {
        VECTOR of_b[WIDE];
        for (int v = 0; v < vectors; v++)
            of_b[v] = READ(b + k * b_depth + v * LANES);
        for (int r = 0; r < rows; r++) {
            const REAL factor = a[r * a_row + k * a_depth];
            for (int v = 0; v < vectors; v++)
                sums[r][v] += factor * of_b[v];
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

#define PANEL(rows, vectors) \
    NAME(panel)(rows, vectors, depth, a, a_row, a_depth, b, b_depth, to, to_row, to_column, columns)
#define PANELS(rows) \
    do { \
        if (vectors == 1) PANEL(rows, 1); \
        else PANEL(rows, VECTORS); \
    } while (0)

TARGET static void NAME(panel_rows)(
    int64_t rows, int64_t vectors, int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b,
    int64_t b_depth, REAL *to, int64_t to_row, int64_t to_column, int64_t columns)
{
    switch (rows) {
    case 1: PANELS(1); break;
    case 2: PANELS(2); break;
    case 3: PANELS(3); break;
    case 4: PANELS(4); break;
    case 5: PANELS(5); break;
    default: PANELS(ROWS);
    }
}

TARGET static void NAME(panel_row)(
    int64_t depth, const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b, int64_t b_depth, REAL *to,
    int64_t to_row, int64_t to_column, int64_t columns)
{
    PANEL(1, WIDE);
}

/* b with neighbouring columns next to one another; `whole` of them can be read, the first `width` are stored. */
TARGET static void NAME(multiply_panels)(
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
        NAME(panel_row)(
            depth, a, a_row, a_depth, b + column, b_depth, to + column * to_column, to_row, to_column, width - column);
    while (column + LANES <= whole) {
        const int64_t vectors = column + VECTORS * LANES <= whole ? VECTORS : 1;
        for (int64_t row = 0; row < rows; row += ROWS)
            NAME(panel_rows)(
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
    const REAL *a = AT_ONE(a), *b = AT_ONE(b);
    REAL *to = AT_ONE(to), *packed = AT_ONE(packed);
    if (one->b_width == 1) {
        NAME(multiply_panels)(rows, depth, width, width, a, one->a_row, one->a_depth, b, one->b_depth, to, width, 1);
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
        NAME(multiply_panels)(
            width, depth, rows, padded, b, one->b_width, one->b_depth, packed, padded, to, 1, width);
    }
}
