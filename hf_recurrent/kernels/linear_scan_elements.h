/* Stored elements of a scan: half precision, and lines of results, which may bypass the cache. */

INLINE uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

INLINE float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

INLINE float from_bfloat16(uint16_t x) { return float_of((uint32_t)x << 16); }

INLINE uint16_t to_bfloat16(float x)
{
    uint32_t u = bits_of(x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* By integer arithmetic, which every compiler turns into vector code; ties to even, subnormals kept. */
INLINE float from_float16(uint16_t x)
{
    uint32_t magnitude = (uint32_t)(x & 0x7fff) << 13;
    uint32_t u = bits_of(float_of(magnitude) * 0x1p112f);
    u |= -(uint32_t)(magnitude >= 0x7c00u << 13) & 0x7f800000u;
    return float_of(u | (uint32_t)(x & 0x8000) << 16);
}

INLINE uint16_t to_float16(float x)
{
    uint32_t sign = bits_of(x) & 0x80000000u, u = bits_of(x) ^ sign, magic = 126u << 23;
    uint32_t special = 0x7c00 | (-(uint32_t)(u > 0x7f800000u) & 0x200);
    uint32_t small = bits_of(float_of(u) + float_of(magic)) - magic;
    uint32_t normal = (u - (112u << 23) + 0xfff + ((u >> 13) & 1)) >> 13;
    uint32_t is_special = -(uint32_t)(u >= 143u << 23), is_small = -(uint32_t)(u < 113u << 23);
    uint32_t magnitude = (is_special & special) | (is_small & small) | (~(is_special | is_small) & normal);
    return (uint16_t)(magnitude | sign >> 16);
}

#define AS_IT_IS(x) (x)

/* ---- Instruction sets: how `put` writes one line of results, and how functions are compiled ---- */

#ifdef X86_LEVELS
INLINE void put_sse2(void *target, const void *line, int bypass)
{
    const __m128i *from = line;
    if (!bypass) {
        memcpy(target, line, LINE);
        return;
    }
    for (int i = 0; i < LINE / 16; i++)
        _mm_stream_si128((__m128i *)target + i, _mm_loadu_si128(from + i));
}
__attribute__((target("avx2,fma"))) INLINE void put_avx2(void *target, const void *line, int bypass)
{
    const __m256i *from = line;
    if (!bypass) {
        memcpy(target, line, LINE);
        return;
    }
    _mm256_stream_si256((__m256i *)target, _mm256_loadu_si256(from));
    _mm256_stream_si256((__m256i *)target + 1, _mm256_loadu_si256(from + 1));
}
#define TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
TARGET_AVX512 INLINE void put_avx512(void *target, const void *line, int bypass)
{
    if (bypass)
        _mm512_stream_si512((__m512i *)target, _mm512_loadu_si512(line));
    else
        _mm512_storeu_si512(target, _mm512_loadu_si512(line));
}
#else
INLINE void put_base(void *target, const void *line, int bypass)
{
    (void)bypass;
    memcpy(target, line, LINE);
}
#endif
