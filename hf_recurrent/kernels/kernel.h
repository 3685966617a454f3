/* Parts that the kernels share: functions in versions for element types and instruction sets, and the choice of one.
 *
 * A kernel includes itself once for each type, with SUFFIX, and within it once for each instruction set, with LEVEL.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#define X86_LEVELS 1
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define PASTE3(x, y, z) x##_##y##_##z
#define PASTE(x, y, z) PASTE3(x, y, z)
#define NAME(x) PASTE(x, SUFFIX, LEVEL)

/* 0: the baseline of this architecture; on x86-64 1: AVX2, 2: AVX-512. */
INLINE int level(void)
{
#ifdef X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1 + !!__builtin_cpu_supports("avx512f");
#endif
    return 0;
}

/* What a thread of an OpenMP team asks for its number and for the size of the team (openmp.py); null without one. */
struct team {
    int (*thread_number)(void), (*num_threads)(void);
};

/* The calling thread's part of n equal things: all of them, if it is alone. */
INLINE void own_part(const struct team *team, int64_t n, int64_t *first, int64_t *end)
{
    const int64_t number = team->thread_number ? team->thread_number() : 0;
    const int64_t threads = team->num_threads ? team->num_threads() : 1;
    *first = n * number / threads;
    *end = n * (number + 1) / threads;
}
