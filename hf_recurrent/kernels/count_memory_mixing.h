/* From counts to the probability of a byte: its eight decisions are the nodes of a binary tree.
 *
 * In each source, the counts of zeros and ones below a node select an adaptive probability, a cell. Sets of weights mix
 * the logits of the cells and of the network, a second layer mixes the sets, and tables refine the result.
 */
INLINE TARGET void NAME(use_cell)(const struct memory *m, struct path *path, int depth, int source, int cell)
{
    const int p = m->cells[cell].p;
    path->nodes[depth].cells[source] = cell;
    path->x[depth][2 * source] = stretched[p >> 4] * (1.0f / 256);
    path->x[depth][2 * source + 1] = (float)(p - 32768) * (1.0f / 32768);
}
/* The same from the counts of zeros and ones below the node, or from the bit that a match predicts. */
INLINE TARGET void NAME(use_counts)(const struct memory *m, struct path *path, int depth, int source, int recent, int zeros, int ones)
{
    NAME(use_cell)(m, path, depth, source, cell_at(source, recent, depth, level_of[zeros > 1023 ? 1023 : zeros], level_of[ones > 1023 ? 1023 : ones]));
}
INLINE TARGET void NAME(use_match)(const struct memory *m, struct path *path, int depth, int source, const struct found *f, int bit)
{
    const int v = match_level(source == MATCH ? f->match_length : f->long_length);
    NAME(use_cell)(m, path, depth, source, cell_at(source, v / LEVELS, depth, v % LEVELS, bit));
}
/* Cells and inputs of the nodes on the way to `byte`, from the one at depth `from` on. */
static TARGET void NAME(find_cells)(const struct memory *m, const struct found *f, int byte, int from, struct path *path)
{
    uint16_t other[SOURCES][9];
    memset(other, 0, sizeof other);
    memset(path->x[from], 0, (size_t)(8 - from) * sizeof path->x[0]);
    for (int d = from; d < 8; d++) for (int s = 0; s < SOURCES; s++) path->nodes[d].cells[s] = -1;
    for (int c = 0; c < LONG_MATCH; c++)
        if (f->slots[c])
            for (int i = 0; i < SYMBOLS && f->slots[c]->count[i]; i++) other[c][parting(f->slots[c]->symbol[i], byte)] += f->slots[c]->count[i];
    for (int s = 0; s < LONG_MATCH; s++) {
        if (!f->slots[s]) continue;
        const int leaves = s <= ABOVE ? -1 : parting(f->slots[s]->symbol[0], byte);
        int same = other[s][8];
        for (int depth = 7; depth >= from; depth--) {
            const int bit = byte >> (7 - depth) & 1, differ = other[s][depth], zeros = bit ? differ : same, ones = bit ? same : differ;
            same += differ;
            if (!same) continue;
            const int recent = leaves > depth ? 1 + bit : leaves == depth ? 2 - bit : 0;
            NAME(use_counts)(m, path, depth, s, recent, zeros, ones);
        }
    }
    for (int s = LONG_MATCH; s <= MATCH; s++) {
        const int symbol = s == MATCH ? f->match_symbol : f->long_symbol;
        if (symbol < 0) continue;
        for (int depth = from; depth <= parting(symbol, byte) && depth < 8; depth++)
            NAME(use_match)(m, path, depth, s, f, symbol >> (7 - depth) & 1);
    }
}

INLINE TARGET float NAME(dot)(const float *w, const float *d, const float *x)
{
    lanes sums = {0};
    for (int j = 0; j < INPUTS; j += LANES) sums += (*(const lanes *)(w + j) + *(const lanes *)(d + j)) * *(const lanes *)(x + j);
    const half_lanes *halves = (const half_lanes *)&sums, half = halves[0] + halves[1];
    return (half[0] + half[2]) + (half[1] + half[3]);
}
INLINE TARGET void NAME(add_scaled)(float *w, float e, const float *x)
{
    for (int j = 0; j < INPUTS; j += LANES) *(lanes *)(w + j) += e * *(const lanes *)(x + j);
}
INLINE TARGET float *NAME(row_of)(const struct memory *m, struct stream *s, int row)
{
    return m->rows && !s->no_recent ? rows_of(s) + (scrambled((uint32_t)row) & (uint32_t)(m->rows - 1)) * INPUTS : (float *)no_rows;
}

/* At a node: rows of weights, rows of the second layer, and what selects the rows of the tables that refine; `stride` apart. */
INLINE TARGET void NAME(find_rows)(const struct stream *s, const struct found *f, int tree, int depth, int stride, int *rows, int *final_rows, uint32_t *refined)
{
    const struct history *h = &s->history;
    const int last = h->last8 & 255, ml = f->match_length, ll = f->long_length;
    const int m_bit = match_bit(f->match_symbol, tree, depth), l_bit = match_bit(f->long_symbol, tree, depth);
    const int m_level = !m_bit ? 0 : ml < 6 ? 1 : ml < 8 ? 2 : ml < 12 ? 3 : ml < 16 ? 4 : ml < 24 ? 5 : ml < 32 ? 6 : 7;
    const int l_level = !l_bit ? 0 : ll < 16 ? 1 : ll < 32 ? 2 : 3;
    const int agree = m_bit && l_bit ? m_bit == l_bit ? 1 : 2 : 0;
    const int network = s->network[0] > 0 ? 12 + (int)(clipped(s->network[tree], -5.5f, 5.5f) * 2) : 0;
    const int column = (int)h->column;
#ifdef SMALL
    const int row[SETS] = {f->order * 5 + f->recent_order, depth * 8 + m_level, h->column < 63 ? column : 63, last >> 3, network};
    (void)agree, (void)l_level;
#else
    const int row[SETS] = {tree, last, f->order * 5 + f->recent_order, ((depth * 8 + m_level) * 4 + l_level) * 3 + agree,
        (h->column < 23 ? column : 23) * 24 + (h->indent < 23 ? (int)h->indent : 23), last * 8 + depth, network * 8 + m_level,
#ifdef LARGE
        (int)(h->last8 >> 8 & 255) * 8 + depth, (int)(h->bracket & 255) * 8 + depth,
        (int)((h->plain_length < 15 ? h->plain_length : 15) * 16 + (h->classes >> 8 & 15)) * 8 + depth,
        (int)((h->classes & 7) * 64 + (h->classes >> 8 & 7) * 8 + (h->classes >> 16 & 7)) * 8 + depth,
        ((last >> 5) * 256 + tree) * 2 + (h->bracket != 0), known_contexts(f),
        (f->match_symbol + 1) * 3 + m_bit, (int)(hash2((uint32_t)h->last8 & 65535, 0) >> 20),
        tree * 8 + (int)(h->plain_length < 7 ? h->plain_length : 7), (int)(hash2((uint32_t)h->last8 & 0xffffff, 5) >> 20),
#endif
    };
#endif
    for (int k = 0, first = 0; k < SETS; first += SET_SIZE[k++]) rows[k * stride] = row[k] + first;
    final_rows[0] = tree;
#ifdef LARGE
    final_rows[stride] = 256 + (m_level * 8 + depth) * 4 + l_level;
#endif
    const uint32_t hashes[REFINEMENTS] = {hash2((uint32_t)last, (uint32_t)tree), hash2(f->hashes.context[0], (uint32_t)tree),
        hash2((uint32_t)(f->match_symbol + 1 + 256 * m_level), (uint32_t)tree),
#ifdef LARGE
        hash2(f->hashes.context[1], (uint32_t)tree), hash2(f->hashes.context[PLAIN_1], (uint32_t)tree), hash2(h->classes & 0xffffff, (uint32_t)tree),
#endif
    };
    for (int k = 0; k < REFINEMENTS; k++) refined[k * stride] = hashes[k];
}
INLINE TARGET uint16_t *NAME(knots_of)(const struct memory *m, int table, uint32_t hash)
{
    return m->refinement + (((int64_t)table << REFINEMENT_BITS) + (hash >> (32 - REFINEMENT_BITS))) * KNOTS;
}
/* The rows of a node that has counts or is on a way to a byte; they are fetched from memory while others are computed. */
static TARGET void NAME(select_rows)(const struct memory *m, const struct stream *s, const struct found *f, int tree, int depth, struct node *node)
{
    uint32_t refined[REFINEMENTS];
    NAME(find_rows)(s, f, tree, depth, 1, node->row, node->final_row, refined);
    for (int k = 0; k < SETS; k++)
        for (int line = 0; line < INPUTS * 4; line += 64) __builtin_prefetch((const char *)(m->weights + (int64_t)node->row[k] * INPUTS) + line);
    for (int k = 0; k < REFINEMENTS; k++) {
        node->knots[k] = NAME(knots_of)(m, k, refined[k]);
        __builtin_prefetch(node->knots[k] + KNOTS / 2);
    }
}
/* Probabilities before and after the tables, from the logit of the second layer. */
INLINE TARGET void NAME(refine)(float logit, struct node *node)
{
    const int index = squash_index(logit), position = limited(index, -2047, 2047) + 2048, knot = position >> 7;
    node->p = squashed[LOGITS + index];
    node->part = position & 127;
    int sum = 2 * node->p;
    for (int k = 0; k < REFINEMENTS; k++) {
        const uint16_t *q = node->knots[k] += knot;
        sum += (q[0] * (128 - node->part) + q[1] * node->part) >> 7;
    }
    node->refined = limited(sum / (2 + REFINEMENTS), 1, 65535);
}
INLINE TARGET float NAME(network_p)(float logit) { return (float)(squashed[LOGITS + squash_index(logit)] - 32768) * (1.0f / 32768); }
/* Probability of a one at a node with selected rows; `x` has the inputs of the sources. updates: `update_node` follows. */
static TARGET void NAME(predict_node)(const struct memory *m, struct stream *s, int tree, int updates, struct node *node, float *x)
{
    const int has_network = s->network[0] > 0;
    const float network = has_network ? clipped(s->network[tree], -11.9f, 11.9f) : 0;
    x[BIAS] = BIAS_INPUT;
    x[NETWORK] = network;
    x[NETWORK_P] = has_network ? NAME(network_p)(network) : 0;
    float finals[FINALS] = {0};
    for (int k = 0; k < SETS; k++) {
        const float y = clipped(NAME(dot)(m->weights + (int64_t)node->row[k] * INPUTS, NAME(row_of)(m, s, node->row[k]), x), -11.9f, 11.9f);
        if (updates) {
            node->out[k] = y;
            node->set_p[k] = squashed[LOGITS + squash_index(y)];
        }
        for (int i = 0; i < FINALS; i++) finals[i] += y * (m->final_weights[node->final_row[i] * SETS + k] + s->final_delta[k]);
    }
    float sum = finals[0];
    for (int i = 1; i < FINALS; i++) sum += finals[i];
    for (int i = 0; updates && i < FINALS; i++) node->final_p[i] = squashed[LOGITS + squash_index(finals[i])];
    NAME(refine)(sum * (1.0f / FINALS), node);
}
static TARGET void NAME(predict_path)(const struct memory *m, struct stream *s, const struct found *f, int byte, struct path *path)
{
    path->byte = byte;
    path->valid = 1;
    for (int depth = 0; depth < 8; depth++) NAME(select_rows)(m, s, f, (256 | byte) >> (8 - depth), depth, path->nodes + depth);
    NAME(find_cells)(m, f, byte, 0, path);
    for (int depth = 0; depth < 8; depth++) NAME(predict_node)(m, s, (256 | byte) >> (8 - depth), 1, path->nodes + depth, path->x[depth]);
}

/* After the bit at a node is known: the stream's own weights adapt, and the shared ones learn. */
static TARGET void NAME(update_node)(struct memory *m, struct stream *s, const struct rates *r, int bit, struct node *node, const float *x)
{
    const int target = bit ? 65535 : 0;
    const float scale = 1.0f / 65536, error = (float)(target - node->p) * scale;
    if (r->mode & LEARNS) {
        const float rate = r->weights + r->first_weights / (1 + (float)m->counters[LEARNED] * (1.0f / 256));
        for (int i = 0; i < FINALS; i++) {
            const float step = (float)(target - node->final_p[i]) * scale * r->final;
            for (int k = 0; k < SETS; k++) m->final_weights[node->final_row[i] * SETS + k] += step * node->out[k];
        }
        for (int k = 0; k < SETS; k++) NAME(add_scaled)(m->weights + (int64_t)node->row[k] * INPUTS, (float)(target - node->set_p[k]) * scale * rate, x);
        for (int i = 0; i < SOURCES; i++)
            if (node->cells[i] >= 0) {
                struct cell *c = m->cells + node->cells[i];
                const int speed = cell_rate[c->n & 1023];
                c->p = (uint16_t)limited(c->p + (int)((int64_t)(target - c->p) * (speed > r->least_cell ? speed : r->least_cell) / 65536), 16, 65519);
                c->n += c->n < 1023;
            }
        for (int k = 0; k < REFINEMENTS; k++) {
            uint16_t *q = node->knots[k] + (node->part > 63);
            *q = (uint16_t)(*q + (target - *q) / r->refinement);
        }
    }
    if (m->rows && !s->no_recent) {
        for (int k = 0; k < SETS; k++) NAME(add_scaled)(NAME(row_of)(m, s, node->row[k]), (float)(target - node->set_p[k]) * scale * r->delta, x);
        for (int k = 0; k < SETS; k++) s->final_delta[k] += error * r->final * node->out[k];
    }
}
static TARGET void NAME(update_path)(struct memory *m, struct stream *s, const struct rates *r, struct path *path)
{
    for (int depth = 0; depth < 8; depth++)
        NAME(update_node)(m, s, r, path->byte >> (7 - depth) & 1, path->nodes + depth, path->x[depth]);
    path->valid = 0;
    if (r->mode & LEARNS) m->counters[LEARNED]++;
}
