/* Linear maps: products of constant weights, which are read once, in order, for all streams. */
#define TILE_ROWS 4 /* of weights, read side by side, for up to TILE_STREAMS vectors: sums that fill the registers */
#define TILE_STREAMS 3
#define AHEAD 2048 /* bytes */
#define TILE_BYTES 16384 /* of weights, which stay in the nearest cache for all streams */

/* In a tile of the result. */
#define EACH_RESULT \
    for (int s = 0; s < streams; s++) \
        for (int r = 0; r < rows; r++)
#define RESULT(r, s) job->to[(stream + (s)) * job->to_stride + row + (r) * apart]
#define WITH_BIAS(total, r) (job->bias ? (total) + job->bias[row + (r) * apart] : (total))

/* to = weight · x + bias, for vectors x, `x_stride` apart. */
struct NAME(job) {
    int64_t width, depth, pitch, x_stride, to_stride;
    const void *weight, *x; /* of the types of `enum weights` */
    const REAL *scale, *x_scale, *bias;
    REAL *to;
};

#if IS_FLOAT
typedef uint32_t NAME(words) __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int16_t NAME(shorts) __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
#endif

/* The last elements of a row, which fill no vector, after zeros. */
INLINE TARGET VECTOR NAME(rest)(const REAL *row, int64_t depth)
{
    VECTOR elements = {0};
    if (depth < LANES) {
        memcpy((REAL *)&elements + LANES - depth, row, depth * sizeof(REAL));
        return elements;
    }
    const INTEGERS lane = {EACH_LANE(SAME, 0)}, kept = lane >= (INTEGER)(LANES - depth % LANES);
    return (VECTOR)((INTEGERS)READ(row + depth - LANES) & kept);
}

INLINE TARGET void NAME(multiply_whole)(
    const int rows, const int streams, const int ahead, int64_t depth, int64_t pitch, const REAL *weight,
    int64_t x_stride, const REAL *x, VECTOR *sums)
{
    const int64_t whole = depth / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        VECTOR inputs[TILE_STREAMS];
        for (int s = 0; s < streams; s++)
            inputs[s] = READ(x + s * x_stride + i);
        for (int r = 0; r < rows; r++) {
            const REAL *from = weight + r * pitch + i;
            if (ahead)
                __builtin_prefetch((const char *)from + AHEAD);
            const VECTOR weights = READ(from);
            for (int s = 0; s < streams; s++)
                sums[s * rows + r] += weights * inputs[s];
        }
    }
    if (whole < depth) {
        VECTOR inputs[TILE_STREAMS];
        for (int s = 0; s < streams; s++)
            inputs[s] = NAME(rest)(x + s * x_stride, depth);
        for (int r = 0; r < rows; r++) {
            const VECTOR weights = NAME(rest)(weight + r * pitch, depth);
            for (int s = 0; s < streams; s++)
                sums[s * rows + r] += weights * inputs[s];
        }
    }
}

#if IS_FLOAT
INLINE TARGET void NAME(multiply_pairs)(
    const int rows, const int streams, const int ahead, int64_t depth, int64_t pitch, const uint16_t *weight,
    int64_t x_stride, const float *x, VECTOR *sums)
{
    float rest[TILE_STREAMS * PAIR_BLOCK] = {0};
    for (int64_t begin = 0; begin < depth; begin += PAIR_BLOCK) {
        const float *inputs = x + begin;
        if (depth - begin < PAIR_BLOCK) {
            for (int s = 0; s < streams; s++)
                memcpy(rest + s * PAIR_BLOCK, inputs + s * x_stride, (depth - begin) * sizeof *x);
            inputs = rest;
            x_stride = PAIR_BLOCK;
        }
        for (int64_t i = 0; i < PAIR_BLOCK / 2; i += LANES)
            for (int r = 0; r < rows; r++) {
                const uint16_t *from = weight + r * pitch + begin + 2 * i;
                if (ahead && i == 0)
                    __builtin_prefetch((const char *)from + AHEAD);
                const NAME(words) words = *(const NAME(words) *)from;
                const VECTOR low = (VECTOR)(words << 16), high = (VECTOR)(words & 0xffff0000);
                for (int s = 0; s < streams; s++) {
                    sums[s * rows + r] += low * READ(inputs + s * x_stride + i);
                    sums[s * rows + r] += high * READ(inputs + s * x_stride + i + PAIR_BLOCK / 2);
                }
            }
    }
}
#endif

/* `rows` rows of weights, `apart` rows apart, times `streams` vectors. With `ahead`, the lines 2 KiB ahead are on their
 * way: memory serves a few readers far apart faster than one. */
INLINE TARGET void NAME(tile)(
    const int type, const int rows, const int streams, const int ahead, const int64_t apart,
    const struct NAME(job) *job, int64_t row, int64_t stream)
{
    const int64_t pitch = apart * job->pitch, begin = row * job->pitch;
    const REAL *x = (const REAL *)job->x + stream * job->x_stride;
    VECTOR sums[TILE_ROWS * TILE_STREAMS];
    for (int i = 0; i < rows * streams; i++)
        sums[i] = (VECTOR){0};
#if IS_FLOAT
    if (type == BFLOAT16)
        NAME(multiply_pairs)(
            rows, streams, ahead, job->depth, pitch, (const uint16_t *)job->weight + begin, job->x_stride, x, sums);
    else
#endif
        NAME(multiply_whole)(
            rows, streams, ahead, job->depth, pitch, (const REAL *)job->weight + begin, job->x_stride, x, sums);
    REAL totals[TILE_ROWS * TILE_STREAMS + LANES];
    if (rows == TILE_ROWS) {
        UNROLL
        for (int first = 0; first < rows * streams; first += LANES) {
            VECTOR group[LANES];
            UNROLL
            for (int i = 0; i < LANES; i++)
                group[i] = sums[first + i < rows * streams ? first + i : first + i % TILE_ROWS];
            NAME(sums)(group);
            *(VECTOR *)(totals + first) = group[0];
        }
    } else
        for (int i = 0; i < rows * streams; i++)
            totals[i] = NAME(sum)(&sums[i]);
    (void)type;
    if (rows == TILE_ROWS && apart == 1 && !job->bias) {
        for (int s = 0; s < streams; s++)
            memcpy(&RESULT(0, s), totals + s * rows, rows * sizeof(REAL));
        return;
    }
    EACH_RESULT
        RESULT(r, s) = WITH_BIAS(totals[s * rows + r], r);
}

#if IS_FLOAT
/* The same of int8 and int16; `quantize` keeps x so small that no lane overflows. */
INLINE TARGET void NAME(int8_tile)(
    const int rows, const int streams, const int ahead, const int64_t apart, const struct NAME(job) *job, int64_t row,
    int64_t stream)
{
    const int64_t depth = job->depth, x_stride = job->x_stride, pitch = apart * job->pitch;
    const int16_t *x = (const int16_t *)job->x + stream * x_stride;
    const int8_t *weight = (const int8_t *)job->weight + row * job->pitch;
    int64_t totals[TILE_ROWS * TILE_STREAMS];
    int64_t whole = 0;
#if LEVEL_NUMBER > 0
    whole = depth / 16 * 16;
    __m256i sums[TILE_ROWS * TILE_STREAMS];
    for (int i = 0; i < rows * streams; i++)
        sums[i] = _mm256_setzero_si256();
    for (int64_t i = 0; i < whole; i += 16)
        for (int r = 0; r < rows; r++) {
            const int8_t *from = weight + r * pitch + i;
            if (ahead && i % LINE == 0)
                __builtin_prefetch((const char *)from + AHEAD);
            const __m256i weights = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
            for (int s = 0; s < streams; s++)
                sums[s * rows + r] = _mm256_add_epi32(
                    sums[s * rows + r],
                    _mm256_madd_epi16(weights, _mm256_loadu_si256((const __m256i *)(x + s * x_stride + i))));
        }
    for (int i = 0; i < rows * streams; i++) {
        const __m256i low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(sums[i]));
        const __m256i high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(sums[i], 1));
        const __m256i four = _mm256_add_epi64(low, high);
        const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
        totals[i] = _mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1);
    }
#else
    (void)ahead;
    memset(totals, 0, sizeof totals);
#endif
    EACH_RESULT {
        for (int64_t i = whole; i < depth; i++)
            totals[s * rows + r] += (int32_t)weight[r * pitch + i] * x[s * x_stride + i];
        const float scale = job->x_scale[stream + s] * job->scale[row + r * apart];
        RESULT(r, s) = WITH_BIAS((float)totals[s * rows + r] * scale, r);
    }
}
#define TILE(rows, streams, ahead, apart) \
    (type == INT8 ? NAME(int8_tile)(rows, streams, ahead, apart, job, row, stream) \
                  : NAME(tile)(type, rows, streams, ahead, apart, job, row, stream))
#else
#define TILE(rows, streams, ahead, apart) NAME(tile)(type, rows, streams, ahead, apart, job, row, stream)
#endif

/* The next lines on their way to the outer cache; returns the address after them. */
INLINE TARGET const char *NAME(fetch)(const char *from, const char *last, int64_t lines)
{
    for (; lines > 0 && from < last; lines--, from += LINE)
        __builtin_prefetch(from, 0, 2);
    return from;
}

INLINE TARGET void NAME(multiply)(const int type, const int64_t bytes, int64_t batch, const struct NAME(job) *job)
{
    const int64_t width = job->width;
    if (batch == 1) {
        const int64_t apart = width / TILE_ROWS, stream = 0;
        for (int64_t row = 0; row < apart; row++)
            TILE(TILE_ROWS, 1, 1, apart);
        for (int64_t row = TILE_ROWS * apart; row < width; row++)
            TILE(1, 1, 1, 1);
        return;
    }
    int64_t tile = TILE_BYTES / (job->pitch * bytes) / TILE_ROWS * TILE_ROWS;
    tile = tile < TILE_ROWS ? TILE_ROWS : tile;
    const char *next = job->weight, *const last = next + width * job->pitch * bytes;
    const int64_t lines = tile * job->pitch * bytes / LINE;
    int64_t shares[TILE_STREAMS + 1]; /* of a tile, by vectors taken together */
    for (int taken = 2; taken <= TILE_STREAMS; taken++)
        shares[taken] = (lines * TILE_ROWS * taken + tile * batch - 1) / (tile * batch);
    next = NAME(fetch)(next, last, lines); /* the first tile; the others while the one before is in use */
    for (int64_t begin = 0; begin < width; begin += tile) {
        const int64_t end = begin + tile < width ? begin + tile : width;
        for (int64_t stream = 0; stream < batch;) {
            const int64_t left = batch - stream, taken = left == 2 || left == 4 ? 2 : 3; /* so that none is left alone */
            int64_t row = begin;
            for (; row + TILE_ROWS <= end; row += TILE_ROWS) {
                next = NAME(fetch)(next, last, shares[taken]);
                if (taken == 2)
                    TILE(TILE_ROWS, 2, 0, 1);
                else
                    TILE(TILE_ROWS, 3, 0, 1);
            }
            for (; row < end; row++)
                if (taken == 2)
                    TILE(1, 2, 0, 1);
                else
                    TILE(1, 3, 0, 1);
            stream += taken;
        }
    }
}

TARGET static void NAME(linear)(const struct linear *one, int64_t streams, int64_t first, int64_t count, void *const *bases)
{
    const int64_t batch = count * one->count, begin = first * one->count;
    const int is_int8 = one->type == INT8, several = one->count > 1;
    struct NAME(job) job = {
        .width = one->width, .depth = one->depth, .pitch = one->pitch,
        .x_stride = is_int8 || several ? one->depth : one->x.stride,
        .to_stride = several ? one->width : one->to.stride,
        .weight = NAME(at)(&one->weight, streams, bases), .scale = NAME(at)(&one->scale, streams, bases),
        .bias = NAME(at)(&one->bias, streams, bases),
    };
    const char *x = (const char *)NAME(at)(&one->x, streams, bases);
    job.x = x + begin * job.x_stride * (is_int8 ? sizeof(int16_t) : sizeof(REAL));
    job.x_scale = is_int8 ? NAME(at)(&one->x_scale, streams, bases) + begin : 0;
    job.to = NAME(at)(&one->to, streams, bases) + begin * job.to_stride;
    switch ((enum weights)one->type) {
#if IS_FLOAT
    case BFLOAT16: NAME(multiply)(BFLOAT16, 2, batch, &job); break;
    case INT8: NAME(multiply)(INT8, 1, batch, &job); break;
#endif
    default: NAME(multiply)(SAME_TYPE, sizeof(REAL), batch, &job);
    }
}
#undef TILE
