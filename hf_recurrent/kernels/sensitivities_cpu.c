/* One pass over the sensitivities of a matrix on a CPU after one step: S <- J S + e x^T, and gradient += sum_b d S with
 * the old S.
 *
 * Plain C without Python.h: sensitivities_cpu.py checks the tensors and passes pointers. Sensitivities are the
 * largest tensors of real-time recurrent learning, and plain torch goes over them three times; here every element is
 * read once and written once. Four streams go past together, so that their elements, four sequential reads, share one
 * load and one store of the gradient. The gradient's rows of a part stay in the second-level cache meanwhile. Every
 * element has the same sums in the same order, however many streams and parts there are.
 */
#include "kernel.h"
#include "thread_pool.h"

#define TOGETHER 4
#define LINE 64                  /* bytes that memory gives at once */
#define AHEAD 1024               /* bytes; by itself the processor asks for memory later, and anew in every page */
#define GRADIENT_BYTES (1 << 18) /* of a part */
#define PARTS_OF_A_THREAD 4
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

/* Parts are whole rows. */
INLINE int64_t parts_of(const struct pass *p, int64_t element_bytes)
{
    const int64_t of_threads = p->threads > 1 ? p->threads * PARTS_OF_A_THREAD : 1;
    const int64_t of_cache = (p->rows * p->columns * element_bytes + GRADIENT_BYTES - 1) / GRADIENT_BYTES;
    const int64_t parts = of_threads > of_cache ? of_threads : of_cache;
    return parts < p->rows ? parts : p->rows;
}

#undef NAME
#define JOIN(x, y) x##_##y
#define NUMBER float
#define NAME(x) JOIN(x, float32)
#include "sensitivities.h"
#undef NUMBER
#undef NAME

#define NUMBER double
#define NAME(x) JOIN(x, float64)
#include "sensitivities.h"
