/* Coding of bytes, encoder and decoder in one: both predict a byte, code it, learn from it, and append it. */

/* The byte that the longest contexts expect, of those below a node at `depth`. */
static TARGET int NAME(expected_byte)(const struct found *f, int tree, int depth)
{
    if (match_bit(f->match_symbol, tree, depth)) return f->match_symbol;
    if (match_bit(f->long_symbol, tree, depth)) return f->long_symbol;
    for (int c = ORDERS; c-- > 0;) {
        const struct slot *slot = f->slots[c];
        int most = 0, byte = 0;
        for (int i = 0; slot && i < SYMBOLS; i++)
            if (slot->count[i] > most && (slot->symbol[i] | 256) >> (8 - depth) == tree) { most = slot->count[i]; byte = slot->symbol[i]; }
        if (most) return byte;
    }
    for (int s = RECENT_4; s >= RECENT_1; s--) if (f->slots[s] && match_bit(f->slots[s]->symbol[0], tree, depth)) return f->slots[s]->symbol[0];
    return (tree << (8 - depth)) & 255;
}
/* Code a byte, which a decoder finds out, and return it; `path` is then ready for learning from it.
 *
 * A decoder prepares the nodes on the way to the byte that it expects, and again from the node on where another bit came.
 */
static TARGET int NAME(code_byte)(const struct memory *m, struct stream *s, const struct found *f, struct coder *coder, int decodes, int byte, struct path *path)
{
    if (decodes) byte = NAME(expected_byte)(f, 1, 0);
    for (int depth = 0, from = 0; depth < 8; depth++) {
        if (depth == from) {
            for (int d = from; d < 8; d++) NAME(select_rows)(m, s, f, (256 | byte) >> (8 - d), d, path->nodes + d);
            NAME(find_cells)(m, f, byte, from, path);
        }
        const int tree = (256 | byte) >> (8 - depth), expected = byte >> (7 - depth) & 1;
        NAME(predict_node)(m, s, tree, 1, path->nodes + depth, path->x[depth]);
        const int bit = code_bit(coder, decodes, expected, (uint32_t)path->nodes[depth].refined);
        if (bit != expected) {
            from = depth + 1;
            byte = depth < 7 ? NAME(expected_byte)(f, 2 * tree + bit, from) : byte ^ 1;
        }
    }
    path->byte = byte;
    return byte;
}
/* Code bytes by the network's prediction alone. */
static TARGET int NAME(code_alone)(const float *nodes, struct coder *coder, int decodes, int byte)
{
    int tree = 1;
    for (int depth = 0; depth < 8; depth++) {
        const float x = nodes[tree], e = exp_negative(x < 0 ? x : -x), p = (x < 0 ? e : 1.0f) / (1.0f + e);
        tree = 2 * tree + code_bit(coder, decodes, byte >> (7 - depth) & 1, (uint32_t)limited((int)(clipped(p, 0, 1) * 65536), 1, 65535));
    }
    return tree & 255;
}
static TARGET void NAME(code_block)(struct memory *m, uint8_t *states, const struct rates *r, const struct coding *job)
{
    struct found found;
    struct path path;
    for (int64_t i = 0; i < job->steps * job->streams; i++) {
        const int byte = job->bytes[i];
        const float *network = job->network ? job->network + i * 256 : 0;
        if (!m) {
            float nodes[256];
            NAME(network_nodes)(network, job->decodes ? -1 : byte, nodes);
            job->bytes[i] = (uint8_t)NAME(code_alone)(nodes, job->coder, job->decodes, byte);
            continue;
        }
        struct stream *s = (struct stream *)(states + i % job->streams * state_size(m));
        NAME(read_network)(s, network, 256, byte, job->decodes);
        if (!i || job->streams > 1) fetch(m, s, &found); /* else `take_byte` has done so */
        find_fetched(m, s, &found);
        job->bytes[i] = (uint8_t)NAME(code_byte)(m, s, &found, job->coder, job->decodes, byte, &path);
        NAME(take_byte)(m, s, r, &found, s->pending ? &path : 0, job->bytes[i], 0); /* no learning from the first byte, as in reading */
        s->pending = 1;
        s->target = -1;
    }
}
