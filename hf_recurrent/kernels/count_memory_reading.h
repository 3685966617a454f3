/* Reading of a block: contexts, prediction and learning, byte by byte. */
/* `exp_negative` of each lane, with the same bits. */
INLINE TARGET void NAME(exps_negative)(lanes *x)
{
    const lanes zero = {0}, least = zero - 40.0f;
    const lanes y = chosen(*x > least, chosen(*x < zero, *x, zero), least) * 1.4426950408889634f;
    const whole_lanes k = __builtin_convertvector(y, whole_lanes);
    const lanes f = y - __builtin_convertvector(k, lanes);
    lanes p = zero + 0.00010938752529909834f;
    p = p * f + 0.0012757162330672145f; p = p * f + 0.009580058045685291f; p = p * f + 0.05549103394150734f;
    p = p * f + 0.24022436141967773f; p = p * f + 0.6931470632553101f; p = p * f + 1.0f;
    *x = p * (lanes)((k + 127) << 23);
}
/* Logits of the nodes on the way to `target`, or of all nodes if it is negative, from the network's logits of bytes. */
static TARGET void NAME(network_nodes)(const float *logits, int target, float *nodes)
{
    float sums[512], most = logits[0];
    lanes highest = most - (lanes){0};
    for (int i = 0; i < 256; i += LANES) {
        const lanes x = *(const lanes *)(logits + i);
        highest = chosen(x > highest, x, highest);
    }
    for (int i = 0; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
    for (int i = 0; i < 256; i += LANES) {
        lanes x = *(const lanes *)(logits + i) - most;
        NAME(exps_negative)(&x);
        *(lanes *)(sums + 256 + i) = x;
    }
    for (int n = 128; n; n >>= 1)
        for (int i = n; i < 2 * n; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
    nodes[0] = 1;
    if (target >= 0)
        for (int tree = (256 | target) >> 1; tree; tree >>= 1) nodes[tree] = log_positive(sums[2 * tree + 1] / sums[2 * tree]);
    else
        for (int tree = 1; tree < 256; tree++) nodes[tree] = log_positive(sums[2 * tree + 1] / sums[2 * tree]);
}
static TARGET void NAME(read_network)(struct stream *s, const float *network, int64_t width, int target, int all)
{
    if (!network || (width != 256 && target < 0)) { s->network[0] = 0; return; }
    if (width == 256) { NAME(network_nodes)(network, all ? -1 : target, s->network); return; }
    s->network[0] = 1;
    for (int depth = 0; depth < 8; depth++) s->network[(256 | target) >> (8 - depth)] = network[depth];
}
/* The end of a document whose bytes are learned: of its last label, then of its bytes. */
static TARGET void NAME(end_document)(struct memory *m, struct stream *s, const struct rates *r, struct path *path, struct found *f, int64_t number, const struct block *b)
{
    const int target = s->target < 256 ? s->target : -1;
    if (s->pending && target >= 0) {
        if (!path->valid || path->byte != target) { find(m, s, f); NAME(predict_path)(m, s, f, target, path); }
        NAME(update_path)(m, s, r, path);
    }
    if (b->pending) {
        insert_document(m, b->pending + number * b->pending_size, b->pending_used[number], s->history.position ? target : -1);
        b->pending_used[number] = 0;
    }
}
/* The cost of a target, and the probability of each of its bits. */
static TARGET void NAME(write_target)(const struct path *path, int64_t i, const struct block *b)
{
    float nats = 0;
    for (int depth = 0; depth < 8; depth++) {
        const int one = path->nodes[depth].refined, p = path->byte >> (7 - depth) & 1 ? one : 65536 - one;
        nats -= log_positive((float)p * (1.0f / 65536));
        if (b->probabilities) b->probabilities[i * 8 + depth] = (uint16_t)p;
    }
    if (b->nats) b->nats[i] = nats;
}
/* After a byte is known: count it, follow the matches, make it part of the history, and learn from it. The short-term memory does not
 * know samples. What the next contexts need is fetched from memory while the weights adapt; `found` then has their hashes. */
static TARGET void NAME(take_byte)(struct memory *m, struct stream *s, const struct rates *r, struct found *found, struct path *path, int byte, int is_sampled)
{
    const struct hashes before = found->hashes;
    const uint64_t position = s->history.position;
    const int is_remembered = !is_sampled && !without_recent(m, s);
    if (r->mode & INSERTS) insert(m, &before, position, byte);
    if (s->long_length)
        follow(&s->long_match, &s->long_length, in_text(m, s->long_match) && m->text[s->long_match & ((1ULL << m->text_bits) - 1)] == byte);
    if (is_sampled) s->match_length = 0; /* it could go on into samples */
    else if (is_remembered && s->match_length) follow(&s->match, &s->match_length, ring_of(m, s)[s->match & (ring_size(m) - 1)] == byte);
    append(&s->history, ring_of(m, s), ring_size(m) - 1, byte);
    fetch(m, s, found);
    if (path) NAME(update_path)(m, s, r, path);
    if (is_remembered) remember(m, s, &before, position, byte);
}
static TARGET void NAME(read_stream)(struct memory *m, struct stream *s, const struct rates *r, int64_t number, const struct block *b)
{
    struct found found;
    struct path path = {0};
    int is_found = 0;
    int64_t last = b->steps - 1;
    if (b->pending && (b->pending_used[number] < 0 || b->pending_used[number] > b->pending_size)) b->pending_used[number] = 0;
    while (last >= 0 && !(b->flags[number * b->steps + last] & REAL_STEP)) last--;
    for (int64_t t = 0; t <= last; t++) {
        const int64_t i = number * b->steps + t;
        if (!(b->flags[i] & REAL_STEP)) continue;
        if (b->flags[i] & RESET_STEP) {
            if (r->mode & LEARNS) NAME(end_document)(m, s, r, &path, &found, number, b);
            memset(s, 0, (size_t)state_size(m));
            if (r->mode & LEARNS) s->no_recent = b->pending && ++m->counters[DOCUMENTS] % 8 == 0;
            path.valid = 0;
            is_found = 0;
        }
        const int byte = b->bytes[i];
        if (!is_found) find(m, s, &found);
        const int is_sampled = b->flags[i] & SAMPLED_STEP; /* nothing is learned from it */
        const int learns = s->pending && !is_sampled;
        if (learns && (!path.valid || path.byte != byte)) NAME(predict_path)(m, s, &found, byte, &path);
        NAME(take_byte)(m, s, r, &found, learns ? &path : 0, byte, is_sampled);
        if (b->pending) {
            if (b->pending_used[number] == b->pending_size) {
                insert_document(m, b->pending + number * b->pending_size, b->pending_size, -1);
                b->pending_used[number] = 0;
            }
            b->pending[number * b->pending_size + b->pending_used[number]++] = (uint8_t)byte;
        }
        int64_t next = i + 1; /* where the next byte is, if this is not the last one */
        while (t < last && !(b->flags[next] & REAL_STEP)) next++;
        const int label = b->targets ? b->targets[i] : -1, target = label < 256 ? label : -1;
        NAME(read_network)(s, b->network ? b->network + i * b->network_width : 0, b->network_width, target,
            t == last || target != b->bytes[next] || (b->logits && t >= b->first));
        find_fetched(m, s, &found);
        is_found = 1;
        path.valid = 0;
        s->pending = 1;
        s->target = target;
        if (target >= 0) {
            NAME(predict_path)(m, s, &found, target, &path);
            NAME(write_target)(&path, i, b);
        }
        if (b->logits && t >= b->first) NAME(predict_all)(m, s, &found, b->logits + (number * (b->steps - b->first) + t - b->first) * 256);
    }
}
