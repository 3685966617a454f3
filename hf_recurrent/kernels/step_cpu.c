/* One step of a recurrent network as a list of vector operations, run in one call on a CPU.
 *
 * With one byte and few streams a network is one pass over its weights, and calls of small operations would cost more
 * than that. Plain C without Python.h: step_cpu.py writes the list and hands over pointers. Whole rows of weights are
 * read once, in order, for all streams.
 *
 * The functions are this file included by itself, once for each element type and instruction set: see the end.
 */
#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define STREAMS 4 /* for which a row of weights is read once */
#define PAGE 4096 /* bytes */
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
#define SUFFIX float32
#define MATH(function) function##f
#include "step_cpu.c"

#define REAL double
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
#define TARGET
#include "step_cpu.c"

#ifdef X86_LEVELS
#define LEVEL avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "step_cpu.c"

#define LEVEL avx512
#define TARGET __attribute__((target("avx2,fma,avx512f")))
#include "step_cpu.c"
#endif

#undef REAL
#undef SUFFIX
#undef MATH

#else

#define LANES (64 / (int64_t)sizeof(REAL))
typedef REAL NAME(lanes) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
#define VECTOR NAME(lanes)
#define AT(pointer) (*(const VECTOR *)(pointer))

TARGET static inline REAL NAME(sum)(const VECTOR *lanes)
{
    REAL total = 0;
    for (int i = 0; i < LANES; i++)
        total += (*lanes)[i];
    return total;
}

/* to (streams, width) = weight (width, depth) · x (streams, depth), added to what is there if `add`.
 *
 * One row after the other with the lines of the next page on their way: twice as fast as four rows at a time. */
__attribute__((always_inline)) TARGET static inline void NAME(linear_of)(
    const int streams, int64_t width, int64_t depth, int64_t add, REAL *to, const REAL *weight, const REAL *x)
{
    const int64_t whole = depth / LANES * LANES;
    for (int64_t row = 0; row < width; row++, weight += depth) {
        VECTOR sums[STREAMS] = {{0}};
        for (int64_t i = 0; i < whole; i += LANES) {
            __builtin_prefetch((const char *)(weight + i) + PAGE);
            for (int s = 0; s < streams; s++)
                sums[s] += AT(weight + i) * AT(x + s * depth + i);
        }
        for (int s = 0; s < streams; s++) {
            REAL total = NAME(sum)(&sums[s]), *target = to + s * width + row;
            for (int64_t i = whole; i < depth; i++)
                total += weight[i] * x[s * depth + i];
            *target = add ? *target + total : total;
        }
    }
}

TARGET static void NAME(linear)(
    int64_t batch, int64_t width, int64_t depth, int64_t add, REAL *to, const REAL *weight, const REAL *x)
{
    for (; batch >= STREAMS; batch -= STREAMS, to += STREAMS * width, x += STREAMS * depth)
        NAME(linear_of)(STREAMS, width, depth, add, to, weight, x);
    for (; batch > 0; batch--, to += width, x += depth)
        NAME(linear_of)(1, width, depth, add, to, weight, x);
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

static inline REAL NAME(sigmoid)(REAL x) { return 1 / (1 + MATH(exp)(-x)); }

/* a ∘ h + γ ∘ b, with a from log r: a = r, or 2 r - 1 where eigenvalues may be negative; γ = sqrt(1 - a²). */
static inline REAL NAME(recur)(REAL log_decay, REAL input, REAL state, int64_t negative)
{
    REAL decay = MATH(exp)(log_decay), squared;
    if (negative) {
        REAL rest = -MATH(expm1)(log_decay);
        squared = 4 * MATH(fmax)(decay * rest, (REAL)SMALLEST_SQUARED_GAMMA);
        decay -= rest;
    } else {
        squared = MATH(fmax)(-MATH(expm1)(2 * log_decay), (REAL)SMALLEST_SQUARED_GAMMA);
    }
    return decay * state + MATH(sqrt)(squared) * input;
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

static void NAME(run)(int64_t batch, int64_t count, const struct instruction *list)
{
    for (const struct instruction *one = list; one < list + count; one++) {
        const int64_t width = one->width, all = batch * width;
        REAL *to = (REAL *)one->to;
        const REAL *a = (const REAL *)one->a, *b = (const REAL *)one->b, *c = (const REAL *)one->c;
        const REAL *d = (const REAL *)one->d, *e = (const REAL *)one->e;
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
            for (int64_t i = 0; i < all; i++)
                to[i] = (REAL)0.5 * a[i] * (1 + MATH(erf)(a[i] * (REAL)M_SQRT1_2));
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
            for (int64_t i = 0, channel = 0; i < all; i++, channel = channel + 1 < width ? channel + 1 : 0) {
                REAL log_decay = -number * MATH(exp)(e[channel]) * NAME(sigmoid)(a[i]);
                to[i] = NAME(recur)(log_decay, b[i] * c[i], d[i], one->flag);
            }
            break;
        case RG_LRU: /* recurrence gate, input gate, input, state, Λ; torch's softplus is linear from 20 on */
            for (int64_t i = 0, channel = 0; i < all; i++, channel = channel + 1 < width ? channel + 1 : 0) {
                REAL rate = e[channel] > 20 ? e[channel] : MATH(log1p)(MATH(exp)(e[channel]));
                REAL log_decay = -number * rate * NAME(sigmoid)(a[i]);
                to[i] = NAME(recur)(log_decay, NAME(sigmoid)(b[i]) * c[i], d[i], one->flag);
            }
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
#undef AT
#undef LEVEL
#undef TARGET

#endif
