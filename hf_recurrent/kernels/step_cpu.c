/* One step of a recurrent network as a list of vector operations, run in one call on a CPU.
 *
 * With one byte and few streams a network is one pass over its weights, and calls of small operations would cost more
 * than that. Plain C without Python.h: step_cpu.py writes the list and passes pointers. Whole rows of weights are
 * read once, in order, for all streams.
 *
 * The functions are this file included by itself, once for each element type and instruction set: see the end.
 */
#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define STREAMS 4 /* for which a row of weights is read once */
#define ROWS 4 /* read side by side; half as many for STREAMS streams, whose sums need registers too */
#define AHEAD 2048 /* bytes */
#define SMALLEST_SQUARED_GAMMA 1e-12

/* What step_cpu.py packs; raise VERSION with every change. Operands are pointers to (batch, width) values. */
#define VERSION 1
enum operation { LINEAR, NORM, GELU, MULTIPLY, ADD, GLRU, RG_LRU, CONVOLUTION };
struct instruction {
    int64_t operation, width, depth, flag, to, a, b, c, d, e;
    double number;
};

#define PASTE3(x, y, z) x##_##y##_##z
#define PASTE(x, y, z) PASTE3(x, y, z)
#define NAME(x) PASTE(x, SUFFIX, LEVEL)

typedef void program(int64_t batch, int64_t count, const struct instruction *list);

#if defined(__x86_64__) && defined(__GNUC__)
#define X86_LEVELS 1
#endif

#define REAL float
#define INTEGER int32_t
#define IS_FLOAT 1
#define SUFFIX float32
#define MATH(function) function##f
#include "step_cpu.c"

#define REAL double
#define INTEGER int64_t
#define IS_FLOAT 0
#define SUFFIX float64
#define MATH(function) function
#include "step_cpu.c"

/* ---- Choosing a version ---- */

static int level(void)
{
#ifdef X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1 + !!__builtin_cpu_supports("avx512f");
#endif
    return 0;
}

EXPORT int64_t hf_step_version(void) { return VERSION; }

EXPORT void hf_step_run(int64_t is_double, int64_t batch, int64_t count, const struct instruction *list)
{
#ifdef X86_LEVELS
    static program *const programs[2][3] = {
        {run_float32_base, run_float32_avx2, run_float32_avx512}, {run_float64_base, run_float64_avx2, run_float64_avx512}};
    programs[is_double][level()](batch, count, list);
#else
    (is_double ? run_float64_base : run_float32_base)(batch, count, list);
#endif
}

#elif !defined(LEVEL)

#define LEVEL base
#define VECTOR_BYTES 16
#define TARGET
#include "step_cpu.c"

#ifdef X86_LEVELS
#define LEVEL avx2
#define VECTOR_BYTES 32
#define TARGET __attribute__((target("avx2,fma")))
#include "step_cpu.c"

#define LEVEL avx512
#define VECTOR_BYTES 64
#define TARGET __attribute__((target("avx2,fma,avx512f")))
#include "step_cpu.c"
#endif

#undef REAL
#undef INTEGER
#undef IS_FLOAT
#undef SUFFIX
#undef MATH

#else

#define LANES (VECTOR_BYTES / (int64_t)sizeof(REAL))
typedef REAL NAME(lanes) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INTEGER NAME(integers) __attribute__((vector_size(VECTOR_BYTES)));
#define VECTOR NAME(lanes)
#define INTEGERS NAME(integers)
#define AT(pointer) (*(const VECTOR *)(pointer))

TARGET static inline REAL NAME(sum)(const VECTOR *lanes)
{
    REAL total = 0;
    for (int i = 0; i < LANES; i++)
        total += (*lanes)[i];
    return total;
}

/* to (streams, width) = weight (width, depth) · x (streams, depth), added to what is there if `add`: `rows` rows.
 *
 * They are `distance` apart, each with the lines 2 KiB ahead on their way: memory serves a few readers at distant places
 * faster than one, and four at neighbouring rows only half as fast. */
INLINE TARGET void NAME(rows_of)(
    const int rows, const int streams, int64_t width, int64_t depth, int64_t distance, int64_t add, REAL *to,
    const REAL *weight, const REAL *x)
{
    const int64_t whole = depth / LANES * LANES;
    VECTOR sums[ROWS][STREAMS] = {{{0}}};
    for (int64_t i = 0; i < whole; i += LANES)
        for (int r = 0; r < rows; r++) {
            const REAL *place = weight + r * distance * depth + i;
            __builtin_prefetch((const char *)place + AHEAD);
            for (int s = 0; s < streams; s++)
                sums[r][s] += AT(place) * AT(x + s * depth + i);
        }
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < streams; s++) {
            REAL total = NAME(sum)(&sums[r][s]), *target = to + s * width + r * distance;
            for (int64_t i = whole; i < depth; i++)
                total += weight[r * distance * depth + i] * x[s * depth + i];
            *target = add ? *target + total : total;
        }
}

INLINE TARGET void NAME(linear_of)(
    const int rows, const int streams, int64_t width, int64_t depth, int64_t add, REAL *to, const REAL *weight,
    const REAL *x)
{
    const int64_t distance = width / rows;
    for (int64_t row = 0; row < distance; row++)
        NAME(rows_of)(rows, streams, width, depth, distance, add, to + row, weight + row * depth, x);
    for (int64_t row = rows * distance; row < width; row++)
        NAME(rows_of)(1, streams, width, depth, 0, add, to + row, weight + row * depth, x);
}

TARGET static void NAME(linear)(
    int64_t batch, int64_t width, int64_t depth, int64_t add, REAL *to, const REAL *weight, const REAL *x)
{
    for (; batch >= STREAMS; batch -= STREAMS, to += STREAMS * width, x += STREAMS * depth)
        NAME(linear_of)(ROWS / 2, STREAMS, width, depth, add, to, weight, x);
    for (; batch > 0; batch--, to += width, x += depth)
        NAME(linear_of)(ROWS, 1, width, depth, add, to, weight, x);
}

/* to = (x - mean) / sqrt(variance + eps), or without the mean, times the weight if there is one. */
TARGET static void NAME(norm)(
    int64_t width, int64_t center, REAL *to, const REAL *x, const REAL *weight, REAL eps)
{
    const int64_t whole = width / LANES * LANES;
    REAL mean = 0, squares = 0;
    VECTOR sums = {0};
    if (center) {
        for (int64_t i = 0; i < whole; i += LANES)
            sums += AT(x + i);
        mean = NAME(sum)(&sums);
        for (int64_t i = whole; i < width; i++)
            mean += x[i];
        mean /= width;
        sums = (VECTOR){0};
    }
    for (int64_t i = 0; i < whole; i += LANES)
        sums += (AT(x + i) - mean) * (AT(x + i) - mean);
    squares = NAME(sum)(&sums);
    for (int64_t i = whole; i < width; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    const REAL scale = 1 / MATH(sqrt)(squares / width + eps);
    for (int64_t i = 0; i < width; i++)
        to[i] = (x[i] - mean) * scale * (weight ? weight[i] : 1);
}

/* ---- Functions of all lanes: polynomials in float32, the C library one by one in float64 ---- */

INLINE TARGET void NAME(at_least)(VECTOR *x, REAL least)
{
    const VECTOR bound = least - (VECTOR){0};
    const INTEGERS below = *x < bound; /* false for NaN */
    *x = (VECTOR)((below & (INTEGERS)bound) | (~below & (INTEGERS)*x));
}

INLINE TARGET void NAME(at_most)(VECTOR *x, REAL most)
{
    *x = -*x;
    NAME(at_least)(x, -most);
    *x = -*x;
}

INLINE TARGET void NAME(square_root)(VECTOR *x)
{
    for (int i = 0; i < LANES; i++)
        (*x)[i] = MATH(sqrt)((*x)[i]);
}

/* exp(x), and exp(x) - 1 without loss where x is small. */
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

INLINE TARGET void NAME(sigmoid)(VECTOR *x)
{
    VECTOR power, unused;
    *x = -*x;
    NAME(exponential)(x, &power, &unused);
    *x = 1 / (1 + power);
}

/* x Φ(x), the exact GeLU. */
INLINE TARGET void NAME(gelu)(VECTOR *x)
{
#if IS_FLOAT
    /* max(x, 0) - |x| Φ(-|x|), and Φ(-y) exp(y² / 2) is smooth: a ratio of polynomials fitted on [0, 13.5] with a
     * relative error of 5e-9. Every coefficient is positive, so nothing cancels, in the tails neither. */
    VECTOR y = (VECTOR)((INTEGERS)*x & INT32_MAX), power, unused; /* |x| */
    NAME(at_most)(&y, 13);
    NAME(at_least)(x, 0);
    VECTOR square = y * y * -0.5f;
    NAME(exponential)(&square, &power, &unused);
    const VECTOR above = 0.5f + y * (0.436146153f + y * (0.181645762f + y * (0.040098037f + y * 0.00403699488f)));
    const VECTOR below =
        1 + y * (1.67017724f + y * (1.19589591f + y * (0.465275043f + y * (0.100518083f + y * 0.0101191067f))));
    *x -= y * power * above / below;
#else
    for (int i = 0; i < LANES; i++)
        (*x)[i] = (REAL)0.5 * (*x)[i] * (1 + MATH(erf)((*x)[i] * (REAL)M_SQRT1_2));
#endif
}

/* a ∘ h + γ ∘ b, with a from log r: a = r, or 2 r - 1 where eigenvalues may be negative; γ = sqrt(1 - a²). */
INLINE TARGET void NAME(recur)(VECTOR *to, VECTOR log_decay, VECTOR input, VECTOR state, int64_t negative)
{
    VECTOR decay, rest, squared;
    NAME(exponential)(&log_decay, &decay, &rest);
    if (negative) {
        squared = -4 * decay * rest;
        decay += rest;
        NAME(at_least)(&squared, 4 * (REAL)SMALLEST_SQUARED_GAMMA);
    } else {
        squared = -rest * (1 + decay); /* 1 - r² */
        NAME(at_least)(&squared, (REAL)SMALLEST_SQUARED_GAMMA);
    }
    NAME(square_root)(&squared);
    *to = decay * state + squared * input;
}

/* The newest of the K - 1 inputs that are kept comes last; the weight's first row is for the current input. */
TARGET static void NAME(convolution)(
    int64_t width, int64_t taps, REAL *to, const REAL *input, const REAL *before, const REAL *weight, REAL *after)
{
    const int64_t history = taps - 1;
    for (int64_t i = 0; i < width; i++)
        to[i] = input[i] * weight[i];
    for (int64_t lag = 1; lag < taps; lag++)
        for (int64_t i = 0; i < width; i++)
            to[i] += before[(history - lag) * width + i] * weight[lag * width + i];
    if (history) {
        memcpy(after, before + width, (history - 1) * width * sizeof(REAL));
        memcpy(after + (history - 1) * width, input, width * sizeof(REAL));
    }
}

/* The first `count` numbers, or as many as there are lanes; the rest is zero, or unchanged in memory. */
INLINE TARGET void NAME(load)(VECTOR *lanes, const REAL *from, int64_t count)
{
    if (count >= LANES) {
        *lanes = AT(from);
        return;
    }
    *lanes = (VECTOR){0};
    memcpy(lanes, from, count * sizeof(REAL));
}

INLINE TARGET void NAME(store)(REAL *to, const VECTOR *lanes, int64_t count)
{
    memcpy(to, lanes, (count < LANES ? count : LANES) * sizeof(REAL));
}

/* GLRU or RG-LRU of one stream, whose numbers begin at `first`. */
TARGET static void NAME(gated_unit)(const struct instruction *one, int64_t first)
{
    const int64_t pointers[] = {one->a, one->b, one->c, one->d};
    for (int64_t channel = 0; channel < one->width; channel += LANES) {
        const int64_t count = one->width - channel;
        VECTOR operands[4], rate, unused; /* recurrence gate, input gate, input, state */
        for (int k = 0; k < 4; k++)
            NAME(load)(&operands[k], (const REAL *)pointers[k] + first + channel, count);
        NAME(load)(&rate, (const REAL *)one->e + channel, count);
        NAME(sigmoid)(&operands[0]);
        if (one->operation == GLRU) {
            VECTOR nu = rate;
            NAME(exponential)(&nu, &rate, &unused);
        } else {
            NAME(sigmoid)(&operands[1]);
            for (int i = 0; i < LANES; i++) /* torch's softplus is linear from 20 on */
                rate[i] = rate[i] > 20 ? rate[i] : MATH(log1p)(MATH(exp)(rate[i]));
        }
        VECTOR state;
        NAME(recur)(
            &state, -(REAL)one->number * rate * operands[0], operands[1] * operands[2], operands[3], one->flag);
        NAME(store)((REAL *)one->to + first + channel, &state, count);
    }
}

TARGET static void NAME(run)(int64_t batch, int64_t count, const struct instruction *list)
{
    for (const struct instruction *one = list; one < list + count; one++) {
        const int64_t width = one->width, all = batch * width;
        REAL *to = (REAL *)one->to;
        const REAL *a = (const REAL *)one->a, *b = (const REAL *)one->b, *c = (const REAL *)one->c;
        const REAL number = (REAL)one->number;
        switch ((enum operation)one->operation) {
        case LINEAR:
            NAME(linear)(batch, width, one->depth, one->flag, to, a, b);
            break;
        case NORM:
            for (int64_t stream = 0; stream < batch; stream++)
                NAME(norm)(width, one->flag, to + stream * width, a + stream * width, b, number);
            break;
        case GELU:
            for (int64_t i = 0; i < all; i += LANES) {
                VECTOR x;
                NAME(load)(&x, a + i, all - i);
                NAME(gelu)(&x);
                NAME(store)(to + i, &x, all - i);
            }
            break;
        case MULTIPLY:
            for (int64_t i = 0; i < all; i++)
                to[i] = a[i] * b[i];
            break;
        case ADD:
            for (int64_t i = 0; i < all; i++)
                to[i] = a[i] + b[i];
            break;
        case GLRU: /* recurrence gate, input gate, projection, state, ν */
        case RG_LRU: /* recurrence gate, input gate, input, state, Λ */
            for (int64_t stream = 0; stream < batch; stream++)
                NAME(gated_unit)(one, stream * width);
            break;
        case CONVOLUTION: /* input, inputs before, weight; d becomes the inputs before the next step */
            for (int64_t stream = 0; stream < batch; stream++) {
                const int64_t kept = stream * (one->depth - 1) * width;
                NAME(convolution)(
                    width, one->depth, to + stream * width, a + stream * width, b + kept, c, (REAL *)one->d + kept);
            }
            break;
        }
    }
}

#undef LANES
#undef VECTOR
#undef INTEGERS
#undef AT
#undef LEVEL
#undef VECTOR_BYTES
#undef TARGET

#endif
