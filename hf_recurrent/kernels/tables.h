/* Tables of which a step reads and changes few rows. Lookups are numbers of rows, `group` of them for each output. */

#define AHEAD 8 /* rows that are asked for before they are read: no processor knows which row is next */

INLINE TARGET void NAME(prefetch_row)(const struct table *one, int64_t number, int64_t count)
{
    if (number >= count)
        return;
    const char *row = (const char *)((const REAL *)one->table + ((const int64_t *)one->lookups)[number] * one->width);
    for (int64_t byte = 0; byte < one->width * (int64_t)sizeof(REAL); byte += 64)
        __builtin_prefetch(row + byte);
}

/* to[i] = sum of the rows of group i. */
TARGET static void NAME(table_sum)(const struct table *one, int64_t first, int64_t end)
{
    const int64_t width = one->width, *lookups = (const int64_t *)one->lookups;
    for (int64_t row = first; row < end; row++) {
        const int64_t *group = lookups + row * one->group;
        REAL *to = (REAL *)one->values + row * width;
        for (int64_t g = 0; g < one->group; g++)
            NAME(prefetch_row)(one, (row + 1) * one->group + g, end * one->group);
        EACH_VECTOR {
            VECTOR sum = {0};
            for (int64_t g = 0; g < one->group; g++)
                sum += NAME(load)((const REAL *)one->table + group[g] * width + i, left);
            PUT(to, sum);
        }
    }
}

INLINE TARGET const REAL *NAME(gradient_row)(const struct table *one, int64_t place)
{
    if (one->addresses)
        return (const REAL *)((const int64_t *)one->addresses)[place];
    return (const REAL *)one->grad + place / one->group * one->width;
}

/* The sums of the outputs' gradients for each row that was read, and the rows' numbers, ascending: `lookups` sorted, the
 * places that they had in `order`, and in `ranks` how many smaller rows were read. A part takes the rows that begin in
 * it. */
TARGET static void NAME(table_gradient)(const struct table *one, int64_t first, int64_t end)
{
    const int64_t width = one->width, *lookups = (const int64_t *)one->lookups, *order = (const int64_t *)one->order;
    const int64_t *ranks = (const int64_t *)one->ranks;
    while (first > 0 && first < end && ranks[first] == ranks[first - 1])
        first++;
    for (int64_t at = first, next; at < end; at = next) {
        for (next = at + 1; next < one->rows && ranks[next] == ranks[at];)
            next++;
        REAL *to = (REAL *)one->values + ranks[at] * width;
        EACH_VECTOR {
            VECTOR sum = {0};
            for (int64_t k = at; k < next; k++)
                sum += NAME(load)(NAME(gradient_row)(one, order[k]) + i, left);
            PUT(to, sum);
        }
        ((int64_t *)one->found)[ranks[at]] = lookups[at];
    }
}

/* Of rows that differ. */
TARGET static void NAME(table_adagrad)(const struct table *one, int64_t first, int64_t end)
{
    const int64_t width = one->width, *lookups = (const int64_t *)one->lookups;
    for (int64_t number = first; number < end; number++) {
        NAME(prefetch_row)(one, number + AHEAD, end);
        if (number + AHEAD < end)
            __builtin_prefetch((const REAL *)one->sums + lookups[number + AHEAD], 1);
        NAME(adagrad_row)(
            width, (const REAL *)one->grad + number * width, (REAL *)one->table + lookups[number] * width,
            (REAL *)one->sums + lookups[number], (REAL)one->rate, (REAL)one->eps);
    }
}
#undef AHEAD
