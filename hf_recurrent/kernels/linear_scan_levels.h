/* Includes linear_scan_rows.h for each instruction set, for one element type: SUFFIX, STORED in memory, STATE for sums,
 * LOAD and SAVE between them, and COMPLEX. */

#ifdef X86_LEVELS
#define LEVEL sse2
#define TARGET
#define PUT put_sse2
#include "linear_scan_rows.h"
#define LEVEL avx2
#define TARGET __attribute__((target("avx2,fma")))
#define PUT put_avx2
#include "linear_scan_rows.h"
#define LEVEL avx512
#define TARGET TARGET_AVX512
#define PUT put_avx512
#include "linear_scan_rows.h"
#else
#define LEVEL base
#define TARGET
#define PUT put_base
#include "linear_scan_rows.h"
#endif
#undef SUFFIX
#undef STORED
#undef STATE
#undef LOAD
#undef SAVE
#undef COMPLEX
