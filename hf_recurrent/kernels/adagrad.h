/* sum += mean(g²) and row -= rate · g / (sqrt(sum) + eps): one row of a table by row-wise Adagrad. */
INLINE TARGET void NAME(adagrad_row)(
    int64_t width, const REAL *gradient, REAL *row, REAL *sum, REAL rate, REAL eps)
{
    VECTOR squares = {0};
    for (int64_t i = 0, left = width; left > 0; i += LANES, left -= LANES)
        squares += NAME(load)(gradient + i, left) * NAME(load)(gradient + i, left);
    *sum += NAME(sum)(&squares) / width;
    const REAL factor = rate / (MATH(sqrt)(*sum) + eps);
    for (int64_t i = 0, left = width; left > 0; i += LANES, left -= LANES)
        NAME(store)(row + i, NAME(load)(row + i, left) - NAME(load)(gradient + i, left) * factor, left);
}
