/* The scan and its gradients for one element type and instruction set. A complex element is two numbers next to each other. */

#ifdef COMPLEX
#define NUMBERS 2
#else
#define NUMBERS 1
#endif
/* Numbers of a block: four lines, eight of complex numbers, because GCC unrolls loops of up to 16 rounds before it could
 * vectorise them. */
#define LANES (4 * NUMBERS * LINE / (int)sizeof(STORED))

TARGET INLINE void NAME(put_block)(STORED *target, const STORED *block, int bypass)
{
    for (int j = 0; j < LANES; j += LINE / (int)sizeof(STORED))
        PUT(target + j, block + j, bypass);
}

/* n numbers: state = a * state + b, h = state. */
TARGET INLINE void NAME(forward_row)(
    int n, const STORED *restrict a, const STORED *restrict b, STATE *restrict state, STORED *restrict h)
{
#ifdef COMPLEX
    for (int j = 0; j < n; j += 2) {
        STATE re = a[j] * state[j] - a[j + 1] * state[j + 1] + b[j];
        STATE im = a[j] * state[j + 1] + a[j + 1] * state[j] + b[j + 1];
        h[j] = state[j] = re;
        h[j + 1] = state[j + 1] = im;
    }
#else
    for (int j = 0; j < n; j++) {
        STATE next = LOAD(a[j]) * state[j] + LOAD(b[j]);
        state[j] = next;
        h[j] = SAVE(next);
    }
#endif
}

/* n numbers: total = grad_h + carried, grad_b = total, grad_a = total * conj(previous), carried = total * conj(a).
 * `previous` is h_{t-1}, or before the first step the initial state, which is a STATE. */
#define BACKWARD_ROW(function, PREVIOUS, LOAD_PREVIOUS)                                                               \
    TARGET INLINE void NAME(function)(                                                                                \
        int n, const STORED *restrict a, const PREVIOUS *restrict previous, const STORED *restrict grad_h,            \
        STATE *restrict carried, STORED *restrict grad_a, STORED *restrict grad_b)                                    \
    {                                                                                                                 \
        BACKWARD_BODY(LOAD_PREVIOUS)                                                                                  \
    }
#ifdef COMPLEX
#define BACKWARD_BODY(LOAD_PREVIOUS)                                                                                  \
    for (int j = 0; j < n; j += 2) {                                                                                  \
        STATE re = grad_h[j] + carried[j], im = grad_h[j + 1] + carried[j + 1];                                       \
        grad_b[j] = re;                                                                                               \
        grad_b[j + 1] = im;                                                                                           \
        grad_a[j] = re * previous[j] + im * previous[j + 1];                                                          \
        grad_a[j + 1] = im * previous[j] - re * previous[j + 1];                                                      \
        carried[j] = re * a[j] + im * a[j + 1];                                                                       \
        carried[j + 1] = im * a[j] - re * a[j + 1];                                                                   \
    }
#else
#define BACKWARD_BODY(LOAD_PREVIOUS)                                                                                  \
    for (int j = 0; j < n; j++) {                                                                                     \
        STATE total = LOAD(grad_h[j]) + carried[j];                                                                   \
        grad_b[j] = SAVE(total);                                                                                      \
        grad_a[j] = SAVE(total * LOAD_PREVIOUS(previous[j]));                                                         \
        carried[j] = total * LOAD(a[j]);                                                                              \
    }
#endif
BACKWARD_ROW(backward_row, STORED, LOAD)
BACKWARD_ROW(backward_first_row, STATE, AS_IT_IS)
#undef BACKWARD_BODY
#undef BACKWARD_ROW

TARGET static void NAME(forward)(const struct scan *scan, int64_t stream)
{
    const int64_t width = scan->width * NUMBERS, steps = scan->steps, whole = width / LANES * LANES;
    const STORED *a = (const STORED *)scan->a + stream * scan->a_stream * NUMBERS;
    const STORED *b = (const STORED *)scan->b + stream * scan->b_stream * NUMBERS;
    const uint8_t *resets = scan->resets ? (const uint8_t *)scan->resets + stream * steps : NULL;
    STORED *h = (STORED *)scan->h + stream * steps * width;
    STATE *state = (STATE *)scan->last + stream * width; /* the final state is built in its place */
    const int bypass = (int)scan->bypass_cache;

    memcpy(state, (const STATE *)scan->initial + stream * width, width * sizeof(STATE));
    for (int64_t t = 0; t < steps; t++) {
        if (resets && resets[t])
            memset(state, 0, width * sizeof(STATE));
        for (int64_t i = 0; i < whole; i += LANES) {
            STORED block[LANES];
            NAME(forward_row)(LANES, a + i, b + i, state + i, block);
            NAME(put_block)(h + i, block, bypass);
        }
        NAME(forward_row)((int)(width - whole), a + whole, b + whole, state + whole, h + whole);
        a += scan->a_step * NUMBERS;
        b += scan->b_step * NUMBERS;
        h += width;
    }
}

TARGET static void NAME(backward)(const struct scan *scan, int64_t stream)
{
    const int64_t width = scan->width * NUMBERS, steps = scan->steps, whole = width / LANES * LANES;
    const uint8_t *resets = scan->resets ? (const uint8_t *)scan->resets + stream * steps : NULL;
    const STATE *initial = (const STATE *)scan->initial + stream * width;
    STATE *carried = (STATE *)scan->grad_state + stream * width;
    const int bypass = (int)scan->bypass_cache;

    if (scan->last)
        memcpy(carried, (const STATE *)scan->last + stream * width, width * sizeof(STATE));
    else
        memset(carried, 0, width * sizeof(STATE));
    for (int64_t t = steps - 1; t >= 0; t--) {
        const STORED *a = (const STORED *)scan->a + (stream * scan->a_stream + t * scan->a_step) * NUMBERS;
        const STORED *grad_h = (const STORED *)scan->b + (stream * scan->b_stream + t * scan->b_step) * NUMBERS;
        const int64_t row = (stream * steps + t) * width;
        const STORED *previous = (const STORED *)scan->h + row - width;
        STORED *grad_a = (STORED *)scan->grad_a + row, *grad_b = (STORED *)scan->grad_b + row;

        if (resets && resets[t]) { /* nothing passes between t - 1 and t, not even a NaN */
            for (int64_t i = 0; i < width; i++)
                grad_b[i] = SAVE(LOAD(grad_h[i]) + carried[i]);
            memset(grad_a, 0, width * sizeof(STORED));
            memset(carried, 0, width * sizeof(STATE));
            continue;
        }
        if (t == 0) {
            for (int64_t i = 0; i < whole; i += LANES)
                NAME(backward_first_row)(LANES, a + i, initial + i, grad_h + i, carried + i, grad_a + i, grad_b + i);
            NAME(backward_first_row)(
                (int)(width - whole), a + whole, initial + whole, grad_h + whole, carried + whole, grad_a + whole,
                grad_b + whole);
            continue;
        }
        NAME(backward_row)(
            (int)(width - whole), a + whole, previous + whole, grad_h + whole, carried + whole, grad_a + whole,
            grad_b + whole);
        for (int64_t i = whole - LANES; i >= 0; i -= LANES) {
            STORED block_a[LANES], block_b[LANES];
            NAME(backward_row)(LANES, a + i, previous + i, grad_h + i, carried + i, block_a, block_b);
            NAME(put_block)(grad_b + i, block_b, bypass);
            NAME(put_block)(grad_a + i, block_a, bypass);
        }
    }
}

#undef NUMBERS
#undef LANES
#undef LEVEL
#undef TARGET
#undef PUT
