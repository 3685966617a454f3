/* One pass over the sensitivities of a matrix on a CPU after one step: S <- J S + e x^T, and gradient += sum_b d S with
 * the old S.
 *
 * Plain C without Python.h: sensitivities_cpu.py checks the tensors and passes pointers. Sensitivities are the
 * largest tensors of real-time recurrent learning, and plain torch goes over them three times; here every number is
 * read once and written once. Two streams go past together, so that a row of the gradient is fetched for both: with
 * one it took 1.2 times as long, with four, or with blocks of rows for all streams, 1.6 times, because only sequential
 * reads are fast.
 */
#include "kernel.h"

#define TOGETHER 2
#define VERSION 1 /* of the struct; raise it with every change */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTOR
#endif

/* All contiguous: B streams, R rows, I columns, G groups; row r belongs to group r mod G. Pointers are integers. */
struct pass {
    int64_t batch, rows, columns, groups, first_row, end_row;
    int64_t sensitivities;   /* (B, R, I) */
    int64_t transition;      /* J (B, G) */
    int64_t of_rows, inputs; /* e (B, R), x (B, I) */
    int64_t grad_state;      /* d (B, G) */
    int64_t gradient;        /* (R, I), or null */
};

EXPORT int64_t hf_sensitivities_version(void) { return VERSION; }

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
    VECTOR static void row_without_gradient_##SUFFIX(                                                                 \
        int64_t n, NUMBER *restrict s, const NUMBER *restrict x, NUMBER j, NUMBER e)                                  \
    {                                                                                                                 \
        for (int64_t i = 0; i < n; i++)                                                                               \
            s[i] = j * s[i] + e * x[i];                                                                               \
    }                                                                                                                 \
    EXPORT void hf_sensitivities_##SUFFIX(const struct pass *p)                                                       \
    {                                                                                                                 \
        const int64_t m = p->columns, g = p->groups;                                                                  \
        const NUMBER *j = (const NUMBER *)p->transition, *d = (const NUMBER *)p->grad_state;                          \
        const NUMBER *e = (const NUMBER *)p->of_rows, *x = (const NUMBER *)p->inputs;                                 \
        NUMBER *gradient = (NUMBER *)p->gradient;                                                                     \
        for (int64_t first = 0; first < p->batch; first += TOGETHER) {                                                \
            const int64_t end = first + TOGETHER < p->batch ? first + TOGETHER : p->batch;                            \
            for (int64_t r = p->first_row; r < p->end_row; r++) {                                                     \
                for (int64_t b = first; b < end; b++) {                                                               \
                    const int64_t row = b * p->rows + r, group = b * g + r % g;                                       \
                    NUMBER *s = (NUMBER *)p->sensitivities + row * m;                                                 \
                    if (gradient)                                                                                     \
                        row_##SUFFIX(m, s, gradient + r * m, x + b * m, j[group], e[row], d[group]);                  \
                    else                                                                                              \
                        row_without_gradient_##SUFFIX(m, s, x + b * m, j[group], e[row]);                             \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }

PASS(float, float32)
PASS(double, float64)
