/* One step of a recurrent network as a list of vector operations, run in one call on a CPU.
 *
 * With one byte and few streams a network is one pass over its weights, and calls of small operations would cost more
 * than that. Plain C without Python.h: step_program.py writes the list, step_cpu.py passes pointers. Weights are read
 * once, in order, for all streams.
 *
 * Every result is computed in the same order whatever the number of streams, so that a stream has the same bits in any
 * batch. The functions are this file included by itself, once for each element type and instruction set: see the end.
 */
#ifndef REAL

#include "kernel.h"
#include <math.h>

#define ROWS 4 /* of weights, read side by side, for up to STREAMS vectors: sums that fill the registers */
#define STREAMS 3
#define AHEAD 2048 /* bytes */
#define LINE 64 /* bytes of a cache line */
#define TILE_BYTES 16384 /* of weights, which stay in the nearest cache for all streams */
#define PAIR_BLOCK 32 /* bfloat16 numbers: 16 words of number i, and number 16 + i in the upper half */
#define MAP_TILE 256 /* numbers of an element-wise pass */
#define MOST_TEMPORARIES 24

/* What step_cpu.py and step_program.py pack; raise VERSION with every change. */
#define VERSION 4
enum operation { LINEAR, NORM, EMBEDDING, COPY, GATHER, MAP, REDUCE, SOFTMAX, ATTENTION, PRODUCT, QUANTIZE, UNCHANGED };
enum weights { SAME_TYPE, BFLOAT16, INT8 };
enum reduction { SUM, MEAN, MAXIMUM, MINIMUM };

/* A row of numbers for each stream: bases[base] + scaled · streams + offset + stream · stride, in elements. */
struct operand {
    int64_t base, scaled, offset, stride;
};

/* The words of an operation after `operation` and `words`, the number of all its words; an absent operand has base -1. */
struct linear { /* to = weight (width, depth) · x + bias, for `count` rows of each stream */
    int64_t count, width, depth, distance, type;
    struct operand weight, scale, bias, x, to, x_scale;
};
struct norm { /* `count` rows of each stream */
    int64_t count, width, center;
    double eps;
    struct operand weight, bias, x, to;
};
struct embedding {
    int64_t width, distance, type;
    struct operand table, scale, ids, to;
};
struct copy {
    int64_t width;
    struct operand x, to;
};
struct gather { /* to[to_index[i]] = x[index[i]]; without `to_index`, to[i]; `run` numbers at each place */
    int64_t width, run;
    struct operand index, to_index, x, to;
};
struct micro { /* an element-wise function; operands below `operands` are in memory, the others temporary */
    int64_t function, to, a, b, c;
    double number;
};
struct map {
    int64_t width, operands, functions;
    /* struct operand [operands], struct micro [functions] */
};
struct reduce { /* (outer, count, inner) → (outer, inner) */
    int64_t outer, count, inner, kind;
    struct operand x, to;
};
struct softmax {
    int64_t rows, width;
    struct operand x, to;
};
struct attention { /* q (heads, queries, width), k and v (heads, keys, width) */
    int64_t heads, queries, keys, width, causal;
    double scale;
    struct operand q, k, v, mask, scores, to;
};
struct product { /* (matrices, rows, depth) · (matrices, depth, width) */
    int64_t matrices, rows, depth, width;
    struct operand a, b, to;
};
struct quantize { /* int16 numbers with a scale for each of `count` rows */
    int64_t count, width;
    struct operand x, to, scale;
};
struct unchanged {
    int64_t bytes;
    struct operand a, b;
};

enum function {
    F_COPY, F_SPLAT, F_SET, F_ADD, F_SUB, F_MUL, F_DIV, F_MAX, F_MIN, F_ADD_NUMBER, F_MUL_NUMBER, F_RSUB_NUMBER,
    F_AT_LEAST, F_AT_MOST, F_NEG, F_ABS, F_SQRT, F_RSQRT, F_RECIPROCAL, F_EXP, F_EXPM1, F_LOG, F_LOG1P, F_SIGMOID,
    F_TANH, F_GELU, F_SOFTPLUS, F_SIN, F_COS, F_ERF, F_POW, F_FLOOR, F_ROUND, F_MUL_ADD, F_WHERE, F_EQ, F_LT, F_LE
};

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
/* In a block of a matrix product. */
#define EACH_RESULT \
    for (int s = 0; s < streams; s++) \
        for (int r = 0; r < rows; r++)
#define RESULT(r, s) job->to[(stream + (s)) * job->to_stride + row + (r) * apart]
#define WITH_BIAS(total, r) (job->bias ? (total) + job->bias[row + (r) * apart] : (total))

#define UNROLL _Pragma("GCC unroll 16") /* arrays of vectors stay in registers */

typedef int64_t program(int64_t streams, int64_t first, int64_t count, const int64_t *word, const int64_t *end, void *const *bases);

#define REAL float
#define REAL_BYTES 4
#define INTEGER int32_t
#define IS_FLOAT 1
#define SUFFIX float32
#define MATH(function) function##f
#include "step_cpu.c"

#define REAL double
#define REAL_BYTES 8
#define INTEGER int64_t
#define IS_FLOAT 0
#define SUFFIX float64
#define MATH(function) function
#include "step_cpu.c"

/* ---- Choosing a version ---- */

EXPORT int64_t hf_step_version(void) { return VERSION; }

/* Runs the operations; `spans` are triples of first word, end, and whether a chain takes this span row by row, because
 * it reads states that it writes. In a chain, stream t is step t of one stream. Returns 0, or 1 where a weight is not
 * what the list was made from. */
EXPORT int64_t hf_step_run(
    int64_t is_double, int64_t streams, int64_t chain, const int64_t *words, const int64_t *spans, int64_t count,
    void *const *bases)
{
#ifdef X86_LEVELS
    static program *const programs[2][3] = {
        {run_float32_base, run_float32_avx2, run_float32_avx512}, {run_float64_base, run_float64_avx2, run_float64_avx512}};
    program *run = programs[is_double][level()];
#else
    program *run = is_double ? run_float64_base : run_float32_base;
#endif
    int64_t changed = 0;
    for (const int64_t *span = spans; span < spans + 3 * count && !changed; span += 3) {
        if (chain && span[2])
            for (int64_t row = 0; row < streams && !changed; row++)
                changed = run(streams, row, 1, words + span[0], words + span[1], bases);
        else
            changed = run(streams, 0, streams, words + span[0], words + span[1], bases);
    }
    return changed;
}

#elif !defined(LEVEL)

#define LEVEL base
#define VECTOR_BYTES 16
#define TARGET
#define LEVEL_NUMBER 0
#include "step_cpu.c"

#ifdef X86_LEVELS
#define LEVEL avx2
#define VECTOR_BYTES 32
#define TARGET __attribute__((target("avx2,fma")))
#define LEVEL_NUMBER 1
#include "step_cpu.c"

#define LEVEL avx512
#define VECTOR_BYTES 64
#define TARGET __attribute__((target("avx2,fma,avx512f")))
#define LEVEL_NUMBER 2
#include "step_cpu.c"
#endif

#undef REAL
#undef REAL_BYTES
#undef INTEGER
#undef IS_FLOAT
#undef SUFFIX
#undef MATH

#else

#define LANES (VECTOR_BYTES / REAL_BYTES)
typedef REAL NAME(lanes) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INTEGER NAME(integers) __attribute__((vector_size(VECTOR_BYTES)));
#define VECTOR NAME(lanes)
#define INTEGERS NAME(integers)
#define AT(pointer) (*(const VECTOR *)(pointer))

INLINE TARGET REAL *NAME(at)(const struct operand *x, int64_t streams, void *const *bases)
{
    return x->base < 0 ? 0 : (REAL *)bases[x->base] + x->scaled * streams + x->offset;
}
#define ROW(x, stream) (NAME(at)(&(x), streams, bases) + (stream) * (x).stride)

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

/* ---- Matrix products ---- */

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

/* The last numbers of a row that fill no vector, after zeros. */
INLINE TARGET VECTOR NAME(rest)(const REAL *row, int64_t depth)
{
    VECTOR numbers = {0};
    if (depth < LANES) {
        memcpy((REAL *)&numbers + LANES - depth, row, depth * sizeof(REAL));
        return numbers;
    }
    const INTEGERS lane = {EACH_LANE(SAME, 0)}, kept = lane >= (INTEGER)(LANES - depth % LANES);
    return (VECTOR)((INTEGERS)AT(row + depth - LANES) & kept);
}

INLINE TARGET void NAME(multiply_whole)(
    const int rows, const int streams, const int ahead, int64_t depth, int64_t pitch, const REAL *weight,
    int64_t x_stride, const REAL *x, VECTOR *sums)
{
    const int64_t whole = depth / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        VECTOR inputs[STREAMS];
        for (int s = 0; s < streams; s++)
            inputs[s] = AT(x + s * x_stride + i);
        for (int r = 0; r < rows; r++) {
            const REAL *place = weight + r * pitch + i;
            if (ahead)
                __builtin_prefetch((const char *)place + AHEAD);
            const VECTOR numbers = AT(place);
            for (int s = 0; s < streams; s++)
                sums[s * rows + r] += numbers * inputs[s];
        }
    }
    if (whole < depth) {
        VECTOR inputs[STREAMS];
        for (int s = 0; s < streams; s++)
            inputs[s] = NAME(rest)(x + s * x_stride, depth);
        for (int r = 0; r < rows; r++) {
            const VECTOR numbers = NAME(rest)(weight + r * pitch, depth);
            for (int s = 0; s < streams; s++)
                sums[s * rows + r] += numbers * inputs[s];
        }
    }
}

#if IS_FLOAT
INLINE TARGET void NAME(multiply_pairs)(
    const int rows, const int streams, const int ahead, int64_t depth, int64_t pitch, const uint16_t *weight,
    int64_t x_stride, const float *x, VECTOR *sums)
{
    float rest[STREAMS * PAIR_BLOCK] = {0};
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
                const uint16_t *place = weight + r * pitch + begin + 2 * i;
                if (ahead && i == 0)
                    __builtin_prefetch((const char *)place + AHEAD);
                const NAME(words) words = *(const NAME(words) *)place;
                const VECTOR low = (VECTOR)(words << 16), high = (VECTOR)(words & 0xffff0000);
                for (int s = 0; s < streams; s++) {
                    sums[s * rows + r] += low * AT(inputs + s * x_stride + i);
                    sums[s * rows + r] += high * AT(inputs + s * x_stride + i + PAIR_BLOCK / 2);
                }
            }
    }
}
#endif

/* `rows` rows of weights, `apart` rows apart, times `streams` vectors. With `ahead`, the lines 2 KiB ahead are on their
 * way: memory serves a few readers at distant places faster than one. */
INLINE TARGET void NAME(block)(
    const int type, const int rows, const int streams, const int ahead, const int64_t apart,
    const struct NAME(job) *job, int64_t row, int64_t stream)
{
    const int64_t pitch = apart * job->pitch, begin = row * job->pitch;
    const REAL *x = (const REAL *)job->x + stream * job->x_stride;
    VECTOR sums[ROWS * STREAMS];
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
    REAL totals[ROWS * STREAMS + LANES];
    if (rows == ROWS) {
        UNROLL
        for (int first = 0; first < rows * streams; first += LANES) {
            VECTOR group[LANES];
            UNROLL
            for (int i = 0; i < LANES; i++)
                group[i] = sums[first + i < rows * streams ? first + i : first + i % ROWS];
            NAME(sums)(group);
            *(VECTOR *)(totals + first) = group[0];
        }
    } else
        for (int i = 0; i < rows * streams; i++)
            totals[i] = NAME(sum)(&sums[i]);
    (void)type;
    if (rows == ROWS && apart == 1 && !job->bias) {
        for (int s = 0; s < streams; s++)
            memcpy(&RESULT(0, s), totals + s * rows, rows * sizeof(REAL));
        return;
    }
    EACH_RESULT
        RESULT(r, s) = WITH_BIAS(totals[s * rows + r], r);
}

#if IS_FLOAT
/* The same of int8 and int16 numbers; `quantize` keeps x so small that no lane overflows. */
INLINE TARGET void NAME(int8_block)(
    const int rows, const int streams, const int ahead, const int64_t apart, const struct NAME(job) *job, int64_t row,
    int64_t stream)
{
    const int64_t depth = job->depth, x_stride = job->x_stride, pitch = apart * job->pitch;
    const int16_t *x = (const int16_t *)job->x + stream * x_stride;
    const int8_t *weight = (const int8_t *)job->weight + row * job->pitch;
    int64_t totals[ROWS * STREAMS];
    int64_t whole = 0;
#if LEVEL_NUMBER > 0
    whole = depth / 16 * 16;
    __m256i sums[ROWS * STREAMS];
    for (int i = 0; i < rows * streams; i++)
        sums[i] = _mm256_setzero_si256();
    for (int64_t i = 0; i < whole; i += 16)
        for (int r = 0; r < rows; r++) {
            const int8_t *place = weight + r * pitch + i;
            if (ahead && i % LINE == 0)
                __builtin_prefetch((const char *)place + AHEAD);
            const __m256i numbers = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)place));
            for (int s = 0; s < streams; s++)
                sums[s * rows + r] = _mm256_add_epi32(
                    sums[s * rows + r],
                    _mm256_madd_epi16(numbers, _mm256_loadu_si256((const __m256i *)(x + s * x_stride + i))));
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
#define BLOCK(rows, streams, ahead, apart) \
    (type == INT8 ? NAME(int8_block)(rows, streams, ahead, apart, job, row, stream) \
                  : NAME(block)(type, rows, streams, ahead, apart, job, row, stream))
#else
#define BLOCK(rows, streams, ahead, apart) NAME(block)(type, rows, streams, ahead, apart, job, row, stream)
#endif

/* The next lines on their way to the outer cache; returns the place after them. */
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
        const int64_t apart = width / ROWS, stream = 0;
        for (int64_t row = 0; row < apart; row++)
            BLOCK(ROWS, 1, 1, apart);
        for (int64_t row = ROWS * apart; row < width; row++)
            BLOCK(1, 1, 1, 1);
        return;
    }
    int64_t tile = TILE_BYTES / (job->pitch * bytes) / ROWS * ROWS;
    tile = tile < ROWS ? ROWS : tile;
    const char *next = job->weight, *const last = next + width * job->pitch * bytes;
    const int64_t lines = tile * job->pitch * bytes / LINE;
    int64_t shares[STREAMS + 1]; /* of a tile, by vectors taken together */
    for (int taken = 2; taken <= STREAMS; taken++)
        shares[taken] = (lines * ROWS * taken + tile * batch - 1) / (tile * batch);
    next = NAME(fetch)(next, last, lines); /* the first tile; the others while the one before is in use */
    for (int64_t begin = 0; begin < width; begin += tile) {
        const int64_t end = begin + tile < width ? begin + tile : width;
        for (int64_t stream = 0; stream < batch;) {
            const int64_t left = batch - stream, taken = left == 2 || left == 4 ? 2 : 3; /* so that none is left alone */
            int64_t row = begin;
            for (; row + ROWS <= end; row += ROWS) {
                next = NAME(fetch)(next, last, shares[taken]);
                if (taken == 2)
                    BLOCK(ROWS, 2, 0, 1);
                else
                    BLOCK(ROWS, 3, 0, 1);
            }
            for (; row < end; row++)
                if (taken == 2)
                    BLOCK(1, 2, 0, 1);
                else
                    BLOCK(1, 3, 0, 1);
            stream += taken;
        }
    }
}

TARGET static void NAME(linear)(const struct linear *one, int64_t streams, int64_t first, int64_t count, void *const *bases)
{
    const int64_t batch = count * one->count, begin = first * one->count;
    const int is_int8 = one->type == INT8, several = one->count > 1;
    struct NAME(job) job = {
        .width = one->width, .depth = one->depth, .pitch = one->distance,
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

/* ---- Functions of all lanes: polynomials in float32, the C library one by one in float64 ---- */

#define SELECT(mask, x, y) ((VECTOR)(((mask) & (INTEGERS)(x)) | (~(mask) & (INTEGERS)(y))))
#define ALL(number) ((REAL)(number) - (VECTOR){0})
#define EACH(expression) \
    for (int i = 0; i < LANES; i++) \
        x[i] = expression

/* NaN stays NaN: the comparison is false, and of two numbers of which one is NaN, the instruction takes the second. */
INLINE TARGET void NAME(at_least)(VECTOR *x, REAL least)
{
    const VECTOR bound = ALL(least);
#if IS_FLOAT && LEVEL_NUMBER == 1
    *x = (VECTOR)_mm256_max_ps((__m256)bound, (__m256)*x);
#else
    *x = SELECT(*x < bound, bound, *x);
#endif
}

INLINE TARGET void NAME(at_most)(VECTOR *x, REAL most)
{
    const VECTOR bound = ALL(most);
#if IS_FLOAT && LEVEL_NUMBER == 1
    *x = (VECTOR)_mm256_min_ps((__m256)bound, (__m256)*x);
#else
    *x = SELECT(*x > bound, bound, *x);
#endif
}

INLINE TARGET void NAME(square_root)(VECTOR *x)
{
    for (int i = 0; i < LANES; i++)
        (*x)[i] = MATH(sqrt)((*x)[i]);
}

/* exp(x) within float32's normal range, and exp(x) - 1 without loss where x is small. */
INLINE TARGET void NAME(exponential)(const VECTOR *exponent, VECTOR *power, VECTOR *power_less_one)
{
#if IS_FLOAT
    /* x = n log 2 + r with |r| <= log(2) / 2; log 2 in two parts, of which n times the first is exact. */
    VECTOR x = *exponent;
    NAME(at_least)(&x, -87);
    NAME(at_most)(&x, 88);
    const REAL shift = 12582912; /* 1.5 * 2^23: adding it rounds to whole numbers */
    const VECTOR n = (x * (REAL)M_LOG2E + shift) - shift;
    const VECTOR r = x - n * (REAL)0.693359375 + n * (REAL)2.12194440e-4;
    const VECTOR high = 1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720 + r * (1.0f / 5040))));
    const VECTOR scale = (VECTOR)((__builtin_convertvector(n, INTEGERS) + 127) << 23);
    const VECTOR rest = scale * (r + r * r * (0.5f + r * high));
    *power = scale + rest;
    *power_less_one = rest + (scale - 1);
#else
    for (int i = 0; i < LANES; i++) {
        (*power)[i] = MATH(exp)((*exponent)[i]);
        (*power_less_one)[i] = MATH(expm1)((*exponent)[i]);
    }
#endif
}

/* exp(x) from 0 to infinity: the power of two in two factors, each of which is a number. */
INLINE TARGET VECTOR NAME(exp_of)(VECTOR x)
{
#if IS_FLOAT
    NAME(at_least)(&x, -104);
    NAME(at_most)(&x, 89);
    const REAL shift = 12582912;
    const VECTOR n = (x * (REAL)M_LOG2E + shift) - shift;
    const VECTOR r = x - n * (REAL)0.693359375 + n * (REAL)2.12194440e-4;
    const VECTOR high = 1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720 + r * (1.0f / 5040))));
    const INTEGERS whole = __builtin_convertvector(n, INTEGERS), half = whole >> 1;
    return (1 + (r + r * r * (0.5f + r * high))) * (VECTOR)((half + 127) << 23) * (VECTOR)((whole - half + 127) << 23);
#else
    EACH(MATH(exp)(x[i]));
    return x;
#endif
}

INLINE TARGET VECTOR NAME(expm1_of)(VECTOR x)
{
#if IS_FLOAT
    VECTOR power, less_one;
    NAME(exponential)(&x, &power, &less_one);
    return SELECT(x > ALL(88), ALL(INFINITY), less_one);
#else
    EACH(MATH(expm1)(x[i]));
    return x;
#endif
}

INLINE TARGET VECTOR NAME(sigmoid_of)(VECTOR x)
{
    return 1 / (1 + NAME(exp_of)(-x));
}

INLINE TARGET VECTOR NAME(tanh_of)(VECTOR x)
{
#if IS_FLOAT
    VECTOR twice = x + x, power, less_one;
    NAME(exponential)(&twice, &power, &less_one);
    return less_one / (less_one + 2);
#else
    EACH(MATH(tanh)(x[i]));
    return x;
#endif
}

INLINE TARGET VECTOR NAME(log_of)(VECTOR x)
{
#if IS_FLOAT
    /* x = 2^n m with m in [√½, √2): log m = 2 artanh(s), s = (m - 1) / (m + 1), as a series in s. */
    const INTEGERS small = x < ALL(1.17549435e-38f);
    const VECTOR normal = SELECT(small, x * 8388608, x);
    const INTEGERS bits = (INTEGERS)normal - 0x3f3504f3; /* √½ */
    const VECTOR n = __builtin_convertvector(bits >> 23, VECTOR) - SELECT(small, ALL(23), ALL(0));
    const VECTOR m = (VECTOR)((bits & 0x7fffff) + 0x3f3504f3);
    const VECTOR s = (m - 1) / (m + 1), square = s * s;
    const VECTOR series = square * (1.0f / 3 + square * (1.0f / 5 + square * (1.0f / 7 + square * (1.0f / 9))));
    VECTOR result = n * 0.693359375f + (2 * s + (2 * s * series - n * 2.12194440e-4f));
    result = SELECT(x == ALL(INFINITY), x, result);
    result = SELECT(x == ALL(0), ALL(-INFINITY), result);
    return SELECT((x < ALL(0)) | (x != x), ALL(NAN), result);
#else
    EACH(MATH(log)(x[i]));
    return x;
#endif
}

INLINE TARGET VECTOR NAME(log1p_of)(VECTOR x)
{
#if IS_FLOAT
    const VECTOR sum = 1 + x;
    const VECTOR lost = SELECT(sum == ALL(INFINITY), ALL(0), (x - (sum - 1)) / sum);
    return SELECT(sum == ALL(0), ALL(-INFINITY), NAME(log_of)(sum) + lost);
#else
    EACH(MATH(log1p)(x[i]));
    return x;
#endif
}

/* log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), from 20 on x, as in torch. */
INLINE TARGET VECTOR NAME(softplus_of)(VECTOR x)
{
    VECTOR positive = x, size = SELECT(x < ALL(0), -x, x), power, unused;
    NAME(at_least)(&positive, 0);
    size = -size;
    NAME(exponential)(&size, &power, &unused);
    return SELECT(x > ALL(20), x, positive + NAME(log1p_of)(power));
}

/* x Φ(x), the exact GeLU. */
INLINE TARGET VECTOR NAME(gelu_of)(VECTOR x)
{
#if IS_FLOAT
    /* max(x, 0) - |x| Φ(-|x|), and Φ(-y) exp(y² / 2) is smooth: a ratio of polynomials fitted on [0, 13.5] with a
     * relative error of 5e-9. Every coefficient is positive, so nothing cancels, in the tails neither. */
    VECTOR y = (VECTOR)((INTEGERS)x & INT32_MAX), power, unused; /* |x| */
    NAME(at_most)(&y, 13);
    NAME(at_least)(&x, 0);
    VECTOR square = y * y * -0.5f;
    NAME(exponential)(&square, &power, &unused);
    const VECTOR above = 0.5f + y * (0.436146153f + y * (0.181645762f + y * (0.040098037f + y * 0.00403699488f)));
    const VECTOR below =
        1 + y * (1.67017724f + y * (1.19589591f + y * (0.465275043f + y * (0.100518083f + y * 0.0101191067f))));
    return x - y * power * above / below;
#else
    EACH((REAL)0.5 * x[i] * (1 + MATH(erf)(x[i] * (REAL)M_SQRT1_2)));
    return x;
#endif
}

#define LIBRARY_FUNCTION(name) \
    INLINE TARGET VECTOR NAME(name##_of)(VECTOR x) \
    { \
        EACH(MATH(name)(x[i])); \
        return x; \
    }
LIBRARY_FUNCTION(sin)
LIBRARY_FUNCTION(cos)
LIBRARY_FUNCTION(erf)
LIBRARY_FUNCTION(floor)
LIBRARY_FUNCTION(rint)

INLINE TARGET VECTOR NAME(pow_of)(VECTOR x, REAL exponent)
{
    EACH(MATH(pow)(x[i], exponent));
    return x;
}

/* ---- Element-wise passes ---- */

#define LOOP(expression) \
    do { \
        for (int64_t i = 0; i < width; i += LANES) { \
            const VECTOR x = AT(a + i), y = AT(b + i), z = AT(c + i); \
            (void)x, (void)y, (void)z; \
            AT_RESULT(to + i) = (expression); \
        } \
    } while (0)
#define AT_RESULT(pointer) (*(VECTOR *)(pointer))

INLINE TARGET VECTOR NAME(root_of)(VECTOR x)
{
    NAME(square_root)(&x);
    return x;
}

INLINE TARGET VECTOR NAME(least_of)(VECTOR x, REAL number)
{
    NAME(at_least)(&x, number);
    return x;
}

INLINE TARGET VECTOR NAME(most_of)(VECTOR x, REAL number)
{
    NAME(at_most)(&x, number);
    return x;
}

/* One function over a tile of whole vectors. */
TARGET static void NAME(apply)(
    enum function function, int64_t width, REAL *to, const REAL *a, const REAL *b, const REAL *c, REAL number)
{
    const VECTOR one = ALL(1), zero = ALL(0);
    switch (function) {
    case F_COPY: LOOP(x); break;
    case F_SPLAT: {
        const VECTOR value = ALL(a[0]);
        for (int64_t i = 0; i < width; i += LANES)
            AT_RESULT(to + i) = value;
        break;
    }
    case F_SET:
        for (int64_t i = 0; i < width; i += LANES)
            AT_RESULT(to + i) = ALL(number);
        break;
    case F_ADD: LOOP(x + y); break;
    case F_SUB: LOOP(x - y); break;
    case F_MUL: LOOP(x * y); break;
    case F_DIV: LOOP(x / y); break;
    case F_MAX: LOOP(SELECT((x > y) | (x != x), x, y)); break;
    case F_MIN: LOOP(SELECT((x < y) | (x != x), x, y)); break;
    case F_ADD_NUMBER: LOOP(x + number); break;
    case F_MUL_NUMBER: LOOP(x * number); break;
    case F_RSUB_NUMBER: LOOP(number - x); break;
    case F_AT_LEAST: LOOP(NAME(least_of)(x, number)); break;
    case F_AT_MOST: LOOP(NAME(most_of)(x, number)); break;
    case F_NEG: LOOP(-x); break;
    case F_ABS: LOOP(SELECT(x < zero, -x, x)); break;
    case F_SQRT: LOOP(NAME(root_of)(x)); break;
    case F_RSQRT: LOOP(1 / NAME(root_of)(x)); break;
    case F_RECIPROCAL: LOOP(1 / x); break;
    case F_EXP: LOOP(NAME(exp_of)(x)); break;
    case F_EXPM1: LOOP(NAME(expm1_of)(x)); break;
    case F_LOG: LOOP(NAME(log_of)(x)); break;
    case F_LOG1P: LOOP(NAME(log1p_of)(x)); break;
    case F_SIGMOID: LOOP(NAME(sigmoid_of)(x)); break;
    case F_TANH: LOOP(NAME(tanh_of)(x)); break;
    case F_GELU: LOOP(NAME(gelu_of)(x)); break;
    case F_SOFTPLUS: LOOP(NAME(softplus_of)(x)); break;
    case F_SIN: LOOP(NAME(sin_of)(x)); break;
    case F_COS: LOOP(NAME(cos_of)(x)); break;
    case F_ERF: LOOP(NAME(erf_of)(x)); break;
    case F_POW: LOOP(NAME(pow_of)(x, number)); break;
    case F_FLOOR: LOOP(NAME(floor_of)(x)); break;
    case F_ROUND: LOOP(NAME(rint_of)(x)); break;
    case F_MUL_ADD: LOOP(x + y * z); break;
    case F_WHERE: LOOP(SELECT(x != zero, y, z)); break;
    case F_EQ: LOOP(SELECT(x == y, one, zero)); break;
    case F_LT: LOOP(SELECT(x < y, one, zero)); break;
    case F_LE: LOOP(SELECT(x <= y, one, zero)); break;
    }
}

/* All functions on a tile before the next tile; the rows of a stream are not multiples of whole vectors, so the last
 * few numbers go through memory of our own. */
TARGET static void NAME(map)(const struct map *one, int64_t streams, int64_t first, int64_t count, void *const *bases)
{
    const struct operand *operands = (const struct operand *)(one + 1);
    const struct micro *functions = (const struct micro *)(operands + one->operands);
    REAL temporaries[MOST_TEMPORARIES][MAP_TILE] __attribute__((aligned(64)));
    REAL edges[4][16] __attribute__((aligned(64)));
    for (int64_t stream = first; stream < first + count; stream++)
        for (int64_t begin = 0; begin < one->width; begin += MAP_TILE) {
            const int64_t left = one->width - begin < MAP_TILE ? one->width - begin : MAP_TILE;
            const int64_t whole = left / LANES * LANES, rest = left - whole;
            for (const struct micro *f = functions; f < functions + one->functions; f++) {
                const int64_t places[4] = {f->to, f->a, f->b, f->c};
                REAL *at[4];
                for (int k = 0; k < 4; k++) {
                    if (places[k] < 0)
                        at[k] = k ? at[0] : 0;
                    else if (places[k] >= one->operands)
                        at[k] = temporaries[places[k] - one->operands];
                    else
                        at[k] = ROW(operands[places[k]], stream) + (k == 1 && f->function == F_SPLAT ? 0 : begin);
                }
                /* An absent operand is read too, and must be memory that can be. */
                for (int k = 1; k < 4; k++)
                    if (places[k] < 0)
                        at[k] = k > 1 && places[1] >= 0 && f->function != F_SPLAT ? at[1] : temporaries[0];
                NAME(apply)(f->function, whole, at[0], at[1], at[2], at[3], (REAL)f->number);
                if (!rest)
                    continue;
                for (int k = 1; k < 4; k++) {
                    const int64_t numbers = k == 1 && f->function == F_SPLAT ? 1 : rest;
                    memset(edges[k], 0, sizeof edges[k]);
                    memcpy(edges[k], at[k] + (numbers == rest && f->function != F_SPLAT ? whole : 0), numbers * sizeof(REAL));
                }
                NAME(apply)(f->function, LANES, edges[0], edges[1], edges[2], edges[3], (REAL)f->number);
                memcpy(at[0] + whole, edges[0], rest * sizeof(REAL));
            }
        }
}

/* ---- Norms, sums and attention ---- */

/* to = (x - mean) / sqrt(variance + eps), or without the mean, times the weight and plus the bias if there are. */
TARGET static void NAME(norm)(
    int64_t width, int64_t center, REAL *to, const REAL *x, const REAL *weight, const REAL *bias, REAL eps)
{
    const int64_t whole = width / LANES * LANES, pairs = width / (2 * LANES) * (2 * LANES);
    REAL mean = 0, squares = 0;
    VECTOR sums = {0}, others = {0}; /* two, because each addition waits for the one before */
    if (center) {
        for (int64_t i = 0; i < pairs; i += 2 * LANES) {
            sums += AT(x + i);
            others += AT(x + i + LANES);
        }
        if (pairs < whole)
            sums += AT(x + pairs);
        sums += others;
        mean = NAME(sum)(&sums);
        for (int64_t i = whole; i < width; i++)
            mean += x[i];
        mean /= width;
        sums = others = (VECTOR){0};
    }
    for (int64_t i = 0; i < pairs; i += 2 * LANES) {
        sums += (AT(x + i) - mean) * (AT(x + i) - mean);
        others += (AT(x + i + LANES) - mean) * (AT(x + i + LANES) - mean);
    }
    if (pairs < whole)
        sums += (AT(x + pairs) - mean) * (AT(x + pairs) - mean);
    sums += others;
    squares = NAME(sum)(&sums);
    for (int64_t i = whole; i < width; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    const REAL scale = 1 / MATH(sqrt)(squares / width + eps);
    if (weight)
        for (int64_t i = 0; i < width; i++)
            to[i] = (x[i] - mean) * scale * weight[i];
    else
        for (int64_t i = 0; i < width; i++)
            to[i] = (x[i] - mean) * scale;
    if (bias)
        for (int64_t i = 0; i < width; i++)
            to[i] += bias[i];
}

INLINE TARGET REAL NAME(dot)(int64_t width, const REAL *x, const REAL *y)
{
    const int64_t whole = width / LANES * LANES;
    VECTOR sums = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        sums += AT(x + i) * AT(y + i);
    REAL total = NAME(sum)(&sums);
    for (int64_t i = whole; i < width; i++)
        total += x[i] * y[i];
    return total;
}

TARGET static void NAME(softmax)(int64_t width, REAL *to, const REAL *x)
{
    REAL most = -INFINITY, total = 0;
    for (int64_t i = 0; i < width; i++)
        most = x[i] > most ? x[i] : most;
    const REAL shift = most == -INFINITY ? 0 : most; /* exp(-infinity) is 0 */
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t count = width - i < LANES ? width - i : LANES;
        VECTOR lanes = {0};
        memcpy(&lanes, x + i, count * sizeof(REAL));
        lanes = NAME(exp_of)(lanes - shift);
        memcpy(to + i, &lanes, count * sizeof(REAL));
    }
    for (int64_t i = 0; i < width; i++)
        total += to[i];
    for (int64_t i = 0; i < width; i++)
        to[i] /= total;
}

TARGET static void NAME(attention)(
    const struct attention *one, const REAL *q, const REAL *k, const REAL *v, const REAL *mask, REAL *scores, REAL *to)
{
    const int64_t width = one->width, whole = width / LANES * LANES;
    for (int64_t head = 0; head < one->heads; head++)
        for (int64_t i = 0; i < one->queries; i++) {
            const REAL *query = q + (head * one->queries + i) * width;
            REAL *output = to + (head * one->queries + i) * width;
            for (int64_t j = 0; j < one->keys; j++) {
                scores[j] = NAME(dot)(width, query, k + (head * one->keys + j) * width) * (REAL)one->scale;
                if (one->causal && j > i)
                    scores[j] = -INFINITY;
                if (mask)
                    scores[j] += mask[(head * one->queries + i) * one->keys + j];
            }
            NAME(softmax)(one->keys, scores, scores);
            const REAL *values = v + head * one->keys * width;
            for (int64_t n = 0; n < whole; n += LANES) {
                VECTOR total = {0};
                for (int64_t j = 0; j < one->keys; j++)
                    total += scores[j] * AT(values + j * width + n);
                AT_RESULT(output + n) = total;
            }
            for (int64_t n = whole; n < width; n++) {
                output[n] = 0;
                for (int64_t j = 0; j < one->keys; j++)
                    output[n] += scores[j] * values[j * width + n];
            }
        }
}

TARGET static void NAME(reduce)(const struct reduce *one, const REAL *x, REAL *to)
{
    const int64_t inner = one->inner, count = one->count;
    const REAL sign = one->kind == MINIMUM ? -1 : 1;
    for (int64_t outer = 0; outer < one->outer; outer++, x += count * inner, to += inner) {
        if (inner == 1 && one->kind <= MEAN) {
            VECTOR sums = {0};
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES)
                sums += AT(x + i);
            to[0] = NAME(sum)(&sums);
            for (; i < count; i++)
                to[0] += x[i];
        } else
            for (int64_t i = 0; i < inner; i++) {
                to[i] = x[i];
                for (int64_t k = 1; k < count; k++) {
                    const REAL next = x[k * inner + i];
                    if (one->kind <= MEAN)
                        to[i] += next;
                    else if (sign * next > sign * to[i] || next != next)
                        to[i] = next;
                }
            }
        if (one->kind == MEAN)
            for (int64_t i = 0; i < inner; i++)
                to[i] /= count;
    }
}

TARGET static void NAME(product)(const struct product *one, const REAL *a, const REAL *b, REAL *to)
{
    for (int64_t m = 0; m < one->matrices; m++, b += one->depth * one->width)
        for (int64_t row = 0; row < one->rows; row++, a += one->depth, to += one->width) {
            for (int64_t n = 0; n < one->width; n++)
                to[n] = 0;
            for (int64_t k = 0; k < one->depth; k++)
                for (int64_t n = 0; n < one->width; n++)
                    to[n] += a[k] * b[k * one->width + n];
        }
}

#if IS_FLOAT
/* The largest |x| becomes `most`, so small that no sum of products with int8 numbers overflows 32 bits in 4 lanes. */
TARGET static void NAME(quantize)(int64_t width, const float *x, int16_t *to, float *scale)
{
    int64_t most = ((int64_t)1 << 33) / (127 * width);
    most = most > 32767 ? 32767 : most;
    const int64_t whole = width / LANES * LANES;
    VECTOR sizes = {0};
    INTEGERS is_nan = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        const VECTOR size = (VECTOR)((INTEGERS)AT(x + i) & INT32_MAX);
        sizes = SELECT(size > sizes, size, sizes);
        is_nan |= size != size;
    }
    float largest = 0;
    for (int i = 0; i < LANES; i++)
        largest = is_nan[i] ? NAN : !(sizes[i] <= largest) ? sizes[i] : largest;
    for (int64_t i = whole; i < width; i++)
        largest = !(fabsf(x[i]) <= largest) ? fabsf(x[i]) : largest;
    if (!(largest > 1e-30f && largest < INFINITY)) { /* zeros stay zeros, and NaN reaches every output */
        memset(to, 0, width * sizeof *to);
        *scale = largest <= 1e-30f ? 0 : NAN;
        for (int64_t i = 0; i < width && *scale != *scale; i++)
            to[i] = 1;
        return;
    }
    const float factor = (float)most / largest;
    *scale = largest / (float)most;
    for (int64_t i = 0; i < whole; i += LANES) {
        const VECTOR rounded = (AT(x + i) * factor + 12582912) - 12582912; /* 1.5 * 2^23 */
        *(NAME(shorts) *)(to + i) = __builtin_convertvector(rounded, NAME(shorts));
    }
    for (int64_t i = whole; i < width; i++)
        to[i] = (int16_t)rintf(x[i] * factor);
}
#endif

TARGET static void NAME(embedding)(const struct embedding *one, const void *table, const REAL *scale, int64_t id, REAL *to)
{
    const int64_t begin = id * one->distance;
#if IS_FLOAT
    if (one->type == BFLOAT16) {
        for (int64_t i = 0; i < one->width; i++) {
            const int64_t half = PAIR_BLOCK / 2, place = i / PAIR_BLOCK * PAIR_BLOCK + i % half * 2 + i / half % 2;
            const uint32_t bits = (uint32_t)((const uint16_t *)table)[begin + place] << 16;
            memcpy(to + i, &bits, sizeof bits);
        }
        return;
    }
    if (one->type == INT8) {
        for (int64_t i = 0; i < one->width; i++)
            to[i] = ((const int8_t *)table)[begin + i] * scale[id];
        return;
    }
#endif
    (void)scale;
    memcpy(to, (const REAL *)table + begin, one->width * sizeof(REAL));
}

#define EACH_STREAM for (int64_t stream = first; stream < first + count; stream++)

TARGET static int64_t NAME(run)(
    int64_t streams, int64_t first, int64_t count, const int64_t *word, const int64_t *end, void *const *bases)
{
    for (; word < end; word += word[1]) {
        const void *fields = word + 2;
        switch ((enum operation)word[0]) {
        case LINEAR: NAME(linear)(fields, streams, first, count, bases); break;
        case NORM: {
            const struct norm *one = fields;
            EACH_STREAM
                for (int64_t row = 0; row < one->count; row++)
                    NAME(norm)(
                        one->width, one->center, ROW(one->to, stream) + row * one->width,
                        ROW(one->x, stream) + row * one->width, NAME(at)(&one->weight, streams, bases),
                        NAME(at)(&one->bias, streams, bases), (REAL)one->eps);
            break;
        }
        case EMBEDDING: {
            const struct embedding *one = fields;
            const int64_t *ids = (const int64_t *)bases[one->ids.base];
            EACH_STREAM
                NAME(embedding)(
                    one, bases[one->table.base], NAME(at)(&one->scale, streams, bases), ids[stream],
                    ROW(one->to, stream));
            break;
        }
        case COPY: {
            const struct copy *one = fields;
            EACH_STREAM
                memcpy(ROW(one->to, stream), ROW(one->x, stream), one->width * sizeof(REAL));
            break;
        }
        case GATHER: {
            const struct gather *one = fields;
            const int32_t *index = bases[one->index.base];
            const int32_t *places = one->to_index.base < 0 ? 0 : bases[one->to_index.base];
            EACH_STREAM {
                const REAL *x = ROW(one->x, stream);
                REAL *to = ROW(one->to, stream);
                if (one->run == 1)
                    for (int64_t i = 0; i < one->width; i++)
                        to[places ? places[i] : i] = x[index[i]];
                else
                    for (int64_t i = 0; i < one->width; i++)
                        memcpy(to + (places ? places[i] : i * one->run), x + index[i], one->run * sizeof(REAL));
            }
            break;
        }
        case MAP: NAME(map)(fields, streams, first, count, bases); break;
        case REDUCE: {
            const struct reduce *one = fields;
            EACH_STREAM
                NAME(reduce)(one, ROW(one->x, stream), ROW(one->to, stream));
            break;
        }
        case SOFTMAX: {
            const struct softmax *one = fields;
            EACH_STREAM
                for (int64_t row = 0; row < one->rows; row++)
                    NAME(softmax)(
                        one->width, ROW(one->to, stream) + row * one->width, ROW(one->x, stream) + row * one->width);
            break;
        }
        case ATTENTION: {
            const struct attention *one = fields;
            EACH_STREAM
                NAME(attention)(
                    one, ROW(one->q, stream), ROW(one->k, stream), ROW(one->v, stream),
                    NAME(at)(&one->mask, streams, bases), ROW(one->scores, stream), ROW(one->to, stream));
            break;
        }
        case PRODUCT: {
            const struct product *one = fields;
            EACH_STREAM
                NAME(product)(one, ROW(one->a, stream), ROW(one->b, stream), ROW(one->to, stream));
            break;
        }
        case QUANTIZE: {
#if IS_FLOAT
            const struct quantize *one = fields;
            int16_t *to = (int16_t *)NAME(at)(&one->to, streams, bases);
            EACH_STREAM
                for (int64_t row = 0; row < one->count; row++) {
                    const int64_t place = stream * one->count + row;
                    NAME(quantize)(
                        one->width, ROW(one->x, stream) + row * one->width, to + place * one->width,
                        NAME(at)(&one->scale, streams, bases) + place);
                }
#endif
            break;
        }
        case UNCHANGED: {
            const struct unchanged *one = fields;
            if (first == 0 && memcmp(bases[one->a.base], bases[one->b.base], one->bytes))
                return 1;
            break;
        }
        }
    }
    return 0;
}

#undef LANES
#undef VECTOR
#undef INTEGERS
#undef AT
#undef AT_RESULT
#undef ROW
#undef SELECT
#undef ALL
#undef EACH
#undef EACH_STREAM
#undef LOOP
#undef EACH_LANE
#undef HALVES
#undef BLOCK
#undef LIBRARY_FUNCTION
#undef LEVEL
#undef LEVEL_NUMBER
#undef VECTOR_BYTES
#undef TARGET

#endif
