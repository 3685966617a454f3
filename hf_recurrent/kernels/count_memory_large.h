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
    const uint32_t last4 = (uint32_t)h->last8, last = last4 & 255;
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
static void append_more(struct history *h, int c)
{
    const int is_upper = c >= 'A' && c <= 'Z', lower = is_upper ? c + 32 : c, is_letter = (lower >= 'a' && lower <= 'z') || c >= 128;
    const int class = c >= 128 ? 5 : is_upper ? 2 : is_letter ? 1 : c >= '0' && c <= '9' ? 3 : c == ' ' ? 0 : c;
    if (is_letter) { h->plain[0] = hash2(h->plain[0], (uint32_t)lower + 1); h->plain_length++; }
    else if (h->plain[0]) {
        h->plain[2] = h->plain[1];
        h->plain[1] = h->plain[0];
        h->plain[0] = h->plain_length = 0;
    }
    if ((h->classes & 255) != (uint32_t)class || class > 5) h->classes = h->classes << 8 | (uint32_t)class;
    append_bracket(h, c);
    if (c == '\n') h->line_start = h->line_start_length = h->depth = h->bracket = 0;
    else if (h->line_start_length < 4) { h->line_start = hash2(h->line_start, (uint32_t)c); h->line_start_length++; }
}
