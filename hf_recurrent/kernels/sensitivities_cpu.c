/* One pass over the sensitivities of a matrix on a CPU after one step: S <- J S + e x^T, and gradient += sum_b d S with
 * the old S.
 *
 * Plain C without Python.h: sensitivities_cpu.py checks the tensors and passes pointers. Sensitivities are the
 * largest tensors of real-time recurrent learning, and plain torch goes over them three times; here every element is
 * read once and written once. Two streams go past together, so that their elements, two sequential reads, share one load
 * and one store of the gradient: with that, the pass takes as long as reading and writing the sensitivities alone. Four
 * share more, but take as long with one thread and longer with two.
 */
#include "kernel.h"
#include "thread_pool.h"

#define TOGETHER 2
#define VERSION 3 /* of the struct; raise it with every change */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTOR
#endif

/* All contiguous: B streams, R rows, I columns, G groups; row r belongs to group r mod G. Pointers are integers. */
struct pass {
    int64_t batch, rows, columns, groups;
    int64_t threads;
    int64_t sensitivities;   /* (B, R, I) */
    int64_t transition;      /* J (B, G) */
    int64_t of_rows, inputs; /* e (B, R), x (B, I) */
    int64_t grad_state;      /* d (B, G) */
    int64_t gradient;        /* (R, I), or null */
};

EXPORT int64_t hf_sensitivities_version(void) { return VERSION; }

EXPORT_USE_POOL(sensitivities)

#define PARTS_OF_A_THREAD 4

INLINE int64_t parts_of(const struct pass *p)
{
    const int64_t parts = p->threads > 1 ? p->threads * PARTS_OF_A_THREAD : 1;
    return parts < p->rows ? parts : p->rows;
}

#define PASS(NUMBER, SUFFIX)                                                                                          \
    VECTOR static void row_##SUFFIX(                                                                                  \
        int64_t n, NUMBER *restrict s, NUMBER *restrict gradient, const NUMBER *restrict x, NUMBER j, NUMBER e,       \
        NUMBER d)                                                                                                     \
    {                                                                                                                 \
        for (int64_t i = 0; i < n; i++) {                                                                             \
            NUMBER before = s[i];                                                                                     \
            gradient[i] += d * before;                                                                                \
            s[i] = j * before + e * x[i];                                                                             \
        }                                                                                                             \
    }                                                                                                                 \
    /* The same row of two streams, with the sums in the same order. */                                               \
    VECTOR static void rows_##SUFFIX(                                                                                 \
        int64_t n, NUMBER *restrict s0, NUMBER *restrict s1, NUMBER *restrict gradient, const NUMBER *restrict x,     \
        const NUMBER *j, const NUMBER *e, const NUMBER *d)                                                            \
    {                                                                                                                 \
        const NUMBER j0 = j[0], j1 = j[1], e0 = e[0], e1 = e[1], d0 = d[0], d1 = d[1];                                \
        for (int64_t i = 0; i < n; i++) {                                                                             \
            const NUMBER before0 = s0[i], before1 = s1[i];                                                            \
            NUMBER sum = gradient[i];                                                                                 \
            sum += d0 * before0;                                                                                      \
            sum += d1 * before1;                                                                                      \
            gradient[i] = sum;                                                                                        \
            s0[i] = j0 * before0 + e0 * x[i];                                                                         \
            s1[i] = j1 * before1 + e1 * x[n + i];                                                                     \
        }                                                                                                             \
    }                                                                                                                 \
    VECTOR static void row_without_gradient_##SUFFIX(                                                                 \
        int64_t n, NUMBER *restrict s, const NUMBER *restrict x, NUMBER j, NUMBER e)                                  \
    {                                                                                                                 \
        for (int64_t i = 0; i < n; i++)                                                                               \
            s[i] = j * s[i] + e * x[i];                                                                               \
    }                                                                                                                 \
    static void part_##SUFFIX(const void *argument, int64_t part)                                                     \
    {                                                                                                                 \
        const struct pass *p = argument;                                                                              \
        const int64_t first_row = p->rows * part / parts_of(p), end_row = p->rows * (part + 1) / parts_of(p);         \
        const int64_t m = p->columns, g = p->groups, of_stream = p->rows * m;                                         \
        const NUMBER *j = (const NUMBER *)p->transition, *d = (const NUMBER *)p->grad_state;                          \
        const NUMBER *e = (const NUMBER *)p->of_rows, *x = (const NUMBER *)p->inputs;                                 \
        NUMBER *gradient = (NUMBER *)p->gradient;                                                                     \
        for (int64_t first = 0, count; first < p->batch; first += count) {                                            \
            const int64_t left = p->batch - first;                                                                    \
            count = left < TOGETHER ? left : TOGETHER;                                                                \
            for (int64_t r = first_row; r < end_row; r++) {                                                           \
                NUMBER *s = (NUMBER *)p->sensitivities + first * of_stream + r * m;                                   \
                NUMBER js[TOGETHER], es[TOGETHER], ds[TOGETHER];                                                      \
                for (int64_t k = 0; k < count; k++) {                                                                 \
                    const int64_t group = (first + k) * g + r % g;                                                    \
                    js[k] = j[group];                                                                                 \
                    es[k] = e[(first + k) * p->rows + r];                                                             \
                    ds[k] = gradient ? d[group] : 0;                                                                  \
                }                                                                                                     \
                if (gradient && count == TOGETHER) {                                                                  \
                    rows_##SUFFIX(m, s, s + of_stream, gradient + r * m, x + first * m, js, es, ds);                  \
                    continue;                                                                                         \
                }                                                                                                     \
                for (int64_t k = 0; k < count; k++) {                                                                 \
                    if (gradient)                                                                                     \
                        row_##SUFFIX(                                                                                 \
                            m, s + k * of_stream, gradient + r * m, x + (first + k) * m, js[k], es[k], ds[k]);        \
                    else                                                                                              \
                        row_without_gradient_##SUFFIX(m, s + k * of_stream, x + (first + k) * m, js[k], es[k]);       \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    EXPORT void hf_sensitivities_##SUFFIX(const struct pass *p)                                                       \
    {                                                                                                                 \
        struct call call = {.run = part_##SUFFIX, .argument = p, .parts = parts_of(p)};                               \
        share(&call, p->threads);                                                                                     \
    }

PASS(float, float32)
PASS(double, float64)
