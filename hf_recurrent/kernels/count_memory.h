/* Sizes and memory of the count memory (modeling/contexts/count_memory.py describes the method).
 *
 * Integers, and float additions, multiplications and divisions in a fixed order, without contraction or libm: the same
 * bits from every compiler and processor with IEEE arithmetic, and from the reference in numpy. An index that comes from
 * a stream's state is masked or limited, since states come from files.
 */
#ifndef EXPORTED /* by a learner in C, which has its own includes, and the tables below as constants */
#include <stdint.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
#endif
#define INLINE static inline __attribute__((always_inline))

/* Contexts of the long-term memory. */
enum {
    ORDERS = 8, WORD = ORDERS, WORDS, INDENT, ABOVE,
#ifdef LARGE
    /* Their slots have the newest byte first, as in the short-term memory. Orders; bytes before the last, by distance; words without
     * case; the text since the last open bracket, the bracket, the beginning of the line, classes of bytes, the column. */
    ORDER_1, ORDER_7, BYTES_234, BYTES_23, BYTES_13, BYTES_34, PLAIN_1, PLAIN_2, PLAIN_3, PLAIN_1_3, BRACKET_TEXT, BRACKET_WORD, LINE_START,
    CLASSES, COLUMN,
    /* Bytes that followed the last byte, or the last two, when they came before; further words, bytes, classes and columns. */
    AFTER_1, AFTER_2, AFTER_2_LONG, PLAIN_4, PLAIN_BYTES, KINDS, KINDS_WORD, BRACKET_BYTES, ABOVE_WORD, LINE_COLUMN, BRACKET_WORDS,
    AFTER_1_LONG, AFTER_SKIPPED, COLUMN_BYTE, AFTER_BOTH, AFTER_1_WORD, KINDS_WORDS, PLAIN_2_3, PLAIN_LENGTH, AFTER_2_ALL, PLAIN_1_3_4,
    AFTER_THIRD, AFTER_1_ALL, PLAIN_1_4, AFTER_3, AFTER_3_LONG, AFTER_WORDS,
#endif
    LONG_CONTEXTS
};
static const uint8_t ORDER[ORDERS] = {2, 3, 4, 5, 6, 8, 12, 20};
/* Sources of a prediction: the above, then contexts of the short-term memory, then the matches in both. */
enum { RECENT_1 = LONG_CONTEXTS, RECENT_2, RECENT_3, RECENT_4, RECENT_WORD, RECENT_INDENT, LONG_MATCH, MATCH, SOURCES };
enum { RECENT_CONTEXTS = LONG_MATCH - RECENT_1 };
/* Slots of the table of order 1, and binary logarithms of W / slots of the others. */
enum { FIRST_SLOTS = 256 };
static const uint8_t WINDOW_SHARE[RECENT_CONTEXTS] = {0, 3, 4, 5, 5, 5};
/* Inputs of the mixer: logit and probability of every source, a constant, logit and probability of the network. */
enum { BIAS = 2 * SOURCES, NETWORK, NETWORK_P, USED_INPUTS, LANES = 8, INPUTS = (USED_INPUTS + LANES - 1) / LANES * LANES };
/* Sets of weights, of which a small context selects one row each; depths of a node that cells tell apart. */
#ifdef LARGE
enum { SETS = 17, STACK = 64, DEPTHS = 8, REFINEMENTS = 6, REFINEMENT_BITS = 14, FINALS = 2 };
static const int SET_SIZE[SETS] = {256, 256, 9 * 5, 8 * 8 * 4 * 3, 24 * 24, 256 * 8, 24 * 8,
    256 * 8, 256 * 8, 16 * 16 * 8, 8 * 8 * 8 * 8, 2048 * 2, 1024, 257 * 3, 4096, 256 * 8, 4096};
enum { WEIGHT_ROWS = 256 + 256 + 9 * 5 + 8 * 8 * 4 * 3 + 24 * 24 + 256 * 8 + 24 * 8
    + 256 * 8 + 256 * 8 + 16 * 16 * 8 + 8 * 8 * 8 * 8 + 2048 * 2 + 1024 + 257 * 3 + 4096 + 256 * 8 + 4096 };
#else
#ifdef SMALL
enum { SETS = 5, DEPTHS = 1, REFINEMENTS = 3, REFINEMENT_BITS = 6, FINALS = 1 };
static const int SET_SIZE[SETS] = {9 * 5, 8 * 8, 64, 32, 24};
enum { WEIGHT_ROWS = 9 * 5 + 8 * 8 + 64 + 32 + 24 };
#else
enum { SETS = 7, DEPTHS = 8, REFINEMENTS = 3, REFINEMENT_BITS = 14, FINALS = 1 };
static const int SET_SIZE[SETS] = {256, 256, 9 * 5, 8 * 8 * 4 * 3, 24 * 24, 256 * 8, 24 * 8};
enum { WEIGHT_ROWS = 256 + 256 + 9 * 5 + 8 * 8 * 4 * 3 + 24 * 24 + 256 * 8 + 24 * 8 };
#endif
#endif
enum { LEVELS = 11, SYMBOLS = 7, WAYS = 4, KNOTS = 33, CELLS = SOURCES * 3 * DEPTHS * LEVELS * LEVELS };
enum { SHORT_MATCH = 8, LONG_INDEX = 20, LEAST_RING = 512 };
/* Matches: bytes that are compared, the length that is not given up for another one, the greatest length. */
enum { LONGEST = 40, LONG_ENOUGH = 24, MOST_LENGTH = 65535 };
/* The index of matches in the window has contexts of order 6; a little less must be equal. */
enum { MATCH_CONTEXT = 4, SHORTEST = 4 };
enum { REAL_STEP = 1, RESET_STEP = 2, SAMPLED_STEP = 4 };
enum { LEARNS = 1, INSERTS = 2 };

struct slot { uint16_t check; uint8_t symbol[SYMBOLS], count[SYMBOLS]; };
struct cell { uint16_t p, n; };

/* Of one model, frozen in use. */
struct memory {
    int64_t slot_bits, text_bits, index_bits, match_bits; /* binary logarithms of sizes */
    int64_t window, rows;   /* of the states: bytes, adaptive rows of weights */
    struct slot *slots;     /* (LONG_CONTEXTS, 2^slot_bits) */
    uint8_t *text;          /* (2^text_bits,), a ring */
    uint32_t *index;        /* (2, 2^index_bits), ends of contexts in the text */
    struct cell *cells;     /* (SOURCES, 3, DEPTHS, LEVELS, LEVELS) */
    float *weights;         /* (WEIGHT_ROWS, INPUTS) */
    float *final_weights;   /* (FINALS * 256, SETS) */
    uint16_t *refinement;   /* (REFINEMENTS, 2^REFINEMENT_BITS, KNOTS) */
    int64_t *counters;      /* (4,): bytes of text, bytes learned from, documents */
};
enum { TEXT_USED, LEARNED, DOCUMENTS };
struct rates { float weights, first_weights, final, delta; int32_t least_cell, refinement, mode; };

/* Position in a document, and what its contexts are made from. */
struct history {
    uint64_t position, line, last_line, last8;
    uint32_t word, last_word, column, indent, first, above;
#ifdef LARGE
    uint32_t plain[4], plain_length;        /* hashes of the last words without case, the current one first, and its bytes */
    uint32_t classes, kinds;                /* of the last bytes, the newest in the lowest bits: repeated ones once, and in 4 bits each */
    uint32_t depth, bracket, bracket_text;  /* open brackets, the innermost, and a hash of the text since it opened or another closed */
    uint32_t line_start, line_start_length; /* hash of the first 4 bytes of the line */
    uint32_t after_1[256], after_2[65536];  /* the bytes that followed each byte, each two, a hash of three, */
    uint32_t after_3[65536], after_words[65536], place_3, place_words; /* and of two words; the hashes here */
    uint8_t stack[STACK];                   /* the open brackets */
#endif
};
/* Beginning of the state of a stream; then rows (rows, INPUTS) float, the ring, the tables, the index of matches. */
struct stream {
    struct history history;
    uint64_t long_match, match;
    uint32_t long_length, match_length;
    uint32_t pending;       /* 1 after a prediction of which the byte has not been seen */
    int32_t target;         /* label of the last step; -1 without one */
    uint32_t no_recent;     /* 1 in a document that is read without the short-term memory */
    float final_delta[SETS];
    float network[256];     /* logits of the nodes; [0] is 1 if there is a network */
};

INLINE uint64_t ring_size(const struct memory *m) { return m->window > LEAST_RING ? (uint64_t)m->window : LEAST_RING; }
INLINE int without_recent(const struct memory *m, const struct stream *s) { return !m->window || s->no_recent; }
INLINE int wide_positions(const struct memory *m) { return m->window > 65536; }
INLINE float *rows_of(struct stream *s) { return (float *)(s + 1); }
INLINE uint8_t *ring_of(const struct memory *m, struct stream *s) { return (uint8_t *)(rows_of(s) + m->rows * INPUTS); }
/* Tables of the short-term memory, one after another, then the index of its matches. */
INLINE int64_t recent_slots(const struct memory *m, int table)
{
    const int64_t slots = table ? m->window >> WINDOW_SHARE[table] : FIRST_SLOTS;
    return slots > WAYS ? slots : WAYS;
}
INLINE int64_t first_slot(const struct memory *m, int table)
{
    int64_t first = 0;
    for (int k = 0; k < table; k++) first += recent_slots(m, k);
    return first;
}
INLINE struct slot *recent_of(const struct memory *m, struct stream *s) { return (struct slot *)(ring_of(m, s) + ring_size(m)); }
INLINE void *match_index_of(const struct memory *m, struct stream *s) { return recent_of(m, s) + first_slot(m, RECENT_CONTEXTS); }
INLINE int64_t state_size(const struct memory *m)
{
    const int64_t slots = m->window ? first_slot(m, RECENT_CONTEXTS) * (int64_t)sizeof(struct slot) : 0;
    const int64_t index = m->window ? (wide_positions(m) ? 4LL : 2LL) << m->match_bits : 0;
    return ((int64_t)sizeof(struct stream) + m->rows * INPUTS * 4 + (int64_t)ring_size(m) + slots + index + 15) / 16 * 16;
}

/* ---- arithmetic ---- */
INLINE uint32_t scrambled(uint32_t x)
{
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ x >> 16;
}
INLINE uint32_t hash2(uint32_t a, uint32_t b) { return scrambled(a * 0x9E3779B1u + b + 0x7F4A7C15u); }
INLINE int limited(int x, int least, int most) { return x < least ? least : x > most ? most : x; }
/* NaN becomes `least`. */
INLINE float clipped(float x, float least, float most) { return x > least ? x < most ? x : most : least; }

#define LOGITS 3072 /* of 1/256 */
#ifndef KEEPS_COUNTS
static const int LEVEL_FROM[LEVELS] = {0, 1, 2, 3, 4, 5, 7, 10, 15, 25, 50};
#endif
#ifndef EXPORTED
static uint16_t squashed[2 * LOGITS]; /* 65536 times the probability of a logit */
static int16_t stretched[4096];       /* 256 times the logit of a probability */
static uint8_t level_of[1024];
static int32_t cell_rate[1024];
static void make_tables(void)
{
    const double step = 1.003913889338347573443609603903460281898813; /* exp(1 / 256) */
    double e = 1;
    for (int i = 0; i < LOGITS; i++) {
        const int q = (int)(e / (1 + e) * 65536 + 0.5);
        squashed[LOGITS + i] = (uint16_t)(q > 65535 ? 65535 : q);
        squashed[LOGITS - i] = (uint16_t)(65536 - squashed[LOGITS + i]);
        e *= step;
    }
    squashed[0] = squashed[1];
    int x = -2047;
    for (int i = 0; i < 4096; i++) {
        while (x < 2047 && squashed[LOGITS + x] < i * 16 + 8) x++;
        stretched[i] = (int16_t)x;
    }
    for (int i = 0; i < 1024; i++) {
        int k = LEVELS - 1;
        while (LEVEL_FROM[k] > i) k--;
        level_of[i] = (uint8_t)k;
        cell_rate[i] = 131072 / (2 * i + 3);
    }
}
#endif
INLINE int squash_index(float x) { return (int)clipped(x * 256, 1 - LOGITS, LOGITS - 1); }

/* Natural logarithm of a positive normal number; absolute error 1e-7 near 1. */
INLINE float log_positive(float x)
{
    union { float f; int32_t i; } bits = {x};
    const int k = (bits.i - 0x3f3504f3) >> 23; /* mantissa from sqrt(1/2) on */
    bits.i -= k * (1 << 23);
    const float t = bits.f - 1;
    float p = 0.08743945509195328f;
    p = p * t - 0.14377330243587494f; p = p * t + 0.14949095249176025f; p = p * t - 0.16560696065425873f;
    p = p * t + 0.19956977665424347f; p = p * t - 0.2500215470790863f; p = p * t + 0.3333418369293213f;
    p = p * t - 0.49999988079071045f; p = p * t + 1.0f;
    return p * t + (float)k * 0.6931471805599453f;
}

/* ---- a prediction ---- */
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t whole_lanes __attribute__((vector_size(4 * LANES)));
typedef float half_lanes __attribute__((vector_size(2 * LANES), aligned(4), may_alias));
/* Lanes of x where the comparison holds, of y elsewhere. */
#define chosen(holds, x, y) ((lanes)(((holds) & (whole_lanes)(x)) | (~(holds) & (whole_lanes)(y))))

struct node {
    int cells[SOURCES]; /* -1 without counts */
    int row[SETS], set_p[SETS], final_row[FINALS], final_p[FINALS], p, part;
    float out[SETS];
    uint16_t *knots[REFINEMENTS];
    int refined;        /* 65536 times the probability of a one */
};
struct path {
    int byte, valid;
    struct node nodes[8];
    float x[8][INPUTS] __attribute__((aligned(32)));
};
/* Symbols with counts, sorted; of each the first place, and [256] is their number. newest: the last one after its context. */
enum { MOST_COUNTED = LONG_MATCH * SYMBOLS + 2 };
struct counted { uint8_t symbol, source, count, newest; };
struct sorted_counts { uint16_t first[257]; struct counted sorted[MOST_COUNTED]; };
INLINE int cell_at(int source, int recent, int depth, int zeros, int ones)
{
    return (((source * 3 + recent) * DEPTHS + depth * DEPTHS / 8) * LEVELS + zeros) * LEVELS + ones;
}
INLINE int match_level(int length) { return length < 16 ? length : length < 32 ? 16 + (length - 16) / 4 : 20; }
/* Depth of the node at which two bytes part; 8 if they are equal. */
INLINE int parting(int a, int b) { return a == b ? 8 : __builtin_clz((unsigned)(a ^ b)) - 24; }
/* The bit that a match predicts at a node, plus 1; 0 if it does not pass the node. */
INLINE int match_bit(int symbol, int tree, int depth)
{
    return symbol >= 0 && ((symbol | 256) >> (8 - depth)) == tree ? 1 + (symbol >> (7 - depth) & 1) : 0;
}
static const float no_rows[INPUTS];
#define BIAS_INPUT 0.4f
#ifndef KEEPS_COUNTS /* a learner in C that begins with counts */
/* Values before the first byte: cells expect their counts, sets trust all sources alike, tables refine nothing. */
static void begin_memory(struct memory *m)
{
    for (int s = 0; s < SOURCES; s++) for (int r = 0; r < 3; r++) for (int d = 0; d < 8; d += 8 / DEPTHS)
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
#endif

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
