/* Count memory: the next byte from the bytes that followed the same contexts before; see count_memory_cpu.py. */
#include "count_memory.h"
#include "count_memory_contexts.h"
#include "count_memory_coder.h"
#if defined(__x86_64__) && defined(__GNUC__)
#define X86_LEVELS 1
#endif

/* Raise it with every change of the results. */
#if defined(LARGE)
#define VERSION 6
#elif defined(SMALL)
#define VERSION 7
#else
#define VERSION 3
#endif

EXPORT int64_t hf_count_memory_version(void)
{
    make_tables();
    return VERSION;
}
EXPORT void hf_count_memory_sizes(const struct memory *m, int64_t *sizes)
{
    const int64_t found[] = {LONG_CONTEXTS, CELLS, WEIGHT_ROWS, INPUTS, SETS, REFINEMENTS, 1 << REFINEMENT_BITS, KNOTS, sizeof(struct slot), state_size(m)};
    memcpy(sizes, found, sizeof found);
}
EXPORT void hf_count_memory_begin(struct memory *m) { begin_memory(m); }

/* Bytes of streams to encode, or room for those that are decoded. */
struct coding {
    int64_t streams, steps, decodes;
    uint8_t *bytes;       /* (T, B) */
    const float *network; /* (T, B, 256), logits of bytes; may be null */
    struct coder *coder;
};

#define TARGET
#define NAME(x) x##_base
#include "count_memory_mixing.h"
#include "count_memory_all_bytes.h"
#include "count_memory_reading.h"
#include "count_memory_coding.h"
#undef TARGET
#undef NAME
#ifdef X86_LEVELS
#define TARGET __attribute__((target("avx2")))
#define NAME(x) x##_avx2
#include "count_memory_mixing.h"
#include "count_memory_all_bytes.h"
#include "count_memory_reading.h"
#include "count_memory_coding.h"
#endif

EXPORT void hf_count_memory_read(struct memory *m, uint8_t *states, const struct rates *r, const struct block *b)
{
    void (*read)(struct memory *, struct stream *, const struct rates *, int64_t, const struct block *) = read_stream_base;
#ifdef X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) read = read_stream_avx2;
#endif
    for (int64_t number = 0; number < b->streams; number++) read(m, (struct stream *)(states + number * state_size(m)), r, number, b);
}
EXPORT void hf_count_memory_insert(struct memory *m, const uint8_t *bytes, int64_t n, int32_t end) { insert_document(m, bytes, n, end); }
EXPORT void hf_count_memory_begin_coder(struct coder *c, int32_t decodes) { begin_coder(c, decodes); }
EXPORT void hf_count_memory_finish_coder(struct coder *c) { finish_coder(c); }
/* Without a memory, `m` and `states` are null, and the network predicts alone. */
EXPORT void hf_count_memory_code(struct memory *m, uint8_t *states, const struct rates *r, const struct coding *job)
{
    void (*code)(struct memory *, uint8_t *, const struct rates *, const struct coding *) = code_block_base;
#ifdef X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) code = code_block_avx2;
#endif
    code(m, states, r, job);
}
