/* Includes BODY once for each element type and instruction set.
 *
 * BODY finds REAL, REAL_BYTES, INTEGER (of the same size), IS_FLOAT and MATH(function) of the C library; LEVEL_NUMBER,
 * VECTOR_BYTES and TARGET; and NAME(x), a name of this version.
 */
#ifndef REAL

#define REAL float
#define REAL_BYTES 4
#define INTEGER int32_t
#define IS_FLOAT 1
#define SUFFIX float32
#define MATH(function) function##f
#include "versions.h"

#define REAL double
#define REAL_BYTES 8
#define INTEGER int64_t
#define IS_FLOAT 0
#define SUFFIX float64
#define MATH(function) function
#include "versions.h"

#else

#define LEVEL base
#define LEVEL_NUMBER 0
#define VECTOR_BYTES 16
#define TARGET
#include BODY
#undef LEVEL
#undef LEVEL_NUMBER
#undef VECTOR_BYTES
#undef TARGET

#ifdef X86_LEVELS
#define LEVEL avx2
#define LEVEL_NUMBER 1
#define VECTOR_BYTES 32
#define TARGET __attribute__((target("avx2,fma")))
#include BODY
#undef LEVEL
#undef LEVEL_NUMBER
#undef VECTOR_BYTES
#undef TARGET

#define LEVEL avx512
#define LEVEL_NUMBER 2
#define VECTOR_BYTES 64
#define TARGET __attribute__((target("avx2,fma,avx512f")))
#include BODY
#undef LEVEL
#undef LEVEL_NUMBER
#undef VECTOR_BYTES
#undef TARGET
#endif

#undef REAL
#undef REAL_BYTES
#undef INTEGER
#undef IS_FLOAT
#undef SUFFIX
#undef MATH

#endif
