/* The passes of a layer over the rows of streams, one pass after another on as many rows as stay in the inner caches.
 *
 * Every pass gives a row the bits that it has in a call of its own. */

/* ---- h_t = r ∘ h_{t-1} + γ ∘ input_gate ∘ inputs: coefficients as in gates.h, and the scan of linear_scan_rows.h ---- */

/* A number as it is rounded in memory: neither fused with what is computed from it, nor recomputed. */
#undef ROUNDED
#if LEVEL_NUMBER == 2
#define ROUNDED(x) __asm__("" : "+v"(x))
#elif LEVEL_NUMBER == 1
#define ROUNDED(x) __asm__("" : "+x"(x))
#else
#define ROUNDED(x)
#endif

#define STREAM_ROW(name) (REAL *)one->name + stream * width

INLINE TARGET int NAME(is_reset)(const struct gated_recurrence *one, int64_t row)
{
    return one->resets && ((const uint8_t *)one->resets)[row];
}

/* Rows in ascending order. */
INLINE TARGET void NAME(gated_recurrence_of)(
    const int sigmoid_gate, const struct gated_recurrence *one, int64_t first, int64_t end)
{
    const int64_t width = one->width, steps = one->steps;
    const REAL *rate = (const REAL *)one->rate;
    for (int64_t row = first; row < end; row++) {
        const int64_t stream = row / steps, step = row % steps;
        READ_ROW(recurrence_gate);
        READ_ROW(input_gate);
        READ_ROW(inputs);
        WRITE_ROW(states);
        const REAL *previous = step ? states - width : STREAM_ROW(initial);
        const int reset = NAME(is_reset)(one, row);
        EACH_VECTOR {
            VECTOR power;
            VECTOR scaled = NAME(scaled_inputs)(
                sigmoid_gate, OF(recurrence_gate), OF(rate), OF(input_gate), OF(inputs), &power);
            ROUNDED(scaled);
            VECTOR before = {0};
            if (!reset)
                before = OF(previous);
            PUT(states, power * before + scaled);
        }
        if (step == steps - 1)
            memcpy(STREAM_ROW(last), states, width * sizeof(REAL));
    }
}

BOTH_INPUT_GATES(gated_recurrence, gated_recurrence)

/* Rows in descending order; `grad_initial` is what later rows give to the state of earlier ones. The rows' sum for the
 * rate is one row of `grad_rate`. */
INLINE TARGET void NAME(gated_recurrence_backward_of)(
    const int sigmoid_gate, const struct gated_recurrence *one, int64_t first, int64_t end)
{
    const int64_t width = one->width, steps = one->steps;
    const REAL *rate = (const REAL *)one->rate;
    REAL *of_log_decays = (REAL *)one->log_decays + first * width; /* added up in ascending order, as without this pass */
    REAL *grad_rate = (REAL *)one->grad_rate + first / CHUNK * width;
    for (int64_t row = end - 1; row >= first; row--) {
        const int64_t stream = row / steps, step = row % steps;
        READ_ROW(recurrence_gate);
        READ_ROW(input_gate);
        READ_ROW(inputs);
        READ_ROW(grad_states);
        READ_ROW(states);
        WRITE_ROW(grad_recurrence_gate);
        WRITE_ROW(grad_input_gate);
        WRITE_ROW(grad_inputs);
        REAL *log_decays = of_log_decays + (row - first) * width;
        REAL *carried = STREAM_ROW(grad_initial);
        const REAL *previous = step ? states - width : STREAM_ROW(initial);
        const int reset = NAME(is_reset)(one, row);
        if (step == steps - 1) {
            if (one->grad_last)
                memcpy(carried, STREAM_ROW(grad_last), width * sizeof(REAL));
            else
                memset(carried, 0, width * sizeof(REAL));
        }
        EACH_VECTOR {
            VECTOR of_scaled = OF(grad_states) + OF(carried), of_decay = {0}, of_before = {0};
            ROUNDED(of_scaled);
            if (!reset)
                of_decay = of_scaled * OF(previous);
            ROUNDED(of_decay);
            VECTOR power, of_z, of_opened, of_x;
            const VECTOR of_log_decay = NAME(coefficient_gradients)(
                sigmoid_gate, OF(recurrence_gate), OF(rate), OF(input_gate), OF(inputs), of_scaled, of_decay, &of_z,
                &of_opened, &of_x, &power);
            if (!reset)
                of_before = of_scaled * power;
            PUT(carried, of_before);
            PUT(grad_input_gate, of_opened);
            PUT(grad_inputs, of_x);
            PUT(log_decays, of_log_decay);
            PUT(grad_recurrence_gate, of_z);
        }
    }
    memset(grad_rate, 0, width * sizeof(REAL));
    for (int64_t row = 0; row < end - first; row++) {
        const REAL *log_decays = of_log_decays + row * width;
        EACH_VECTOR
            PUT(grad_rate, OF(grad_rate) - OF(log_decays));
    }
}

BOTH_INPUT_GATES(gated_recurrence_backward, gated_recurrence)

/* ---- Chains of passes ---- */

TARGET static void NAME(packed_product)(
    const struct product *one, int rounds, int64_t first, int64_t end, struct NAME(ahead) *ahead)
{
    STEPS(row, first, end, PART_ROWS) {
        const int64_t stop = LESS(row + PART_ROWS, end);
#if HAS_ROUNDED
        if (rounds) {
            product_bf16(one, row, stop);
            continue;
        }
#endif
        (void)rounds;
        NAME(product)(one, row, stop, ahead);
    }
}

TARGET static void NAME(chain_passes)(
    const struct chain *chain, int64_t first, int64_t end, struct NAME(ahead) *ahead)
{
    for (const struct stage *stage = chain->stages; stage < chain->stages + chain->count; stage++) {
        const void *one = (const char *)chain + stage->argument;
        switch (stage->pass) {
        case PRODUCT:
            NAME(packed_product)(one, (int)chain->rounds, first, end, ahead);
            break;
        case RMS_NORM:
            NAME(rms_norm)(one, first, end);
            break;
        case RMS_NORM_BACKWARD:
            NAME(rms_norm_backward)(one, first, end);
            break;
        case GATED_NORM:
            NAME(gated_norm)(one, first, end);
            break;
        case GATED_NORM_BACKWARD:
            NAME(gated_norm_backward)(one, first, end);
            break;
        case GATED_RECURRENCE:
            NAME(gated_recurrence)(one, first, end);
            break;
        case GATED_RECURRENCE_BACKWARD:
            NAME(gated_recurrence_backward)(one, first, end);
            break;
        case GATED_GELU:
            NAME(gated_gelu)(one, first, end);
            break;
        case GATED_GELU_BACKWARD:
            NAME(gated_gelu_backward)(one, first, end);
            break;
        case TEMPORAL_CONVOLUTION:
            NAME(temporal_convolution)(one, first, end);
            break;
        case TEMPORAL_CONVOLUTION_BACKWARD:
            NAME(temporal_convolution_backward)(one, first, end);
            break;
        }
    }
}

/* The number of a memory that no other thread has; there are as many as threads. */
INLINE int NAME(take_memory)(uint64_t *taken)
{
    for (;;) {
        uint64_t before = __atomic_load_n(taken, __ATOMIC_RELAXED);
        const int number = __builtin_ctzll(~before);
        if (__atomic_compare_exchange_n(
                taken, &before, before | 1ull << number, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return number;
    }
}

/* The first row of a tile of a part. */
INLINE int64_t NAME(first_of_tile)(const struct chain *chain, int64_t part, int64_t tile)
{
    const int64_t begin = part * chain->part_rows, tiles = UP(LESS(chain->part_rows, chain->rows - begin), CHUNK);
    return begin + (chain->descends ? tiles - 1 - tile : tile) * CHUNK;
}

/* What the tile after this one finds in memory; after the last tile of a part, the first one of a part that this thread
 * will probably take. */
INLINE struct NAME(ahead) NAME(next_tile)(const struct chain *chain, int64_t part, int64_t tile)
{
    const struct given *given = (const struct given *)((const char *)chain + chain->given);
    struct NAME(ahead) ahead = {.given = given, .end = given + chain->given_count};
    if (++tile * CHUNK >= LESS(chain->part_rows, chain->rows - part * chain->part_rows))
        part += chain->threads, tile = 0;
    if (part * chain->part_rows >= chain->rows) {
        ahead.given = ahead.end;
        return ahead;
    }
    ahead.first = NAME(first_of_tile)(chain, part, tile);
    ahead.rows = LESS(CHUNK, chain->rows - ahead.first);
    return ahead;
}

TARGET static void NAME(chain_part)(const void *argument, int64_t part)
{
    struct running_chain *running = (struct running_chain *)argument;
    const struct chain *shared = running->chain;
    const int number = NAME(take_memory)(&running->taken);
    char *memory = (char *)shared->memory + number * shared->thread_bytes, *rows = memory + shared->words * 8;
    int64_t *words = (int64_t *)memory;
    memcpy(words, shared, shared->words * 8);
    const struct chain *chain = (const struct chain *)memory;
    const struct local *locals = (const struct local *)(memory + chain->locals);
    const int64_t begin = part * chain->part_rows, end = LESS(begin + chain->part_rows, chain->rows);
    const int64_t tiles = UP(end - begin, CHUNK);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = NAME(first_of_tile)(chain, part, tile);
        struct NAME(ahead) ahead = NAME(next_tile)(chain, part, tile);
        for (const struct local *one = locals; one < locals + chain->local_count; one++)
            words[one->word] = (int64_t)rows + one->at - first * one->row_bytes;
        NAME(chain_passes)(chain, first, LESS(first + CHUNK, end), &ahead);
    }
    __atomic_fetch_and(&running->taken, ~(1ull << number), __ATOMIC_RELEASE);
}

static void NAME(chain)(const struct chain *chain)
{
    const struct products *products = (const struct products *)((const char *)chain + chain->products);
    struct call packing = {.run = NAME(pack_part), .argument = products};
    struct running_chain running = {.chain = chain};
    struct call passes = {
        .run = NAME(chain_part), .argument = &running, .parts = UP(chain->rows, chain->part_rows)};
    for (int64_t number = 0; number < products->count; number++)
        packing.parts += PANELS_OF(products->list + number);
    share(&packing, chain->threads);
    share(&passes, chain->threads);
}
