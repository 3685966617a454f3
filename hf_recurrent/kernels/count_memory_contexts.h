/* Contexts of a position, the tables of the long-term memory, and the chains of the short-term memory. */
INLINE uint8_t back(const struct history *h, const uint8_t *ring, uint64_t mask, uint64_t distance)
{
    return ring[(h->position - distance) & mask];
}
INLINE int is_word(int c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c >= 128; }

struct hashes { uint32_t context[LONG_CONTEXTS], text[2]; };

static void find_hashes(const struct history *h, const uint8_t *ring, uint64_t mask, struct hashes *found)
{
    uint32_t hash = 0;
    int k = 0;
    for (uint32_t order = 1; order <= LONG_INDEX; order++) {
        hash = hash2(hash, order <= h->position ? back(h, ring, mask, order) + 1u : 0);
        if (order == SHORT_MATCH) found->text[0] = hash;
        if (order == ORDER[k]) found->context[k++] = hash2(hash, order);
    }
    found->text[1] = hash;
    const uint32_t last = h->last8 & 255;
    found->context[WORD] = hash2(h->word, last + 1001);
    found->context[WORDS] = hash2(hash2(h->word, h->last_word), last + 2002);
    found->context[INDENT] = hash2(hash2(h->indent * 256 + h->first, h->word), last + 7007);
    found->context[ABOVE] = hash2(hash2(h->above, last), 8008);
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
    h->position++;
    if (c == '\n') { h->last_line = h->line; h->line = h->position; h->indent = 0; h->first = 0; }
    else if (!h->first) { if (c == ' ' || c == '\t') h->indent++; else h->first = (uint32_t)c; }
    h->column = (uint32_t)(h->position - h->line);
    const uint64_t above = h->last_line + h->column;
    /* The nearest bytes only, so that every size of the window gives the same contexts. */
    h->above = above < h->line && h->position - above < LEAST_RING ? ring[above & mask] : 0;
}

/* ---- long-term memory ---- */
INLINE struct slot *bucket_of(const struct memory *m, int context, uint32_t hash)
{
    return m->slots + ((int64_t)context << m->slot_bits) + ((hash >> (32 - m->slot_bits)) & ~(uint32_t)(WAYS - 1));
}
INLINE struct slot *find_slot(struct slot *bucket, uint32_t hash)
{
    const uint16_t check = (uint16_t)(hash | 1);
    for (int way = 0; way < WAYS; way++) if (bucket[way].check == check) return bucket + way;
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
    least->check = (uint16_t)(hash | 1);
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
/* Count `symbol` after a context, and append it to the text. */
static void insert(struct memory *m, const struct hashes *h, uint64_t position, int symbol)
{
    const uint32_t at = (uint32_t)m->counters[TEXT_USED];
    if (position >= SHORT_MATCH) m->index[h->text[0] >> (32 - m->index_bits)] = at;
    if (position >= LONG_INDEX) m->index[(1LL << m->index_bits) + (h->text[1] >> (32 - m->index_bits))] = at;
    m->text[at & ((1LL << m->text_bits) - 1)] = (uint8_t)symbol;
    m->counters[TEXT_USED] = at == UINT32_MAX ? 1LL << m->text_bits : (int64_t)at + 1;
    for (int c = 0; c < LONG_CONTEXTS; c++) count(add_slot(bucket_of(m, c, h->context[c]), h->context[c]), symbol);
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

/* ---- what is known at a position ---- */
struct found {
    struct hashes hashes;
    const struct slot *slots[LONG_CONTEXTS]; /* null without counts */
    uint8_t symbol[MOST_CANDIDATES], first[MOST_CANDIDATES], last[MOST_CANDIDATES]; /* sources [first, last] */
    int candidates;
    int16_t recent[SOURCES];                 /* newest symbol of a source; -1 without one */
    int order, recent_order, match_length, match_symbol, long_symbol, long_length;
};
INLINE uint32_t head_of(const struct memory *m, uint8_t *chains, int chain, uint32_t key, int64_t *head)
{
    *head = ((int64_t)chain << m->head_bits) + (scrambled(key + (uint32_t)chain) >> (32 - m->head_bits));
    return wide_links(m) ? ((uint32_t *)chains)[*head] : ((uint16_t *)chains)[*head];
}
INLINE int64_t link_of(const struct memory *m, int chain, uint64_t at)
{
    return ((int64_t)CHAINS << m->head_bits) + chain * m->window + (int64_t)(at & (uint64_t)(m->window - 1));
}
INLINE void chain_keys(const struct history *h, const struct hashes *hashes, uint32_t *key)
{
    key[CHAIN_1] = h->last8 & 255; key[CHAIN_2] = h->last8 & 0xffff; key[CHAIN_4] = (uint32_t)h->last8;
    key[CHAIN_WORD] = hashes->context[WORD]; key[CHAIN_INDENT] = hashes->context[INDENT];
}
/* Sources of a candidate whose last `length` bytes are the current ones. */
INLINE int sources_of(int chain, uint32_t length, int *first)
{
    switch (chain) {
    case CHAIN_1: *first = RECENT_1; return length ? RECENT_1 : -1;
    case CHAIN_2: *first = RECENT_2; return length >= 3 ? RECENT_3 : length == 2 ? RECENT_2 : -1;
    case CHAIN_4: *first = RECENT_4;
        return length >= 12 ? RECENT_12 : length >= 6 ? RECENT_6 : length >= 4 ? RECENT_4 : -1;
    case CHAIN_WORD: *first = RECENT_WORD; return RECENT_WORD;
    default: *first = RECENT_INDENT; return RECENT_INDENT;
    }
}
/* Number of bytes before `at`, at most 8, that equal the newest ones. */
INLINE uint32_t equal_bytes(const uint8_t *ring, uint64_t mask, uint64_t at, uint64_t newest)
{
    uint64_t found = 0;
    if ((at & mask) >= 8) memcpy(&found, ring + (at & mask) - 8, 8);
    else for (int i = 8; i > 0; i--) found = found >> 8 | (uint64_t)ring[(at - (uint64_t)i) & mask] << 56;
    found ^= newest;
    return found ? (uint32_t)__builtin_clzll(found) / 8 : 8;
}
static void find_recent(const struct memory *m, struct stream *s, struct found *f)
{
    static const uint8_t MOST[CHAINS] = {1, 3, LONGEST, 0, 0};
    const struct history *h = &s->history;
    const uint64_t now = h->position, mask = ring_size(m) - 1, window = (uint64_t)m->window;
    const uint32_t low = wide_links(m) ? UINT32_MAX : 65535;
    const uint8_t *ring = ring_of(m, s);
    uint8_t *chains = chains_of(m, s);
    const uint64_t newest = __builtin_bswap64(h->last8); /* as in the ring */
    uint32_t key[CHAINS];
    chain_keys(h, &f->hashes, key);
    for (int c = 0; c < CHAINS; c++) {
        int64_t place;
        uint32_t stored = head_of(m, chains, c, key[c], &place);
        uint64_t age = ((uint32_t)now + 1 - stored) & low, last = 0;
        for (int n = 0; n < CANDIDATES[c] && age > last && age < window && age <= now; n++) {
            const uint64_t at = now - age;
            uint32_t length = MOST[c] ? equal_bytes(ring, mask, at, newest) : 0;
            if (length > MOST[c]) length = MOST[c];
            if (length > at) length = (uint32_t)at;
            if (length + age > window) length = (uint32_t)(window - age);
            if (length == 8) while (length < MOST[c] && length < at && length + age < window && ring[(at - 1 - length) & mask] == ring[(now - 1 - length) & mask]) length++;
            int first;
            const int source = sources_of(c, length, &first), symbol = ring[at & mask];
            if (source >= 0) {
                for (int o = first; o <= source; o++) if (f->recent[o] < 0) f->recent[o] = (int16_t)symbol;
                f->symbol[f->candidates] = (uint8_t)symbol; f->first[f->candidates] = (uint8_t)first; f->last[f->candidates++] = (uint8_t)source;
                if (c == CHAIN_4 && (int)length > f->match_length) { f->match_length = (int)length; f->match_symbol = symbol; }
            }
            last = age;
            const int64_t link = link_of(m, c, at);
            stored = wide_links(m) ? ((uint32_t *)chains)[link] : ((uint16_t *)chains)[link];
            age = ((uint32_t)now + 1 - stored) & low;
        }
    }
    for (int o = RECENT_2; o <= RECENT_12; o++) if (f->recent[o] >= 0) f->recent_order = o - RECENT_1;
}
/* Before the byte at the current position is appended: later contexts find it. */
static void link_position(const struct memory *m, struct stream *s, const struct hashes *hashes)
{
    uint8_t *chains = chains_of(m, s);
    const uint64_t now = s->history.position;
    uint32_t key[CHAINS];
    chain_keys(&s->history, hashes, key);
    for (int c = 0; c < CHAINS; c++) {
        int64_t head;
        const uint32_t stored = head_of(m, chains, c, key[c], &head);
        const int64_t link = link_of(m, c, now);
        if (wide_links(m)) { ((uint32_t *)chains)[link] = stored; ((uint32_t *)chains)[head] = (uint32_t)now + 1; }
        else { ((uint16_t *)chains)[link] = (uint16_t)stored; ((uint16_t *)chains)[head] = (uint16_t)(now + 1); }
    }
}
static void find_match(const struct memory *m, struct stream *s, struct found *f)
{
    const struct history *h = &s->history;
    const uint64_t now = h->position, mask = ring_size(m) - 1, text_mask = (1ULL << m->text_bits) - 1;
    const uint8_t *ring = ring_of(m, s);
    if (!in_text(m, s->long_match)) s->long_length = 0;
    /* The longest one: so another search here, after a break between blocks, finds the same. */
    for (int k = 1; k >= 0; k--) {
        const uint32_t least = k ? LONG_INDEX : SHORT_MATCH;
        if (s->long_length >= 24 || now < least) continue;
        const uint64_t at = m->index[((int64_t)k << m->index_bits) + (f->hashes.text[k] >> (32 - m->index_bits))];
        if (!in_text(m, at)) continue;
        uint32_t length = 0;
        while (length < LONGEST && length < now && length < at && m->text[(at - 1 - length) & text_mask] == back(h, ring, mask, length + 1)) length++;
        if (length > s->long_length && length >= least - 2) { s->long_length = length; s->long_match = at; }
    }
    f->long_symbol = s->long_length ? m->text[s->long_match & text_mask] : -1;
    f->long_length = (int)(s->long_length < 65535 ? s->long_length : 65535);
}
static void find(const struct memory *m, struct stream *s, struct found *f)
{
    find_hashes(&s->history, ring_of(m, s), ring_size(m) - 1, &f->hashes);
    for (int c = 0; c < LONG_CONTEXTS; c++) __builtin_prefetch(bucket_of(m, c, f->hashes.context[c]));
    for (int i = 0; i < SOURCES; i++) f->recent[i] = -1;
    f->candidates = f->recent_order = f->match_length = 0;
    f->match_symbol = -1;
    if (m->window && !s->no_recent) find_recent(m, s, f);
    find_match(m, s, f);
    f->order = 0;
    for (int c = 0; c < LONG_CONTEXTS; c++) {
        f->slots[c] = find_slot(bucket_of(m, c, f->hashes.context[c]), f->hashes.context[c]);
        if (f->slots[c] && c < ORDERS) f->order = c + 1;
    }
}
