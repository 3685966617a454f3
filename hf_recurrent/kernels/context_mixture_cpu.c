/* Probabilities of the next byte from the bytes that followed the same contexts before, mixed with a model's.
 *
 * A byte is eight decisions, from its highest bit to its lowest: the nodes 1 to 255 of a binary tree, where the children
 * of node n are 2 n and 2 n + 1. In each context, every node has an adaptive probability of a one. Their logits, the logit of
 * the longest match and the model's are summed with weights, which learn by gradient descent on the code length:
 * logistic mixing (Mahoney 2005, Adaptive Weighing of Context Models for Lossless Data Compression).
 *
 * All that is learned is shared by the streams, and lies in one piece of memory without pointers, so that it can be saved.
 * Plain C without Python.h; context_mixture_cpu.py passes pointers. Nothing here depends on the instruction set.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define VERSION 1 /* raise it with every change of the results */

enum { ORDERS = 6, WORD = ORDERS, WORDS, CONTEXTS };
/* Two inputs for each context, then: */
enum { MATCH = 2 * CONTEXTS, BIAS, MODEL, INPUTS };
#define NODES 256 /* node 0 is not used */
#define WAYS 4 /* lines in which a context may lie */
#define AGES 32
#define LEVELS 64 /* of logits from -8 to 8 */
#define KNOTS 33 /* of the correction, between -8 and 8 */
#define LENGTHS 64 /* of matches */
#define SITUATIONS 64 /* length of the match and number of known contexts */
#define SHORTEST 5 /* match */
#define MATCH_BITS 18
#define MOST_SEEN 30 /* decisions after which an adaptive probability forgets the oldest */
#define PROBABILITY_BITS 22
#define COUNT_MASK ((1u << (32 - PROBABILITY_BITS)) - 1)
#define LARGEST_LOGIT 12.0f

/* Four decisions after one context: probability and count of each node, in one line of the cache. */
struct line {
    uint32_t check;
    uint32_t nodes[15];
};

struct stream {
    uint32_t contexts[CONTEXTS], word, last_word;
    int64_t match; /* place of the byte that is expected */
    int32_t length, situation; /* of the match; 0 without one */
    uint8_t expected, last;
    /* Of the last prediction. */
    float inputs[INPUTS][NODES], mixed[NODES];
    int32_t refined[CONTEXTS][NODES], knots[NODES];
};

struct mixture {
    int64_t streams, line_bits, step;
    float stretch[4096];
    float refinement[CONTEXTS * AGES * LEVELS]; /* what a count and a probability of a context have meant */
    float matches[LENGTHS];
    float of_node[INPUTS][NODES], of_situation[SITUATIONS][INPUTS], of_last[256][INPUTS];
    float correction[256][NODES][KNOTS];
    uint32_t places[1 << MATCH_BITS]; /* after the last bytes with a hash */
    int64_t rest[]; /* streams, lines, history */
};

static struct stream *streams_of(struct mixture *all) { return (struct stream *)all->rest; }
static struct line *lines_of(struct mixture *all) { return (struct line *)(streams_of(all) + all->streams); }
static uint8_t *history_of(struct mixture *all) { return (uint8_t *)(lines_of(all) + (1LL << all->line_bits)); }
/* Bytes of all streams, step by step: a ring. */
#define HISTORY_BITS(line_bits) ((line_bits) + 2)
static uint8_t *byte_at(struct mixture *all, int64_t place)
{
    return history_of(all) + (place & ((1LL << HISTORY_BITS(all->line_bits)) - 1));
}

static float logistic(float x) { return 1 / (1 + expf(-x)); }
static float limited(float x, float least, float most) { return x < least ? least : x > most ? most : x; }
/* x as an index, 0 for NaN: memory may have been read from a damaged file. */
static int index_of(float x, int most) { return x > 0 ? x < most ? (int)x : most : 0; }
static float logit(const struct mixture *all, float p) { return all->stretch[index_of(p * 4096, 4095)]; }
static uint32_t scrambled(uint32_t x)
{
    x = (x ^ x >> 15) * 0x2C1B3C6Du;
    x = (x ^ x >> 12) * 0x297A2D39u;
    return x ^ x >> 15;
}

/* The line of the first four decisions in a context (nibble 0), or of the others (16 to 31); 0 if there is none. */
static struct line *found(struct mixture *all, uint32_t context, uint32_t nibble, int adds)
{
    const uint32_t hash = scrambled(context + nibble * 0x9E3779B1u), check = hash | 1;
    const uint32_t place = hash >> (32 - all->line_bits);
    struct line *lines = lines_of(all), *rarest = 0;
    for (uint32_t way = 0; way < WAYS; way++) {
        struct line *line = lines + (place ^ way);
        if (line->check == check)
            return line;
        if (!rarest || (line->nodes[0] & COUNT_MASK) < (rarest->nodes[0] & COUNT_MASK))
            rarest = line;
    }
    if (!adds)
        return 0;
    memset(rarest, 0, sizeof *rarest);
    rarest->check = check;
    return rarest;
}

/* Place in a line of the node at `depth`. */
static int place_of(int node, int depth)
{
    const int within = depth & 3;
    return (node & ((1 << within) - 1)) + (1 << within) - 1;
}

static void set_inputs(struct mixture *all, struct stream *stream, int context, int node, uint32_t seen)
{
    const int count = seen & COUNT_MASK;
    if (!count) {
        stream->inputs[2 * context][node] = stream->inputs[2 * context + 1][node] = 0;
        stream->refined[context][node] = -1;
        return;
    }
    const float x = all->stretch[seen >> 20];
    const int level = index_of((x + 8) * (LEVELS / 16), LEVELS - 1), age = count < AGES ? count : AGES - 1;
    const int place = (context * AGES + age) * LEVELS + level;
    stream->inputs[2 * context][node] = x;
    stream->inputs[2 * context + 1][node] = logit(all, all->refinement[place]);
    stream->refined[context][node] = place;
}

static void predict(struct mixture *all, struct stream *stream, const double *model, double *probabilities)
{
    int known = 0;
    stream->length &= LENGTHS - 1; /* as in `index_of` */
    stream->match &= INT64_MAX >> 8;
    all->step &= INT64_MAX >> 16;
    for (int c = 0; c < CONTEXTS; c++) {
        const struct line *first = found(all, stream->contexts[c], 0, 0), *line = first;
        known += first != 0;
        for (int node = 1; node < 16; node++)
            set_inputs(all, stream, c, node, first ? first->nodes[node - 1] : 0);
        for (int nibble = 16; nibble < 32; nibble++) {
            /* Nothing can be known after four decisions of which the last was never made. */
            const int parent = nibble >> 1;
            line = first && first->nodes[parent - 1] ? found(all, stream->contexts[c], nibble, 0) : 0;
            for (int depth = 4; depth < 8; depth++)
                for (int node = nibble << (depth - 4); node < (nibble + 1) << (depth - 4); node++)
                    set_inputs(all, stream, c, node, line ? line->nodes[place_of(node, depth)] : 0);
        }
    }
    memset(stream->inputs[MATCH], 0, sizeof stream->inputs[MATCH]);
    if (stream->length) {
        const float sure = logit(all, all->matches[stream->length]);
        for (int depth = 0; depth < 8; depth++)
            stream->inputs[MATCH][(256 | stream->expected) >> (8 - depth)] =
                stream->expected >> (7 - depth) & 1 ? sure : -sure;
    }
    /* Probabilities of the model, from the leaves of the tree to its root. */
    double sums[2 * NODES];
    memcpy(sums + NODES, model, NODES * sizeof *sums);
    for (int node = NODES - 1; node > 0; node--)
        sums[node] = sums[2 * node] + sums[2 * node + 1];
    for (int node = 1; node < NODES; node++) {
        const float ratio = (float)((sums[2 * node + 1] + 1e-9) / (sums[2 * node] + 1e-9));
        stream->inputs[MODEL][node] = limited(logf(ratio), -LARGEST_LOGIT, LARGEST_LOGIT);
        stream->inputs[BIAS][node] = 0.3f;
    }
    const int length = stream->length;
    stream->situation = known + 16 * (!length ? 0 : length < 16 ? 1 : length < 32 ? 2 : 3);
    float sum[NODES] = {0};
    for (int i = 0; i < INPUTS; i++) {
        const float weight = all->of_situation[stream->situation][i] + all->of_last[stream->last][i];
        for (int node = 0; node < NODES; node++)
            sum[node] += stream->inputs[i][node] * (weight + all->of_node[i][node]);
    }
    double total[2 * NODES];
    total[1] = 1;
    for (int node = 1; node < NODES; node++) {
        const float x = limited(sum[node], -LARGEST_LOGIT, LARGEST_LOGIT);
        const float p = stream->mixed[node] = logistic(x);
        /* The mean of p and of what p has meant after the last byte. */
        const float at = limited((x + 8) * ((KNOTS - 1) / 16.0f), 0, KNOTS - 1);
        const int knot = index_of(at, KNOTS - 2);
        const float *corrected = all->correction[stream->last][node] + knot, part = at - knot;
        stream->knots[node] = knot + (part > 0.5f);
        const double one = limited(0.5f * (p + corrected[0] + part * (corrected[1] - corrected[0])), 1e-5f, 1 - 1e-5f);
        total[2 * node] = total[node] * (1 - one);
        total[2 * node + 1] = total[node] * one;
    }
    memcpy(probabilities, total + NODES, NODES * sizeof *total);
}

static void learn(struct mixture *all, struct stream *stream, int byte)
{
    const float rate = 0.001f + 0.01f / (1 + all->step / 256.0f);
    for (int depth = 0; depth < 8; depth++) {
        const int node = (256 | byte) >> (8 - depth), bit = byte >> (7 - depth) & 1;
        const float error = bit - stream->mixed[node];
        for (int i = 0; i < INPUTS; i++) {
            const float change = rate * error * stream->inputs[i][node];
            all->of_node[i][node] += change;
            all->of_situation[stream->situation][i] += change;
            all->of_last[stream->last][i] += change;
        }
        float *corrected = &all->correction[stream->last][node][stream->knots[node]];
        *corrected += 0.02f * (bit - *corrected);
        if (stream->length && (256 | stream->expected) >> (8 - depth) == node) {
            float *right = &all->matches[stream->length];
            const int is_right = (stream->expected >> (7 - depth) & 1) == bit;
            *right = limited(*right + 0.005f * (is_right - *right), 1e-4f, 1 - 1e-4f);
        }
        for (int c = 0; c < CONTEXTS; c++)
            if (stream->refined[c][node] >= 0) {
                float *refined = &all->refinement[stream->refined[c][node]];
                *refined = limited(*refined + 0.01f * (bit - *refined), 2e-4f, 1 - 2e-4f);
            }
    }
    for (int c = 0; c < CONTEXTS; c++) {
        struct line *line = 0;
        for (int depth = 0; depth < 8; depth++) {
            if (depth % 4 == 0)
                line = found(all, stream->contexts[c], depth ? (256 | byte) >> 4 : 0, 1);
            const int node = (256 | byte) >> (8 - depth), bit = byte >> (7 - depth) & 1;
            uint32_t *seen = line->nodes + place_of(node, depth);
            const uint32_t most = (1u << PROBABILITY_BITS) - 1, count = *seen & COUNT_MASK;
            const float before = count ? (float)(*seen >> (32 - PROBABILITY_BITS)) / most : 0.5f;
            const float after = before + (bit - before) / (count + 1.5f);
            *seen = (uint32_t)(after * most) << (32 - PROBABILITY_BITS) | (count < MOST_SEEN ? count + 1 : count);
        }
    }
}

static int is_letter(int byte) { return ((byte | 32) >= 'a' && (byte | 32) <= 'z') || byte >= 128; }

/* Append a byte at `place`, and find contexts and match for the next one. */
static void append(struct mixture *all, struct stream *stream, int byte, int64_t place)
{
    *byte_at(all, place) = byte;
    stream->last = byte;
    if (is_letter(byte)) {
        stream->word = scrambled(stream->word + (byte | 32) + 1);
    } else {
        if (stream->word)
            stream->last_word = stream->word;
        stream->word = 0;
    }
    uint32_t hash = 0;
    for (int64_t order = 1; order <= ORDERS; order++) {
        const int64_t at = place - (order - 1) * all->streams;
        hash = scrambled(hash + (at < 0 ? 0 : *byte_at(all, at)) + 1);
        stream->contexts[order - 1] = hash + order;
    }
    stream->contexts[WORD] = scrambled(stream->word + ORDERS + 1) + byte;
    stream->contexts[WORDS] = scrambled(stream->word * 0x9E3779B1u + stream->last_word);
    if (stream->length && stream->expected == byte) {
        stream->length += stream->length < LENGTHS - 1;
        stream->match += all->streams;
    } else {
        stream->length = 0;
    }
    uint32_t *const next = all->places + (hash >> (32 - MATCH_BITS));
    if (!stream->length && *next) {
        const int64_t distance = all->streams;
        int64_t length = 0;
        while (length < LENGTHS / 2 && *next >= (length + 1) * distance && place >= length * distance
               && *byte_at(all, *next - (length + 1) * distance) == *byte_at(all, place - length * distance))
            length++;
        if (length >= SHORTEST) {
            stream->length = (int32_t)length;
            stream->match = *next;
        }
    }
    *next = (uint32_t)(place + all->streams);
    if (stream->length)
        stream->expected = *byte_at(all, stream->match);
}

EXPORT int64_t hf_context_mixture_version(void) { return VERSION; }

EXPORT int64_t hf_context_mixture_size(int64_t streams, int64_t line_bits)
{
    return sizeof(struct mixture) + streams * sizeof(struct stream) + (sizeof(struct line) << line_bits)
           + (1LL << HISTORY_BITS(line_bits));
}

/* `all` is filled with zeros. */
EXPORT void hf_context_mixture_begin(struct mixture *all, int64_t streams, int64_t line_bits)
{
    all->streams = streams;
    all->line_bits = line_bits;
    for (int i = 0; i < 4096; i++)
        all->stretch[i] = logf((i + 0.5f) / (4095.5f - i));
    for (int i = 0; i < CONTEXTS * AGES * LEVELS; i++)
        all->refinement[i] = logistic((i % LEVELS + 0.5f) * (16.0f / LEVELS) - 8);
    for (int i = 0; i < LENGTHS; i++)
        all->matches[i] = logistic(0.5f + 0.1f * i);
    for (int s = 0; s < SITUATIONS; s++)
        for (int i = 0; i < INPUTS; i++)
            all->of_situation[s][i] = i < MATCH ? 0.15f : i == MODEL ? 0.5f : i == MATCH ? 0.3f : 0;
    for (int last = 0; last < 256; last++)
        for (int node = 0; node < NODES; node++)
            for (int knot = 0; knot < KNOTS; knot++)
                all->correction[last][node][knot] = logistic(knot * (16.0f / (KNOTS - 1)) - 8);
}

/* From probabilities of the model to mixed ones, (streams, 256) each. */
EXPORT void hf_context_mixture_predict(struct mixture *all, const double *model, double *probabilities)
{
    for (int64_t s = 0; s < all->streams; s++)
        predict(all, streams_of(all) + s, model + s * NODES, probabilities + s * NODES);
}

/* The next byte of every stream, after a prediction. */
EXPORT void hf_context_mixture_read(struct mixture *all, const uint8_t *bytes)
{
    for (int64_t s = 0; s < all->streams; s++)
        learn(all, streams_of(all) + s, bytes[s]);
    for (int64_t s = 0; s < all->streams; s++)
        append(all, streams_of(all) + s, bytes[s], all->step * all->streams + s);
    all->step++;
}
