/* Cross-entropy of logits, row by row: a row stays in the inner cache. */

/* The first `count` lanes of x, then `other`. */
INLINE TARGET VECTOR NAME(first_lanes_or)(VECTOR x, int64_t count, REAL other)
{
    const INTEGERS lane = {EACH_LANE(SAME, 0)};
    return SELECT(lane < (INTEGER)count, x, ALL(other));
}

TARGET static void NAME(cross_entropy)(const struct cross_entropy *one, int64_t first, int64_t end)
{
    const int64_t width = one->width, *targets = (const int64_t *)one->targets;
    for (int64_t row = first; row < end; row++) {
        READ_ROW(logits);
        REAL most = -INFINITY, total, *kept = (REAL *)one->kept + 2 * row;
        VECTOR mosts = ALL(-INFINITY), sums = {0};
        EACH_VECTOR {
            /* Zeros after the last element of a row would count: they get the first one. */
            VECTOR x = OF(logits);
            if (left < LANES)
                x = NAME(first_lanes_or)(x, left, logits[0]);
            mosts = SELECT(x > mosts, x, mosts);
        }
        for (int lane = 0; lane < LANES; lane++)
            most = mosts[lane] > most ? mosts[lane] : most;
        EACH_VECTOR
            sums += NAME(only)(NAME(exp_of)(OF(logits) - most), left);
        total = NAME(sum)(&sums);
        kept[0] = most, kept[1] = 1 / total;
        ((REAL *)one->nats)[row] =
            targets[row] >= 0 && targets[row] < width ? MATH(log)(total) + (most - logits[targets[row]]) : 0;
    }
}

TARGET static void NAME(cross_entropy_backward)(const struct cross_entropy *one, int64_t first, int64_t end)
{
    const int64_t width = one->width, *targets = (const int64_t *)one->targets;
    for (int64_t row = first; row < end; row++) {
        READ_ROW(logits);
        WRITE_ROW(grad_logits);
        const REAL *kept = (const REAL *)one->kept + 2 * row, of_row = ((const REAL *)one->grad)[row];
        const REAL scale = of_row * kept[1];
        if (targets[row] < 0 || targets[row] >= width) {
            memset(grad_logits, 0, width * sizeof(REAL));
            continue;
        }
        EACH_VECTOR
            PUT(grad_logits, scale * NAME(exp_of)(OF(logits) - kept[0]));
        grad_logits[targets[row]] -= of_row;
    }
}
