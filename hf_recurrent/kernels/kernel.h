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
