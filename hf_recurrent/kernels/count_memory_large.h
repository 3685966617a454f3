/* The contexts of the larger count memory. Numbers of a history come from files: an index is masked. */
INLINE uint32_t hash_list(int context, const uint32_t *x, int n)
{
    uint32_t hash = hash2(0, (uint32_t)context + 1000);
    for (int i = 0; i < n; i++) hash = hash2(hash, x[i]);
    return hash;
}
#define CONTEXT(name, ...) found->context[name] = hash_list(name, (const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / 4)
/* All but ORDER_7. */
static void find_more_hashes(const struct history *h, struct hashes *found)
{
    const uint32_t last4 = (uint32_t)h->last8, last = last4 & 255, last2 = last4 & 65535;
    const uint32_t after_1 = h->after_1[last], after_2 = h->after_2[last2], after_3 = h->after_3[h->place_3 & 65535];
    CONTEXT(ORDER_1, last);
    CONTEXT(BYTES_234, last4 & 0xffffff00);
    CONTEXT(BYTES_23, last4 & 0x00ffff00);
    CONTEXT(BYTES_13, last4 & 0x00ff00ff);
    CONTEXT(BYTES_34, last4 & 0xffff0000);
    CONTEXT(PLAIN_1, h->plain[0], last);
    CONTEXT(PLAIN_2, h->plain[0], h->plain[1], last);
    CONTEXT(PLAIN_3, h->plain[0], h->plain[1], h->plain[2], last);
    CONTEXT(PLAIN_1_3, h->plain[0], h->plain[2], last);
    CONTEXT(BRACKET_TEXT, h->bracket_text, h->bracket);
    CONTEXT(BRACKET_WORD, h->bracket, h->plain[0], last);
    CONTEXT(LINE_START, h->line_start, h->plain[0], last);
    CONTEXT(CLASSES, h->classes, last);
    CONTEXT(COLUMN, h->column, h->above, last);
    CONTEXT(AFTER_1, after_1 & 65535, last);
    CONTEXT(AFTER_2, after_2 & 65535, last);
    CONTEXT(AFTER_2_LONG, after_2 & 0xffffff, last);
    CONTEXT(PLAIN_4, h->plain[0], h->plain[1], h->plain[2], h->plain[3], last);
    CONTEXT(PLAIN_BYTES, h->plain[1], last2);
    CONTEXT(KINDS, h->kinds, last);
    CONTEXT(KINDS_WORD, h->kinds & 0xffffff, h->plain[0]);
    CONTEXT(BRACKET_BYTES, h->bracket_text, last2);
    CONTEXT(ABOVE_WORD, h->above, h->plain[0]);
    CONTEXT(LINE_COLUMN, h->line_start, h->column);
    CONTEXT(BRACKET_WORDS, h->plain[0], h->plain[1], h->bracket);
    CONTEXT(AFTER_1_LONG, after_1 & 0xffffff, last2);
    CONTEXT(AFTER_SKIPPED, h->after_1[last2 >> 8] & 65535, last2);
    CONTEXT(COLUMN_BYTE, h->column, last);
    CONTEXT(AFTER_BOTH, after_1 & 255, after_2 & 65535);
    CONTEXT(AFTER_1_WORD, h->plain[0], after_1 & 255);
    CONTEXT(KINDS_WORDS, h->kinds, h->plain[0], h->plain[1]);
    CONTEXT(PLAIN_2_3, h->plain[1], h->plain[2], last);
    CONTEXT(PLAIN_LENGTH, h->plain_length, h->plain[1], last);
    CONTEXT(AFTER_2_ALL, after_2, last2);
    CONTEXT(PLAIN_1_3_4, h->plain[0], h->plain[2], h->plain[3]);
    CONTEXT(AFTER_THIRD, h->after_1[last4 >> 16 & 255] & 65535, last4 & 0xffffff);
    CONTEXT(AFTER_1_ALL, after_1, after_2 & 255);
    CONTEXT(PLAIN_1_4, h->plain[0], h->plain[3], last);
    CONTEXT(AFTER_3, after_3 & 65535, last);
    CONTEXT(AFTER_3_LONG, after_3 & 0xffffff, last2);
    CONTEXT(AFTER_WORDS, h->after_words[h->place_words & 65535] & 65535, last);
}
#undef CONTEXT
/* Brackets that do not fit are skipped, up to 8 at once. */
static void append_bracket(struct history *h, int c)
{
    const int opened = c == ']' ? '[' : c == '}' ? '{' : c == ')' ? '(' : c == '>' ? '<' : 0;
    if (c == '[' || c == '{' || c == '(' || c == '<') {
        h->stack[h->depth++ & (STACK - 1)] = (uint8_t)c;
        h->bracket = (uint32_t)c;
        h->bracket_text = 0;
    }
    else if (opened) {
        uint32_t depth = h->depth;
        for (int k = 0; k < 8 && depth && h->stack[(depth - 1) & (STACK - 1)] != opened; k++) depth--;
        if (depth && h->stack[(depth - 1) & (STACK - 1)] == opened) h->depth = depth - 1;
        h->bracket = h->depth ? h->stack[(h->depth - 1) & (STACK - 1)] : 0;
    }
    h->bracket_text = h->bracket ? hash2(h->bracket_text, (uint32_t)c) : 0;
}
/* `last8` ends in c. */
static void append_more(struct history *h, int c)
{
    uint32_t *after_1 = h->after_1 + (h->last8 >> 8 & 255), *after_2 = h->after_2 + (h->last8 >> 8 & 65535);
    *after_1 = *after_1 << 8 | (uint32_t)c;
    *after_2 = *after_2 << 8 | (uint32_t)c;
    uint32_t *after_3 = h->after_3 + (h->place_3 & 65535), *after_words = h->after_words + (h->place_words & 65535);
    *after_3 = *after_3 << 8 | (uint32_t)c;
    *after_words = *after_words << 8 | (uint32_t)c;
    h->place_3 = hash2((uint32_t)h->last8 & 0xffffff, 3) >> 16;
    const int is_upper = c >= 'A' && c <= 'Z', lower = is_upper ? c + 32 : c, is_letter = (lower >= 'a' && lower <= 'z') || c >= 128;
    const int class = c >= 128 ? 5 : is_upper ? 2 : is_letter ? 1 : c >= '0' && c <= '9' ? 3 : c == ' ' ? 0 : c;
    if (is_letter) { h->plain[0] = hash2(h->plain[0], (uint32_t)lower + 1); h->plain_length++; }
    else if (h->plain[0]) {
        h->plain[3] = h->plain[2];
        h->plain[2] = h->plain[1];
        h->plain[1] = h->plain[0];
        h->plain[0] = h->plain_length = 0;
    }
    h->place_words = hash2(h->plain[0], h->plain[1]) >> 16;
    if ((h->classes & 255) != (uint32_t)class || class > 5) h->classes = h->classes << 8 | (uint32_t)class;
    h->kinds = h->kinds << 4 | (uint32_t)(class < 6 ? class : c == '\n' ? 7 : 6);
    append_bracket(h, c);
    if (c == '\n') h->line_start = h->line_start_length = h->depth = h->bracket = 0;
    else if (h->line_start_length < 4) { h->line_start = hash2(h->line_start, (uint32_t)c); h->line_start_length++; }
}
