/* Log probabilities of all 256 bytes: the same numbers as `predict_path` for each byte, at the cost of a few paths.
 *
 * Symbols with counts are sorted once, so that those below a node of the tree lie side by side. Where there are none,
 * only the constant and the network are inputs, and eight nodes of a depth are computed in the lanes of a vector.
 */
static TARGET void NAME(sort_counts)(const struct found *f, struct sorted_counts *counts)
{
    struct counted listed[MOST_COUNTED];
    int n = 0;
    memset(counts->first, 0, sizeof counts->first);
    for (int s = 0; s < LONG_MATCH; s++)
        for (int i = 0; f->slots[s] && i < SYMBOLS && f->slots[s]->count[i]; i++)
            listed[n++] = (struct counted){f->slots[s]->symbol[i], (uint8_t)s, f->slots[s]->count[i], s > ABOVE && !i};
    if (f->long_symbol >= 0) listed[n++] = (struct counted){(uint8_t)f->long_symbol, LONG_MATCH, 0, 0};
    if (f->match_symbol >= 0) listed[n++] = (struct counted){(uint8_t)f->match_symbol, MATCH, 0, 0};
    for (int i = 0; i < n; i++) counts->first[listed[i].symbol + 1]++;
    for (int symbol = 0; symbol < 256; symbol++) counts->first[symbol + 1] = (uint16_t)(counts->first[symbol + 1] + counts->first[symbol]);
    uint16_t next[256];
    memcpy(next, counts->first, sizeof next);
    for (int i = 0; i < n; i++) counts->sorted[next[listed[i].symbol]++] = listed[i];
}
/* Cells and inputs of a node from the symbols below it; `use_cell` writes them at `depth` of the path. */
static TARGET void NAME(find_node_cells)(const struct memory *m, const struct found *f, const struct counted *below, int n, int depth, struct path *path)
{
    uint8_t is_used[SOURCES] = {0}, newest[SOURCES] = {0};
    int counts[SOURCES][2] = {{0}};
    memset(path->x[depth], 0, sizeof path->x[depth]);
    for (int i = 0; i < n; i++) {
        const int s = below[i].source, bit = below[i].symbol >> (7 - depth) & 1;
        is_used[s] = 1;
        counts[s][bit] += below[i].count;
        if (below[i].newest) newest[s] = (uint8_t)(1 + bit);
        if (s >= LONG_MATCH) newest[s] = (uint8_t)bit;
    }
    for (int s = 0; s < SOURCES; s++)
        if (is_used[s] && s >= LONG_MATCH) NAME(use_match)(m, path, depth, s, f, newest[s]);
        else if (is_used[s]) NAME(use_counts)(m, path, depth, s, newest[s], counts[s][0], counts[s][1]);
}
/* Probabilities of a one at LANES nodes of a depth without counts, which no match passes. */
static TARGET void NAME(predict_empty)(const struct memory *m, struct stream *s, const struct found *f, const int *trees, int depth, int *refined)
{
    int rows[SETS][LANES], final_rows[FINALS][LANES];
    uint32_t hashes[REFINEMENTS][LANES];
    for (int i = 0; i < LANES; i++) NAME(find_rows)(s, f, trees[i], depth, LANES, rows[0] + i, final_rows[0] + i, hashes[0] + i);
    for (int k = 0; k < REFINEMENTS; k++) for (int i = 0; i < LANES; i++) __builtin_prefetch(NAME(knots_of)(m, k, hashes[k][i]) + KNOTS / 2);
    const lanes zero = {0}, most = zero + 11.9f;
    lanes network = zero, network_p = zero, finals[FINALS] = {{0}};
    if (s->network[0] > 0)
        for (int i = 0; i < LANES; i++) {
            network[i] = clipped(s->network[trees[i]], -11.9f, 11.9f);
            network_p[i] = NAME(network_p)(network[i]);
        }
    for (int k = 0; k < SETS; k++) {
        lanes bias, of_p, of_network;
        int is_shared = 1;
        for (int i = 1; i < LANES; i++) is_shared &= rows[k][i] == rows[k][0];
        for (int i = 0; i < (is_shared ? 1 : LANES); i++) {
            const float *w = m->weights + (int64_t)rows[k][i] * INPUTS, *d = NAME(row_of)(m, s, rows[k][i]);
            bias[i] = w[BIAS] + d[BIAS];
            of_p[i] = w[NETWORK_P] + d[NETWORK_P];
            of_network[i] = w[NETWORK] + d[NETWORK];
        }
        if (is_shared) { bias = zero + bias[0]; of_p = zero + of_p[0]; of_network = zero + of_network[0]; }
        lanes y = (bias * BIAS_INPUT + of_p * network_p) + of_network * network;
        y = chosen(y > -most, chosen(y < most, y, most), -most);
        for (int j = 0; j < FINALS; j++) {
            lanes weights;
            for (int i = 0; i < LANES; i++) weights[i] = m->final_weights[final_rows[j][i] * SETS + k];
            finals[j] += y * (weights + s->final_delta[k]);
        }
    }
    for (int j = 1; j < FINALS; j++) finals[0] += finals[j];
    for (int i = 0; i < LANES; i++) {
        struct node node;
        for (int k = 0; k < REFINEMENTS; k++) node.knots[k] = NAME(knots_of)(m, k, hashes[k][i]);
        NAME(refine)(finals[0][i] * (1.0f / FINALS), &node);
        refined[trees[i]] = node.refined;
    }
}
/* Log probabilities of all bytes. */
static TARGET void NAME(predict_all)(const struct memory *m, struct stream *s, const struct found *f, float *logits)
{
    struct sorted_counts counts;
    struct path path;
    int refined[256];
    NAME(sort_counts)(f, &counts);
    for (int depth = 0; depth < 8; depth++) {
        struct node *node = path.nodes + depth;
        int empty[LANES], n = 0;
        for (int tree = 1 << depth; tree < 2 << depth; tree++) {
            const int symbol = (tree << (8 - depth)) & 255, first = counts.first[symbol], end = counts.first[symbol + (256 >> depth)];
            if (first == end) {
                empty[n++] = tree;
                if (n < LANES) continue;
                NAME(predict_empty)(m, s, f, empty, depth, refined);
                n = 0;
                continue;
            }
            NAME(select_rows)(m, s, f, tree, depth, node);
            NAME(find_node_cells)(m, f, counts.sorted + first, end - first, depth, &path);
            NAME(predict_node)(m, s, tree, 0, node, path.x[depth]);
            refined[tree] = node->refined;
        }
        if (!n) continue;
        while (n < LANES) empty[n++] = empty[0];
        NAME(predict_empty)(m, s, f, empty, depth, refined);
    }
    float zeros[256], ones[256], sums[512];
    for (int tree = 1; tree < 256; tree++) zeros[tree] = log_positive((float)(65536 - refined[tree]) * (1.0f / 65536));
    for (int tree = 1; tree < 256; tree++) ones[tree] = log_positive((float)refined[tree] * (1.0f / 65536));
    sums[1] = 0;
    for (int tree = 1; tree < 256; tree++) {
        sums[2 * tree] = sums[tree] + zeros[tree];
        sums[2 * tree + 1] = sums[tree] + ones[tree];
    }
    memcpy(logits, sums + 256, 256 * sizeof *logits);
}
