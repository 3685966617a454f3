/* Count memory: the next byte from the bytes that followed the same contexts before; see count_memory_cpu.py. */
#include "count_memory.h"
#include "count_memory_contexts.h"
#include "count_memory_coder.h"

/* Raise it with every change of the results. */
#ifdef LARGE
#define VERSION 6
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
/* Values before the first byte: cells expect their counts, sets trust all sources alike, tables refine nothing. */
EXPORT void hf_count_memory_begin(struct memory *m)
{
    for (int s = 0; s < SOURCES; s++) for (int r = 0; r < 3; r++) for (int d = 0; d < 8; d++)
        for (int a = 0; a < LEVELS; a++) for (int b = 0; b < LEVELS; b++) {
            const int64_t zeros = LEVEL_FROM[a], ones = LEVEL_FROM[b];
            struct cell *c = m->cells + cell_at(s, r, d, a, b);
            c->p = s >= LONG_MATCH ? b == 1 ? 58000 : 7500 : (uint16_t)((ones * 5 + 2) * 65535 / ((zeros + ones) * 5 + 4));
            c->n = 0;
        }
    for (int64_t i = 0; i < WEIGHT_ROWS; i++) for (int j = 0; j < INPUTS; j++)
        m->weights[i * INPUTS + j] = j < BIAS ? 0.15f : j == NETWORK ? 0.3f : 0;
    for (int i = 0; i < FINALS * 256 * SETS; i++) m->final_weights[i] = 1.0f / SETS;
    for (int64_t i = 0; i < (int64_t)REFINEMENTS * KNOTS << REFINEMENT_BITS; i++)
        m->refinement[i] = squashed[LOGITS + limited(((int)(i % KNOTS) - 16) * 128, -2047, 2047)];
}

/* Blocks of streams and room for results; `Block` in modeling/contexts/count_memory_layout.py. */
struct block {
    int64_t streams, steps, network_width, first, pending_size;
    const uint8_t *bytes, *flags;  /* (B, T) */
    const int32_t *targets;        /* (B, T), -1 without one; may be null */
    const float *network;          /* (B, T, network_width), 256 logits of bytes or 8 of nodes; may be null */
    float *nats;                   /* (B, T) */
    uint16_t *probabilities;       /* (B, T, 8); may be null */
    float *logits;                 /* (B, T - first, 256); may be null */
    uint8_t *pending;              /* (B, pending_size); may be null */
    int64_t *pending_used;         /* (B,) */
};

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
#include "count_memory_reading.h"
#include "count_memory_coding.h"
#undef TARGET
#undef NAME
#ifdef X86_LEVELS
#define TARGET __attribute__((target("avx2")))
#define NAME(x) x##_avx2
#include "count_memory_mixing.h"
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
