/* Vectors of one version. */
#ifdef __clang__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (INTEGERS){__VA_ARGS__})
#endif

/* Shuffles by halves: lane i of the result is lane i ^ half, or of two vectors, of which lanes with the bit `half` take
 * the second: the same lane, or the one across. */
#define ACROSS(i, half) ((i) ^ (half))
#define KEPT(i, half) ((i) & (half) ? LANES + (i) : (i))
#define SAME(i, half) (i)
#define CROSSED(i, half) (((i) & (half) ? LANES : 0) + ((i) ^ (half)))
#define UNROLL _Pragma("GCC unroll 16") /* arrays of vectors stay in registers */

#define LANES (VECTOR_BYTES / REAL_BYTES)
typedef REAL NAME(lanes) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INTEGER NAME(integers) __attribute__((vector_size(VECTOR_BYTES)));
#define VECTOR NAME(lanes)
#define INTEGERS NAME(integers)
#define AT(pointer) (*(VECTOR *)(pointer))
#define READ(pointer) (*(const VECTOR *)(pointer))

#undef EACH_LANE
#undef HALVES
#if LANES == 16
#define EACH_LANE(lane, half) \
    lane(0, half), lane(1, half), lane(2, half), lane(3, half), lane(4, half), lane(5, half), lane(6, half), \
        lane(7, half), lane(8, half), lane(9, half), lane(10, half), lane(11, half), lane(12, half), lane(13, half), \
        lane(14, half), lane(15, half)
#define HALVES(step) step(8) step(4) step(2) step(1)
#elif LANES == 8
#define EACH_LANE(lane, half) \
    lane(0, half), lane(1, half), lane(2, half), lane(3, half), lane(4, half), lane(5, half), lane(6, half), \
        lane(7, half)
#define HALVES(step) step(4) step(2) step(1)
#elif LANES == 4
#define EACH_LANE(lane, half) lane(0, half), lane(1, half), lane(2, half), lane(3, half)
#define HALVES(step) step(2) step(1)
#else
#define EACH_LANE(lane, half) lane(0, half), lane(1, half)
#define HALVES(step) step(1)
#endif

/* The sum of all lanes, by halves: the order is the same wherever it is used. */
INLINE TARGET REAL NAME(sum)(const VECTOR *lanes)
{
    VECTOR x = *lanes;
#define ADD_HALF(half) x += SHUFFLE(x, x, EACH_LANE(ACROSS, half));
    HALVES(ADD_HALF)
#undef ADD_HALF
    return x[0];
}

/* Lane i becomes the sum of all lanes of vector i, in the order of `sum`. */
INLINE TARGET void NAME(sums)(VECTOR *x)
{
#define ADD_HALVES(half) \
    UNROLL \
    for (int i = 0; i < half; i++) \
        x[i] = SHUFFLE(x[i], x[i + half], EACH_LANE(KEPT, half)) + SHUFFLE(x[i], x[i + half], EACH_LANE(CROSSED, half));
    HALVES(ADD_HALVES)
#undef ADD_HALVES
}

/* ---- Rows whose length is not a multiple of LANES. Where there are masks, parts of vectors need no call of memcpy, which
 * would keep all vectors of a loop out of registers. ---- */
#undef MASKED
#if LEVEL_NUMBER == 2 && IS_FLOAT
#define MASKED(operation) _mm512_##operation##_ps
#elif LEVEL_NUMBER == 2
#define MASKED(operation) _mm512_##operation##_pd
#endif

INLINE TARGET VECTOR NAME(load)(const REAL *from, int64_t count)
{
    if (count >= LANES)
        return READ(from);
#ifdef MASKED
    return (VECTOR)MASKED(maskz_loadu)((1u << count) - 1, from);
#else
    VECTOR x = {0};
    memcpy(&x, from, count * sizeof(REAL));
    return x;
#endif
}

INLINE TARGET void NAME(store)(REAL *to, VECTOR x, int64_t count)
{
    if (count >= LANES)
        AT(to) = x;
    else
#ifdef MASKED
        MASKED(mask_storeu)(to, (1u << count) - 1, x);
#else
        memcpy(to, &x, count * sizeof(REAL));
#endif
}

/* The first `count` lanes of x, then zeros. */
INLINE TARGET VECTOR NAME(only)(VECTOR x, int64_t count)
{
    if (count >= LANES)
        return x;
    const INTEGERS lane = {EACH_LANE(SAME, 0)};
    return (VECTOR)((INTEGERS)x & (lane < (INTEGER)count));
}
