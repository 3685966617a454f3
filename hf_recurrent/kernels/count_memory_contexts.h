/* Contexts of a position, and what each memory knows of them. */
INLINE uint8_t back(const struct history *h, const uint8_t *ring, uint64_t mask, uint64_t distance)
{
    return ring[(h->position - distance) & mask];
}
INLINE int is_word(int c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c >= 128; }

struct hashes { uint32_t context[LONG_CONTEXTS], text[2], last; };
#ifdef LARGE
#include "count_memory_large.h"
#endif

static void find_hashes(const struct history *h, const uint8_t *ring, uint64_t mask, struct hashes *found)
{
    uint32_t hash = 0;
    int k = 0;
    for (uint32_t order = 1; order <= LONG_INDEX; order++) {
        hash = hash2(hash, order <= h->position ? back(h, ring, mask, order) + 1u : 0);
        if (order == 1) found->last = hash2(hash, order);
        if (order == SHORT_MATCH) found->text[0] = hash;
#ifdef LARGE
        if (order == 7) found->context[ORDER_7] = hash2(hash2(0, ORDER_7 + 1000), hash);
#endif
        if (order == ORDER[k]) found->context[k++] = hash2(hash, order);
    }
    found->text[1] = hash;
    const uint32_t last = h->last8 & 255;
    found->context[WORD] = hash2(h->word, last + 1001);
    found->context[WORDS] = hash2(hash2(h->word, h->last_word), last + 2002);
    found->context[INDENT] = hash2(hash2(h->indent * 256 + h->first, h->word), last + 7007);
    found->context[ABOVE] = hash2(hash2(h->above, last), 8008);
#ifdef LARGE
    find_more_hashes(h, found);
#endif
}
static void append(struct history *h, uint8_t *ring, uint64_t mask, int c)
{
    ring[h->position & mask] = (uint8_t)c;
    h->last8 = h->last8 << 8 | (uint64_t)c;
    if (is_word(c)) h->word = hash2(h->word, (uint32_t)c + 1);
    else {
        if (h->word) h->last_word = h->word;
        h->word = 0;
    }
#ifdef LARGE
    append_more(h, c);
#endif
    h->position++;
    if (c == '\n') { h->last_line = h->line; h->line = h->position; h->indent = 0; h->first = 0; }
    else if (!h->first) { if (c == ' ' || c == '\t') h->indent++; else h->first = (uint32_t)c; }
    h->column = (uint32_t)(h->position - h->line);
    const uint64_t above = h->last_line + h->column;
    /* The nearest bytes only, so that every size of the window gives the same contexts. */
    h->above = above < h->line && h->position - above < LEAST_RING ? ring[above & mask] : 0;
}

/* ---- long-term memory ---- */
/* A context's bucket, among slots of which the number is a power of two, and what tells its slot from others in it. */
INLINE uint64_t first_way(uint32_t hash, uint64_t slots) { return (hash * slots >> 32) & ~(uint64_t)(WAYS - 1); }
INLINE uint16_t check_of(uint32_t hash) { return (uint16_t)(hash | 1); }
INLINE struct slot *bucket_of(const struct memory *m, int context, uint32_t hash)
{
    return m->slots + ((int64_t)context << m->slot_bits) + first_way(hash, 1ULL << m->slot_bits);
}
INLINE struct slot *find_slot(struct slot *bucket, uint32_t hash)
{
    for (int way = 0; way < WAYS; way++) if (bucket[way].check == check_of(hash)) return bucket + way;
    return 0;
}
/* The slot of a context, in place of the one with the fewest counts if it has none. */
static struct slot *add_slot(struct slot *bucket, uint32_t hash)
{
    struct slot *least = find_slot(bucket, hash);
    if (least) return least;
    int fewest = 1 << 30;
    for (int way = 0; way < WAYS; way++) {
        int total = 0;
        for (int i = 0; i < SYMBOLS; i++) total += bucket[way].count[i];
        if (total < fewest) { fewest = total; least = bucket + way; }
    }
    memset(least, 0, sizeof *least);
    least->check = check_of(hash);
    return least;
}
static void count(struct slot *slot, int symbol)
{
    int rarest = 0;
    for (int i = 0; i < SYMBOLS; i++) {
        if (!slot->count[i]) { rarest = i; goto put; }
        if (slot->symbol[i] == symbol) {
            if (++slot->count[i] == 255)
                for (int j = 0; j < SYMBOLS; j++) slot->count[j] = (uint8_t)((slot->count[j] + 1) / 2);
            return;
        }
        if (slot->count[i] < slot->count[rarest]) rarest = i;
    }
    if (slot->count[rarest] > 2) { slot->count[rarest]--; return; }
put:
    slot->symbol[rarest] = (uint8_t)symbol;
    slot->count[rarest] = 1;
}
/* Count `symbol` after a context. The newest slot of a bucket and the newest symbol of a slot come first; the oldest are
 * replaced. Symbols that have come since this one last did lose half of what they have above two. */
static void count_recent(struct slot *bucket, uint32_t hash, int symbol)
{
    const uint16_t check = check_of(hash);
    int way = 0, i = 0;
    while (way < WAYS - 1 && bucket[way].check != check) way++;
    struct slot slot = bucket[way];
    if (slot.check != check) { memset(&slot, 0, sizeof slot); slot.check = check; }
    for (; way; way--) bucket[way] = bucket[way - 1];
    while (i < SYMBOLS - 1 && slot.count[i] && slot.symbol[i] != symbol) i++;
    const int counted = slot.symbol[i] == symbol ? slot.count[i] : 0;
    for (; i; i--) {
        const int before = slot.count[i - 1];
        slot.symbol[i] = slot.symbol[i - 1];
        slot.count[i] = (uint8_t)(before > 2 ? before - (before - 1) / 2 : before);
    }
    slot.symbol[0] = (uint8_t)symbol;
    slot.count[0] = (uint8_t)(counted < 255 ? counted + 1 : counted);
    bucket[0] = slot;
}
/* The end in the text of the last bytes with these hashes: short ones, 0, or long ones, 1. */
INLINE uint32_t *text_end(const struct memory *m, const struct hashes *h, int is_long)
{
    return m->index + ((int64_t)is_long << m->index_bits) + (h->text[is_long] >> (32 - m->index_bits));
}
/* Count `symbol` after a context, and append it to the text. */
static void insert(struct memory *m, const struct hashes *h, uint64_t position, int symbol)
{
    const uint32_t at = (uint32_t)m->counters[TEXT_USED];
    if (position >= SHORT_MATCH) *text_end(m, h, 0) = at;
    if (position >= LONG_INDEX) *text_end(m, h, 1) = at;
    m->text[at & ((1LL << m->text_bits) - 1)] = (uint8_t)symbol;
    m->counters[TEXT_USED] = at == UINT32_MAX ? 1LL << m->text_bits : (int64_t)at + 1;
    for (int c = 0; c <= ABOVE; c++) count(add_slot(bucket_of(m, c, h->context[c]), h->context[c]), symbol);
    for (int c = ABOVE + 1; c < LONG_CONTEXTS; c++) count_recent(bucket_of(m, c, h->context[c]), h->context[c], symbol);
}
static void insert_document(struct memory *m, const uint8_t *bytes, int64_t n, int end)
{
    uint8_t ring[LEAST_RING] = {0};
    struct history h = {0};
    struct hashes found;
    for (int64_t i = 0; i < n + (end >= 0); i++) {
        const int c = i < n ? bytes[i] : end;
        find_hashes(&h, ring, LEAST_RING - 1, &found);
        insert(m, &found, h.position, c);
        append(&h, ring, LEAST_RING - 1, c);
    }
}
INLINE int in_text(const struct memory *m, uint64_t at)
{
    const uint64_t used = (uint64_t)m->counters[TEXT_USED], size = 1ULL << m->text_bits;
    return at && at < used && at + size > used + LONGEST + 8;
}

/* ---- short-term memory ---- */
INLINE uint32_t recent_hash(const struct hashes *h, int table)
{
    switch (RECENT_1 + table) {
    case RECENT_1: return h->last;
    case RECENT_WORD: return h->context[WORD];
    case RECENT_INDENT: return h->context[INDENT];
    default: return h->context[table - 1]; /* orders 2, 3, 4 */
    }
}
INLINE struct slot *recent_bucket(const struct memory *m, struct stream *s, int table, uint32_t hash)
{
    return recent_of(m, s) + first_slot(m, table) + first_way(hash, (uint64_t)recent_slots(m, table));
}
INLINE uint64_t match_place(const struct memory *m, const struct hashes *h) { return h->context[MATCH_CONTEXT] >> (32 - m->match_bits); }
/* The byte at a position, whose contexts have these hashes: later contexts find it. */
static void remember(const struct memory *m, struct stream *s, const struct hashes *h, uint64_t position, int byte)
{
    const uint32_t next = (uint32_t)position + 1;
    for (int k = 0; k < RECENT_CONTEXTS; k++) {
        const uint32_t hash = recent_hash(h, k);
        count_recent(recent_bucket(m, s, k, hash), hash, byte);
    }
    if (wide_positions(m)) ((uint32_t *)match_index_of(m, s))[match_place(m, h)] = next;
    else ((uint16_t *)match_index_of(m, s))[match_place(m, h)] = (uint16_t)next;
}

/* ---- what is known at a position ---- */
struct found {
    struct hashes hashes;
    const struct slot *slots[LONG_MATCH]; /* of both memories; null without counts */
    int order, recent_order, match_length, match_symbol, long_symbol, long_length;
};
/* Bytes before `at` in one ring that equal the bytes before `now` in another, at most `most` and LONGEST. */
INLINE uint32_t equal_before(const uint8_t *ring, uint64_t mask, uint64_t at, const uint8_t *newest, uint64_t newest_mask, uint64_t now, uint64_t most)
{
    uint32_t length = 0;
    while (length < LONGEST && length < most && ring[(at - 1 - length) & mask] == newest[(now - 1 - length) & newest_mask]) length++;
    return length;
}
INLINE int limited_length(uint32_t length) { return length < MOST_LENGTH ? (int)length : MOST_LENGTH; }
/* A match goes on behind the byte that was read, or is given up. */
INLINE void follow(uint64_t *match, uint32_t *length, int is_equal)
{
    if (is_equal) { ++*match; *length += *length < MOST_LENGTH; }
    else *length = 0;
}
static void find_recent(const struct memory *m, struct stream *s, struct found *f)
{
    for (int k = 0; k < RECENT_CONTEXTS; k++) {
        const uint32_t hash = recent_hash(&f->hashes, k);
        f->slots[RECENT_1 + k] = find_slot(recent_bucket(m, s, k, hash), hash);
        if (f->slots[RECENT_1 + k] && k < RECENT_WORD - RECENT_1) f->recent_order = k + 1;
    }
}
/* Keep the match in the window, or look for a longer one. */
static void find_match(const struct memory *m, struct stream *s, struct found *f)
{
    const uint64_t now = s->history.position, mask = ring_size(m) - 1, window = (uint64_t)m->window;
    const uint8_t *ring = ring_of(m, s);
    if (s->match_length < LONG_ENOUGH) {
        const uint64_t place = match_place(m, &f->hashes);
        const uint32_t low = wide_positions(m) ? UINT32_MAX : UINT16_MAX;
        const uint32_t stored = wide_positions(m) ? ((uint32_t *)match_index_of(m, s))[place] : ((uint16_t *)match_index_of(m, s))[place];
        const uint64_t age = ((uint32_t)now + 1 - stored) & low, at = now - age;
        const int is_there = age && age < window && age <= now;
        const uint32_t length = is_there ? equal_before(ring, mask, at, ring, mask, now, at < window - age ? at : window - age) : 0;
        if (length > s->match_length && length >= SHORTEST) { s->match_length = length; s->match = at; }
    }
    f->match_length = limited_length(s->match_length);
    if (f->match_length) f->match_symbol = ring[s->match & mask];
}
/* The same in the text. */
static void find_long_match(const struct memory *m, struct stream *s, struct found *f)
{
    const uint64_t now = s->history.position, mask = ring_size(m) - 1, text_mask = (1ULL << m->text_bits) - 1;
    if (!in_text(m, s->long_match)) s->long_length = 0;
    /* The longest one: so another search here, after a break between blocks, finds the same. */
    for (int k = 1; k >= 0; k--) {
        const uint32_t least = k ? LONG_INDEX : SHORT_MATCH;
        if (s->long_length >= LONG_ENOUGH || now < least) continue;
        const uint64_t at = *text_end(m, &f->hashes, k);
        if (!in_text(m, at)) continue;
        const uint32_t length = equal_before(m->text, text_mask, at, ring_of(m, s), mask, now, now < at ? now : at);
        if (length > s->long_length && length >= least - 2) { s->long_length = length; s->long_match = at; }
    }
    f->long_symbol = s->long_length ? m->text[s->long_match & text_mask] : -1;
    f->long_length = limited_length(s->long_length);
}
/* Hashes at the position, and what `find_fetched` reads from the long-term memory. */
static void fetch(const struct memory *m, struct stream *s, struct found *f)
{
    find_hashes(&s->history, ring_of(m, s), ring_size(m) - 1, &f->hashes);
    for (int c = 0; c < LONG_CONTEXTS; c++) __builtin_prefetch(bucket_of(m, c, f->hashes.context[c]));
    for (int k = 0; k < 2; k++) __builtin_prefetch(text_end(m, &f->hashes, k));
}
static void find_fetched(const struct memory *m, struct stream *s, struct found *f)
{
    for (int k = RECENT_1; k < LONG_MATCH; k++) f->slots[k] = 0;
    f->recent_order = f->match_length = 0;
    f->match_symbol = -1;
    if (!without_recent(m, s)) { find_recent(m, s, f); find_match(m, s, f); }
    find_long_match(m, s, f);
    f->order = 0;
    for (int c = 0; c < LONG_CONTEXTS; c++) {
        f->slots[c] = find_slot(bucket_of(m, c, f->hashes.context[c]), f->hashes.context[c]);
        if (f->slots[c] && c < ORDERS) f->order = c + 1;
    }
}
static void find(const struct memory *m, struct stream *s, struct found *f)
{
    fetch(m, s, f);
    find_fetched(m, s, f);
}
#ifdef LARGE
/* Which of some contexts have counts. */
INLINE int known_contexts(const struct found *f)
{
    static const uint8_t LIST[10] = {3, 4, 5, 6, 7, WORD, WORDS, PLAIN_2, PLAIN_3, BRACKET_TEXT};
    int known = 0;
    for (int k = 0; k < 10; k++) known |= (f->slots[LIST[k]] != 0) << k;
    return known;
}
#endif
