/* Prototype of a memory of contexts: the next byte from the bytes that followed the same contexts before.
 *
 * Long-term memory (frozen in use): hash tables of contexts, each with up to seven symbols and their counts, and the text
 * of the training documents with an index for long matches. Short-term memory (the state of a stream): its last bytes,
 * with chains through equal contexts, and rows of weights that adapt. A byte is eight decisions, the nodes of a binary
 * tree. In each context the counts of zeros and ones below a node select an adaptive probability (indirect modelling);
 * the logits of these probabilities, and of a network, are mixed by weight sets that small contexts select, in two
 * layers, then refined (Mahoney, "Data Compression Explained", 2013).
 *
 * Integers, and float additions and multiplications in a fixed order without contraction or libm: the same bits from
 * every compiler and processor with IEEE arithmetic. See count_memory.py.
 */
#include <stdint.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* ---- sizes ---- */
enum { ORDERS = 9 };
static const uint8_t ORDER[ORDERS] = {2, 3, 4, 5, 6, 7, 8, 12, 20};
enum { WORD = ORDERS, WORDS, INDENT, ABOVE, LONG_CONTEXTS };
enum { RECENT_ORDERS = 7 };
static const uint8_t RECENT_ORDER[RECENT_ORDERS] = {2, 3, 4, 5, 6, 8, 12};
enum { RECENT_1 = LONG_CONTEXTS, RECENT = RECENT_1 + 1, RECENT_WORD = RECENT + RECENT_ORDERS, RECENT_INDENT, LONG_MATCH, MATCH, SOURCES };
enum { BIAS = 2 * SOURCES, NETWORK, NETWORK_P, USED_INPUTS };
#define INPUTS ((USED_INPUTS + 7) / 8 * 8)
enum { LEVELS = 11, SYMBOLS = 7, WAYS = 4, LISTED = 48 };
enum { CHAINS = 5, CHAIN_1 = 0, CHAIN_2, CHAIN_4, CHAIN_WORD, CHAIN_INDENT };
static const uint8_t CANDIDATES[CHAINS] = {24, 24, 32, 16, 16};
enum { SETS = 6, KNOTS = 33, REFINEMENTS = 3, CELLS = SOURCES * 3 * 8 * LEVELS * LEVELS };
static const int SET_SIZE[SETS] = {256, 256, 12 * 12, 8 * 8 * 4 * 3, 24 * 24, 256 * 8};
enum { DELTA_ROWS = 256 };
enum { MATCH_LENGTHS = 21, SHORT_MATCH = 8, LONG_INDEX = 20 };

struct slot { uint16_t check; uint8_t symbol[SYMBOLS], count[SYMBOLS]; };
struct cell { uint16_t p, n; };

struct long_term {
    int64_t slot_bits, text_size, text_used, index_bits;
    struct slot *slots;      /* (LONG_CONTEXTS, 2^slot_bits) */
    uint8_t *text;           /* (text_size,) */
    uint32_t *index;         /* (2, 2^index_bits) ends of contexts in text */
    struct cell *cells;      /* (CELLS,) */
    float *weights;          /* (sum SET_SIZE, INPUTS) */
    float *final_weights;    /* (256, SETS) */
    uint16_t *refinement;    /* (REFINEMENTS, 65536, KNOTS) */
};
struct rates { float weights, delta, final; int32_t least_cell, learns, recent; };

struct short_term {
    uint64_t position, last8;
    uint32_t word, last_word;
    uint32_t column, indent, first, above;
    uint64_t line, last_line;
    uint64_t long_match; uint32_t long_length, pad;
    float delta[DELTA_ROWS][INPUTS];
    float final_delta[SETS]; float pad2[2];
    uint8_t rest[]; /* ring (W), heads (CHAINS, 2^head_bits) u32, links (CHAINS, W) u32 */
};

/* ---- tables ---- */
#define LOGITS 3072
static uint16_t squashed[2 * LOGITS];
static int16_t stretched[4096];
static uint8_t level_of[1024];
static int32_t cell_rate[1024];
static const int LEVEL_FROM[LEVELS] = {0, 1, 2, 3, 4, 5, 7, 10, 15, 25, 50};

EXPORT void hf_cm_tables(void)
{
    const double step = 1.003913889338347573443609603903460281898813; /* exp(1 / 256) */
    double e = 1;
    for (int i = 0; i < LOGITS; i++) {
        const double p = e / (1 + e) * 65536;
        int q = (int)(p + 0.5);
        q = q > 65535 ? 65535 : q;
        squashed[LOGITS + i] = (uint16_t)q;
        squashed[LOGITS - i] = (uint16_t)(65536 - q);
        e *= step;
    }
    squashed[0] = squashed[1];
    int x = -2047;
    for (int i = 0; i < 4096; i++) {
        while (x < 2047 && squashed[LOGITS + x] < i * 16 + 8)
            x++;
        stretched[i] = (int16_t)x;
    }
    for (int i = 0; i < 1024; i++) {
        int k = LEVELS - 1;
        while (LEVEL_FROM[k] > i)
            k--;
        level_of[i] = (uint8_t)k;
        cell_rate[i] = 131072 / (2 * i + 3);
    }
}

INLINE uint32_t scrambled(uint32_t x)
{
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ x >> 16;
}
INLINE uint32_t hash2(uint32_t a, uint32_t b) { return scrambled(a * 0x9E3779B1u + b + 0x7F4A7C15u); }
INLINE int limited(int x, int least, int most) { return x < least ? least : x > most ? most : x; }
INLINE int squash_index(float x)
{
    x = x * 256;
    return x >= LOGITS - 1 ? LOGITS - 1 : x <= 1 - LOGITS ? 1 - LOGITS : (int)x;
}
INLINE int cell_at(int source, int recent, int depth, int zeros, int ones)
{
    return (((source * 3 + recent) * 8 + depth) * LEVELS + zeros) * LEVELS + ones;
}

EXPORT int64_t hf_cm_sizes(int64_t *s)
{
    int64_t rows = 0;
    for (int k = 0; k < SETS; k++) rows += SET_SIZE[k];
    s[0] = LONG_CONTEXTS; s[1] = CELLS; s[2] = rows; s[3] = INPUTS; s[4] = SETS; s[5] = REFINEMENTS; s[6] = KNOTS;
    s[7] = sizeof(struct short_term); s[8] = CHAINS; s[9] = SOURCES; s[10]=sizeof(struct slot);
    return 11;
}
EXPORT void hf_cm_begin(struct long_term *m)
{
    for (int s = 0; s < SOURCES; s++) for (int r = 0; r < 3; r++) for (int d = 0; d < 8; d++)
        for (int a = 0; a < LEVELS; a++) for (int b = 0; b < LEVELS; b++) {
            const int64_t n0 = LEVEL_FROM[a], n1 = LEVEL_FROM[b];
            struct cell *c = m->cells + cell_at(s, r, d, a, b);
            c->p = (uint16_t)((n1 * 5 + 2) * 65535 / ((n0 + n1) * 5 + 4)); c->n = 0;
            if (s >= LONG_MATCH) { /* zeros: v % 11, ones: expected bit, recent: v / 11 */
                c->p = b == 1 ? 58000 : 7500; }
        }
    int64_t rows = 0;
    for (int k = 0; k < SETS; k++) rows += SET_SIZE[k];
    for (int64_t i = 0; i < rows; i++) for (int j = 0; j < INPUTS; j++)
        m->weights[i * INPUTS + j] = j < BIAS ? 0.15f : j == NETWORK ? 0.3f : 0;
    for (int i = 0; i < 256 * SETS; i++) m->final_weights[i] = 1.0f / SETS;
    for (int64_t i = 0; i < (int64_t)REFINEMENTS * 65536 * KNOTS; i++)
        m->refinement[i] = squashed[LOGITS + limited(((int)(i % KNOTS) - 16) * 128, -2047, 2047)];
}

/* ---- contexts of one stream ---- */
INLINE uint8_t back(const struct short_term *s, const uint8_t *ring, uint64_t mask, uint64_t distance)
{
    return ring[(s->position - distance) & mask];
}
static int is_word(int c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c >= 128; }

static void find_contexts(const struct short_term *s, const uint8_t *ring, uint64_t mask, uint32_t *h, uint32_t *index_hash)
{
    uint32_t hash = 0;
    int k = 0;
    for (int order = 1; order <= ORDER[ORDERS - 1]; order++) {
        hash = hash2(hash, (uint64_t)order <= s->position ? back(s, ring, mask, order) + 1u : 0);
        if (order == SHORT_MATCH) index_hash[0] = hash;
        if (order == LONG_INDEX) index_hash[1] = hash;
        if (order == ORDER[k]) h[k++] = hash2(hash, order);
    }
    const uint32_t last = s->last8 & 255;
    h[WORD] = hash2(s->word, last + 1001);
    h[WORDS] = hash2(hash2(s->word, s->last_word), last + 2002);
    h[INDENT] = hash2(hash2(s->indent * 256 + s->first, s->word), last + 7007);
    h[ABOVE] = hash2(hash2(s->above, last), 8008);
}
static void append(struct short_term *s, uint8_t *ring, uint64_t mask, int c)
{
    ring[s->position & mask] = (uint8_t)c;
    s->last8 = s->last8 << 8 | c;
    if (is_word(c)) s->word = hash2(s->word, c + 1);
    else { if (s->word) s->last_word = s->word; s->word = 0; }
    s->position++;
    if (c == '\n') { s->last_line = s->line; s->line = s->position; s->indent = 0; s->first = 0; }
    else if (!s->first) { if (c == ' ' || c == '\t') s->indent++; else s->first = c; }
    s->column = (uint32_t)(s->position - s->line);
    const uint64_t above = s->last_line + s->column;
    s->above = above < s->line && s->position - above <= mask ? ring[above & mask] : 0;
}

static struct slot *find_slot(const struct long_term *m, int context, uint32_t hash, int adds)
{
    struct slot *base = m->slots + ((int64_t)context << m->slot_bits) + ((hash >> (32 - m->slot_bits)) & ~(uint32_t)(WAYS - 1)), *least = 0;
    const uint16_t check = (hash & 0xffff) | 1;
    int fewest = 1 << 30;
    for (int way = 0; way < WAYS; way++) {
        if (base[way].check == check) return base + way;
        if (adds) {
            int total = 0;
            for (int i = 0; i < SYMBOLS; i++) total += base[way].count[i];
            if (total < fewest) { fewest = total; least = base + way; }
        }
    }
    if (!adds) return 0;
    memset(least, 0, sizeof *least);
    least->check = check;
    return least;
}
static void count(struct slot *slot, int symbol)
{
    int rarest = 0;
    for (int i = 0; i < SYMBOLS; i++) {
        if (!slot->count[i]) { rarest = i; goto put; }
        if (slot->symbol[i] == symbol) {
            if (++slot->count[i] == 255)
                for (int j = 0; j < SYMBOLS; j++) slot->count[j] = (slot->count[j] + 1) / 2;
            return;
        }
        if (slot->count[i] < slot->count[rarest]) rarest = i;
    }
    if (slot->count[rarest] > 2) { slot->count[rarest]--; return; }
put:
    slot->symbol[rarest] = (uint8_t)symbol;
    slot->count[rarest] = 1;
}

/* ---- one prediction ---- */
struct list { int n; uint8_t recent; uint8_t symbol[LISTED]; uint16_t count[LISTED]; };
struct found {
    struct list lists[SOURCES];
    int order, recent_order, match_length, match_symbol, long_symbol, long_length;
    uint32_t hash2, hash3;
};
static void add(struct list *list, int symbol)
{
    if (!list->n) list->recent = (uint8_t)symbol;
    for (int i = 0; i < list->n; i++)
        if (list->symbol[i] == symbol) { list->count[i]++; return; }
    list->symbol[list->n] = (uint8_t)symbol;
    list->count[list->n++] = 1;
}
static int match_level(int length) { return length < 16 ? length : length < 32 ? 16 + (length - 16) / 4 : 20; }

struct shape { uint64_t window, head_bits; };
static uint8_t *ring_of(struct short_term *s) { return s->rest; }
static uint32_t *heads_of(struct short_term *s, const struct shape *shape, int chain) { return (uint32_t *)(s->rest + shape->window) + ((uint64_t)chain << shape->head_bits); }
static uint32_t *links_of(struct short_term *s, const struct shape *shape, int chain)
{ return (uint32_t *)(s->rest + shape->window) + ((uint64_t)CHAINS << shape->head_bits) + chain * shape->window; }

static void find(const struct long_term *m, struct short_term *s, const struct shape *shape, int recent, struct found *f)
{
    const uint64_t mask = shape->window - 1, now = s->position;
    uint8_t *const ring = ring_of(s);
    uint32_t h[LONG_CONTEXTS], index_hash[2] = {0, 0};
    find_contexts(s, ring, mask, h, index_hash);
    f->hash2 = h[0]; f->hash3 = h[1];
    for (int c = 0; c < LONG_CONTEXTS; c++)
        __builtin_prefetch(m->slots + ((int64_t)c << m->slot_bits) + ((h[c] >> (32 - m->slot_bits)) & ~(uint32_t)(WAYS - 1)));
    /* Long matches in the training text. */
    if (s->long_length < 24)
        for (int k = 1; k >= 0; k--) {
            const uint64_t least = k ? LONG_INDEX : SHORT_MATCH;
            if (now < least) continue;
            const uint64_t at = m->index[((int64_t)k << m->index_bits) + (index_hash[k] >> (32 - m->index_bits))];
            if (!at || at >= (uint64_t)m->text_used) continue;
            uint32_t length = 0;
            while (length < 48 && length < now && length < mask && at > length && m->text[at - 1 - length] == back(s, ring, mask, length + 1)) length++;
            if (length > s->long_length && length >= least - 2) { s->long_length = length; s->long_match = at; break; }
        }
    for (int i = 0; i < SOURCES; i++) f->lists[i].n = 0;
    f->long_length = 0; f->long_symbol = -1;
    if (s->long_length && s->long_match < (uint64_t)m->text_used) {
        struct list *l = f->lists + LONG_MATCH;
        f->long_symbol = l->symbol[0] = m->text[s->long_match]; l->n = 1; l->count[0] = (uint16_t)match_level(s->long_length);
        f->long_length = s->long_length;
    }
    /* Short-term chains, from the latest occurrence back. */
    f->match_length = 0; f->match_symbol = -1; f->recent_order = 0;
    if (recent && now) {
        const uint32_t key[CHAINS] = {s->last8 & 255, s->last8 & 0xffff, (uint32_t)s->last8, h[WORD], h[INDENT]};
        for (int c = 0; c < CHAINS; c++) {
            if (c == CHAIN_4 && now < 4) continue;
            uint32_t *head = heads_of(s, shape, c) + (scrambled(key[c] + c) >> (32 - shape->head_bits));
            uint32_t *links = links_of(s, shape, c);
            uint64_t age = (uint32_t)now - *head, last = 0;
            for (int n = 0; n < CANDIDATES[c] && age > last && age < mask && age <= now; n++) {
                const uint64_t at = now - age;
                const int symbol = ring[at & mask];
                uint32_t length = 0;
                const uint32_t most = c == CHAIN_4 ? 40 : c == CHAIN_2 ? 3 : c == CHAIN_1 ? 1 : 0;
                while (length < most && length < at && ring[(at - 1 - length) & mask] == ring[(now - 1 - length) & mask]) length++;
                switch (c) {
                case CHAIN_1: if (length) add(f->lists + RECENT_1, symbol); break;
                case CHAIN_2: if (length >= 2) add(f->lists + RECENT, symbol); if (length >= 3) add(f->lists + RECENT + 1, symbol); break;
                case CHAIN_4: for (int o = 2; o < RECENT_ORDERS && length >= RECENT_ORDER[o]; o++) add(f->lists + RECENT + o, symbol);
                    if ((int)length > f->match_length && length >= 4) { f->match_length = length; f->match_symbol = symbol; }
                    break;
                case CHAIN_WORD: add(f->lists + RECENT_WORD, symbol); break;
                default: add(f->lists + RECENT_INDENT, symbol);
                }
                last = age;
                age = (uint32_t)now - links[at & mask];
            }
            links[now & mask] = *head;
            *head = (uint32_t)now;
        }
        for (int o = 0; o < RECENT_ORDERS; o++) if (f->lists[RECENT + o].n) f->recent_order = o + 1;
        if (f->match_length) { struct list *l = f->lists + MATCH; l->symbol[0] = (uint8_t)f->match_symbol; l->n = 1; l->count[0] = (uint16_t)match_level(f->match_length); }
    }
    f->order = 0;
    for (int c = 0; c < LONG_CONTEXTS; c++) {
        const struct slot *slot = find_slot(m, c, h[c], 0);
        if (!slot) continue;
        struct list *l = f->lists + c;
        for (int i = 0; i < SYMBOLS && slot->count[i]; i++) { l->symbol[l->n] = slot->symbol[i]; l->count[l->n++] = slot->count[i]; }
        if (c < ORDERS) f->order = c + 1;
    }
}

struct node { int cells[SOURCES]; float x[INPUTS] __attribute__((aligned(32))); };

/* Counts of zeros and ones at the eight nodes on the way to `byte`. */
static void on_path(const struct long_term *m, const struct found *f, int byte, struct node *nodes)
{
    for (int s = 0; s < SOURCES; s++) {
        const struct list *l = f->lists + s;
        int other[9] = {0};
        for (int i = 0; i < l->n; i++) {
            const int differs = l->symbol[i] ^ byte;
            other[differs ? __builtin_clz(differs) - 24 : 8] += l->count[i];
        }
        const int d = l->recent ^ byte, leaves = d ? __builtin_clz(d) - 24 : 8;
        int same = other[8];
        for (int depth = 7; depth >= 0; depth--) {
            const int bit = byte >> (7 - depth) & 1, zeros = bit ? other[depth] : same, ones = bit ? same : other[depth];
            same += other[depth];
            if (!(zeros | ones)) { nodes[depth].cells[s] = -1; nodes[depth].x[2 * s] = nodes[depth].x[2 * s + 1] = 0; continue; }
            int recent = 0, cell;
            if (s >= LONG_MATCH) { const int v = zeros + ones; cell = cell_at(s, v / LEVELS, depth, v % LEVELS, ones ? 1 : 0); }
            else {
                if (s >= LONG_CONTEXTS) recent = leaves > depth ? 1 + bit : leaves == depth ? 2 - bit : 0;
                cell = cell_at(s, recent, depth, level_of[zeros > 1023 ? 1023 : zeros], level_of[ones > 1023 ? 1023 : ones]);
            }
            const int p = m->cells[cell].p;
            nodes[depth].cells[s] = cell;
            nodes[depth].x[2 * s] = stretched[p >> 4] * (1.0f / 256);
            nodes[depth].x[2 * s + 1] = (p - 32768) * (1.0f / 32768);
        }
    }
}

INLINE float dot(const float *a, const float *b, const float *x)
{
    float sums[8] = {0};
    for (int j = 0; j < INPUTS; j += 8)
        for (int l = 0; l < 8; l++) sums[l] += (a[j + l] + b[j + l]) * x[j + l];
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/* Predict one bit, as 65536 times the probability of a one; then learn from it. */
static int predict_node(const struct long_term *m, struct short_term *s, const struct found *f, const struct rates *r, struct node *node, int tree, int depth, int bit, int learns, float network, int has_network)
{
    const int prefix = tree ^ 1 << depth, below = 8 - depth;
    const int last = s->last8 & 255;
    const int m_bit = f->match_symbol >= 0 && (f->match_symbol >> below) == prefix ? 1 + (f->match_symbol >> (below - 1) & 1) : 0;
    const int l_bit = f->long_symbol >= 0 && (f->long_symbol >> below) == prefix ? 1 + (f->long_symbol >> (below - 1) & 1) : 0;
    const int ml = f->match_length, ll = f->long_length;
    const int m_level = !m_bit ? 0 : ml < 6 ? 1 : ml < 8 ? 2 : ml < 12 ? 3 : ml < 16 ? 4 : ml < 24 ? 5 : ml < 32 ? 6 : 7;
    const int l_level = !l_bit ? 0 : ll < 16 ? 1 : ll < 32 ? 2 : 3;
    const int agree = m_bit && l_bit ? m_bit == l_bit ? 1 : 2 : 0;
    const int order = f->order, recent_order = f->recent_order;
    int row[SETS] = {tree, last, order * 12 + recent_order, ((depth * 8 + m_level) * 4 + l_level) * 3 + agree,
        (s->column < 23 ? s->column : 23) * 24 + (s->indent < 23 ? s->indent : 23), last * 8 + depth};
    for (int k = 0, first = 0; k < SETS; k++) { row[k] += first; first += SET_SIZE[k]; }
    float *const x = node->x;
    float *deltas[SETS]; for (int k = 0; k < SETS; k++) deltas[k] = s->delta[scrambled(row[k]) % DELTA_ROWS];
    x[BIAS] = 0.4f; x[NETWORK] = has_network ? network : 0; x[NETWORK_P] = has_network ? (squashed[LOGITS + squash_index(network)] - 32768) * (1.0f / 32768) : 0;
    for (int j = USED_INPUTS; j < INPUTS; j++) x[j] = 0;
    float out[SETS], final = 0; int p_set[SETS];
    const float *fw = m->final_weights + tree * SETS;
    for (int k = 0; k < SETS; k++) {
        float y = dot(m->weights + (int64_t)row[k] * INPUTS, deltas[k], x);
        y = y > 11.9f ? 11.9f : y < -11.9f ? -11.9f : y;
        out[k] = y; p_set[k] = squashed[LOGITS + squash_index(y)];
        final += y * (fw[k] + s->final_delta[k]);
    }
    const int index = squash_index(final), p = squashed[LOGITS + index];
    const int clipped = limited(index, -2047, 2047) + 2048, knot = clipped >> 7, part = clipped & 127;
    const uint32_t contexts[REFINEMENTS] = {last << 8 | tree, hash2(f->hash2, tree) >> 16, hash2(f->match_symbol + 1 + 256 * m_level, tree) >> 16};
    uint16_t *knots[REFINEMENTS]; int refined = 2 * p;
    for (int k = 0; k < REFINEMENTS; k++) {
        knots[k] = m->refinement + ((int64_t)k * 65536 + contexts[k]) * KNOTS + knot;
        refined += (knots[k][0] * (128 - part) + knots[k][1] * part) >> 7;
    }
    refined = limited(refined / 5, 1, 65535);
    if (bit < 0) return refined;
    const int target = bit ? 65535 : 0;
    const float scale = 1.0f / 65536;
    if (learns) {
        float *w = m->final_weights + tree * SETS; const float e = (target - p) * scale * r->final;
        for (int k = 0; k < SETS; k++) w[k] += e * out[k];
        for (int k = 0; k < SETS; k++) {
            float *w = m->weights + (int64_t)row[k] * INPUTS; const float e = (target - p_set[k]) * scale * r->weights;
            for (int j = 0; j < INPUTS; j++) w[j] += e * x[j];
        }
        for (int i = 0; i < SOURCES; i++) if (node->cells[i] >= 0) {
            struct cell *c = m->cells + node->cells[i];
            const int rate = cell_rate[c->n];
            c->p = (uint16_t)limited(c->p + (int)((int64_t)(target - c->p) * (rate > r->least_cell ? rate : r->least_cell) / 65536), 16, 65519);
            c->n += c->n < 1023;
        }
        for (int k = 0; k < REFINEMENTS; k++) { uint16_t *q = knots[k] + (part > 63); *q = (uint16_t)(*q + (target - *q) / 50); }
    }
    { /* fast adaptation */
        for (int k = 0; k < SETS; k++) { const float e = (target - p_set[k]) * scale * r->delta; float *d = deltas[k];
            for (int j = 0; j < INPUTS; j++) d[j] += e * x[j]; }
        const float ef = (target - p) * scale * r->final;
        for (int k = 0; k < SETS; k++) s->final_delta[k] += ef * out[k];
    }
    return refined;
}

/* Read n bytes. network: (n, 8) logits of their bits, or null. p: (n, 8), 65536 times the probability of each bit. */
EXPORT void hf_cm_read(struct long_term *m, uint8_t *state, const struct shape *shape, const struct rates *r, const uint8_t *bytes, int64_t n, const float *network, uint16_t *p)
{
    struct short_term *s = (struct short_term *)state;
    struct found f; struct node nodes[8];
    for (int64_t i = 0; i < n; i++) {
        find(m, s, shape, r->recent, &f);
        on_path(m, &f, bytes[i], nodes);
        int tree = 1;
        for (int depth = 0; depth < 8; depth++) {
            const int bit = bytes[i] >> (7 - depth) & 1;
            const int q = predict_node(m, s, &f, r, nodes + depth, tree, depth, bit, r->learns, network ? network[i * 8 + depth] : 0, network != 0);
            p[i * 8 + depth] = (uint16_t)(bit ? q : 65536 - q);
            tree = tree * 2 + bit;
        }
        if (s->long_length) {
            if (s->long_match < (uint64_t)m->text_used && m->text[s->long_match] == bytes[i]) { s->long_match++; s->long_length += s->long_length < 65535; }
            else s->long_length = 0;
        }
        append(s, ring_of(s), shape->window - 1, bytes[i]);
    }
}
EXPORT void hf_cm_insert(struct long_term *m, uint8_t *state, const struct shape *shape, const uint8_t *bytes, int64_t n)
{
    struct short_term *s = (struct short_term *)state; /* a fresh one: only its contexts are used */
    uint32_t h[LONG_CONTEXTS], ih[2];
    for (int64_t i = 0; i < n; i++) {
        ih[0] = ih[1] = 0;
        find_contexts(s, ring_of(s), shape->window - 1, h, ih);
        if (m->text_used < m->text_size) {
            if (s->position >= SHORT_MATCH) m->index[ih[0] >> (32 - m->index_bits)] = (uint32_t)m->text_used;
            if (s->position >= LONG_INDEX) m->index[(1LL << m->index_bits) + (ih[1] >> (32 - m->index_bits))] = (uint32_t)m->text_used;
            m->text[m->text_used++] = bytes[i];
        }
        for (int c = 0; c < LONG_CONTEXTS; c++) count(find_slot(m, c, h[c], 1), bytes[i]);
        append(s, ring_of(s), shape->window - 1, bytes[i]);
    }
}
