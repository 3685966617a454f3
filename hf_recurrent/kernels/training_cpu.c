/* The parts of a training step on a CPU: matrix products, and everything between them in one pass over memory each,
 * forward and backward.
 *
 * Plain C without Python.h: training_cpu.py checks the tensors and passes pointers. Threads claim parts, and no result
 * depends on their number.
 */
#include "kernel.h"
#include "thread_pool.h"
#include <math.h>

#define VERSION 8 /* of the structs; raise it with every change */
#define CHUNK 64  /* rows whose sums over rows are added up in order */

/* Pointers are integers; strides count elements. Rows and columns of other tensors are neighbours in memory. */
struct product { /* to (rows, width) = a · b, or with `add` += */
    int64_t rows, depth, width, a, a_row, a_depth, b, b_depth, b_column, to, to_row, add;
    int64_t packed, packs; /* memory for b as panels, or 0 with a transposed a; whether this product fills it */
    int64_t continues;     /* `to` is the same as in the product before, with the same rows */
    int64_t shares;        /* without packed panels: b is that of the product before, and none of the two continues one */
    int64_t plus;          /* with a packed b: 0, or a matrix like `to` that is added after the last step of the sums */
};

struct products {
    int64_t threads, count;
    int64_t rounds; /* elements are rounded to bfloat16; where hf_training_has_bf16 */
    struct product list[];
};

struct gated_norm {
    int64_t threads, rows, width;
    double eps;
    int64_t gate, value, to, moments; /* (rows, 6): mean and 1 / standard deviation of gate, value, product; `to` may be 0
                                         in the backward pass */
    int64_t grad, grad_gate, grad_value;
};

struct gate_coefficients {
    int64_t threads, rows, width, rates; /* rows of `rate`: 1, or as many as of the gates */
    int64_t sigmoid_gate;                /* the input gate is σ(input_gate) */
    int64_t recurrence_gate, rate, input_gate, inputs, decay, scaled;
    int64_t grad_decay, grad_scaled, grad_recurrence_gate, grad_input_gate, grad_inputs;
    int64_t grad_rate; /* (chunks, S), or with a rate for each row (rows, S) */
};

struct rms_norm {
    int64_t threads, rows, width;
    double eps;
    /* backward: `to` is the gradient of x, plus `plus` where it is not 0; `grad_weight`: (chunks, width) */
    int64_t x, weight, to, scales, grad, grad_weight, plus, normed; /* `normed`: 0, or the output once more */
};

struct temporal_convolution { /* `lags`: weights of a channel; `resets`: bytes, or 0 */
    int64_t threads, rows, width, steps, lags;
    int64_t inputs, taps, weight, resets, to, last; /* `last`: 0, or memory for a stream's last inputs, at most lags - 1 */
    int64_t grad, grad_inputs, grad_taps, grad_weight, grad_last; /* `grad_weight`: (chunks, lags, width); `grad_last`: or 0 */
};

/* h_t = r ∘ h_{t-1} + γ ∘ input_gate ∘ inputs; a row is a step, `steps` rows a stream. `sigmoid_gate` as above. */
struct gated_recurrence {
    int64_t rows, width, steps, sigmoid_gate;
    int64_t recurrence_gate, rate, input_gate, inputs, initial, resets, states, last; /* `resets`: bytes, or 0 */
    int64_t grad_states, grad_last, grad_initial, grad_recurrence_gate, grad_input_gate, grad_inputs; /* `grad_last`: or 0 */
    int64_t log_decays, grad_rate; /* memory for a number of each state; (chunks, width) */
};

/* Passes over rows, one after another on CHUNK rows; a part is `part_rows` rows, whole streams. */
enum pass {
    PRODUCT, RMS_NORM, RMS_NORM_BACKWARD, GATED_NORM, GATED_NORM_BACKWARD, GATED_RECURRENCE, GATED_RECURRENCE_BACKWARD,
    GATED_GELU, GATED_GELU_BACKWARD, TEMPORAL_CONVOLUTION, TEMPORAL_CONVOLUTION_BACKWARD
};

struct stage {
    int64_t pass, argument; /* its struct, in bytes after the chain's beginning; a product is one of `products` */
};

/* A pointer in a struct, to memory of a thread for the rows of a tile: `word` of the chain, bytes of a row, place in it. */
struct local {
    int64_t word, row_bytes, at;
};

/* A matrix that the first pass over its rows finds in memory. */
struct given {
    int64_t from, row_bytes;
};

struct chain {
    int64_t threads, rows, part_rows, descends, rounds; /* in order of the rows, or backwards; as in struct products */
    int64_t products, locals; /* all products of the chain, and its locals, in bytes after its beginning */
    int64_t local_count, words; /* of the whole chain */
    int64_t given, given_count; /* in bytes after its beginning, as `locals` */
    int64_t memory, thread_bytes; /* for each thread: a copy of the chain, then its rows */
    int64_t count;
    struct stage stages[];
};

struct running_chain {
    const struct chain *chain;
    uint64_t taken; /* a bit for each thread's memory */
};

/* -log softmax(logits)[target], and its gradient; targets outside of the columns cost nothing. */
struct cross_entropy {
    int64_t threads, rows, width;
    int64_t logits, targets, nats, grad, kept, grad_logits; /* of each row: int64, two numbers; in `kept` its maximum, and
                                                              1 / sum of the exponentials */
};

struct table {
    int64_t threads, rows, width, group; /* rows: outputs, lookups, or rows with a gradient; `group` lookups for each output */
    double rate, eps;
    /* int64: lookups, order, ranks, found, addresses (of rows of gradients, in place of `grad`) */
    int64_t table, lookups, order, ranks, values, grad, found, sums, addresses;
};

/* Panels that a thread packs for itself. */
static _Thread_local char own_panels[16 * 256 * 128] __attribute__((aligned(64)));

#define BODY "training_body.h"
#include "versions.h"

static int chosen_level = -1;

static int level_in_use(void) { return chosen_level < 0 ? level() : chosen_level; }

/* A table of the versions of `name`, by type and level. */
#ifdef X86_LEVELS
#define VERSIONS(name) \
    {{name##_float32_base, name##_float32_avx2, name##_float32_avx512}, \
     {name##_float64_base, name##_float64_avx2, name##_float64_avx512}}
#define LEVELS 3
#else
#define VERSIONS(name) {{name##_float32_base}, {name##_float64_base}}
#define LEVELS 1
#endif

EXPORT int64_t hf_training_version(void) { return VERSION; }

EXPORT_USE_POOL(training)

/* As hf_scan_instruction_level. */
EXPORT int hf_training_instruction_level(int limit)
{
    if (limit >= 0)
        chosen_level = limit < level() ? limit : level();
    return level_in_use();
}

/* True where the processor multiplies bfloat16 numbers. */
EXPORT int hf_training_has_bf16(void)
{
#ifdef X86_LEVELS
    __builtin_cpu_init();
    return level_in_use() == 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
}

/* True where that is faster than in float32. Intel's processors take one such product of vectors in two cycles, but four in
 * float32: 87 and 180 GFLOP/s (Emerald Rapids). */
EXPORT int hf_training_has_fast_bf16(void)
{
#ifdef X86_LEVELS
    return hf_training_has_bf16() && !__builtin_cpu_is("intel");
#else
    return 0;
#endif
}

#define EXPORT_PRODUCTS(name, type, number) \
    EXPORT void hf_##name##_##type(const struct products *all) \
    { \
        static void (*const versions[2][LEVELS])(const struct products *) = VERSIONS(name); \
        versions[number][level_in_use()](all); \
    }
EXPORT_PRODUCTS(products, float32, 0)
EXPORT_PRODUCTS(products, float64, 1)
EXPORT_PRODUCTS(few_products, float32, 0)
EXPORT_PRODUCTS(few_products, float64, 1)

#define EXPORT_CHAIN(type, number) \
    EXPORT void hf_chain_##type(const struct chain *chain) \
    { \
        static void (*const versions[2][LEVELS])(const struct chain *) = VERSIONS(chain); \
        versions[number][level_in_use()](chain); \
    }
EXPORT_CHAIN(float32, 0)
EXPORT_CHAIN(float64, 1)

/* A part is CHUNK rows. */
#define EXPORT_PASS(name, structure, type, number) \
    static void name##_part_##type(const void *argument, int64_t part) \
    { \
        static void (*const versions[2][LEVELS])(const struct structure *, int64_t, int64_t) = VERSIONS(name); \
        const struct structure *one = argument; \
        const int64_t end = (part + 1) * CHUNK; \
        versions[number][level_in_use()](one, part * CHUNK, end < one->rows ? end : one->rows); \
    } \
    EXPORT void hf_##name##_##type(const struct structure *one) \
    { \
        struct call call = { \
            .run = name##_part_##type, .argument = one, .parts = (one->rows + CHUNK - 1) / CHUNK}; \
        share(&call, one->threads); \
    }
#define EXPORT_PASSES(name, structure) \
    EXPORT_PASS(name, structure, float32, 0) \
    EXPORT_PASS(name, structure, float64, 1)

EXPORT_PASSES(gated_norm, gated_norm)
EXPORT_PASSES(gated_norm_backward, gated_norm)
EXPORT_PASSES(gated_gelu, gated_norm)
EXPORT_PASSES(gated_gelu_backward, gated_norm)
EXPORT_PASSES(gate_coefficients, gate_coefficients)
EXPORT_PASSES(gate_coefficients_backward, gate_coefficients)
EXPORT_PASSES(rms_norm, rms_norm)
EXPORT_PASSES(rms_norm_backward, rms_norm)
EXPORT_PASSES(temporal_convolution, temporal_convolution)
EXPORT_PASSES(temporal_convolution_backward, temporal_convolution)
EXPORT_PASSES(cross_entropy, cross_entropy)
EXPORT_PASSES(cross_entropy_backward, cross_entropy)
EXPORT_PASSES(table_sum, table)
EXPORT_PASSES(table_gradient, table)
EXPORT_PASSES(table_adagrad, table)

#define DIGIT 11 /* bits of a pass over the numbers */

/* Sort `rows` lookups into `found`, equal ones in their order: their places go to `order`, and to `ranks` how many smaller
 * numbers there are. `values` is memory for two more columns. Returns how many differ. */
EXPORT int64_t hf_table_order(const struct table *one)
{
    const int64_t rows = one->rows;
    int64_t *numbers[2] = {(int64_t *)one->found, (int64_t *)one->values}, *ranks = (int64_t *)one->ranks;
    int64_t *places[2] = {(int64_t *)one->order, (int64_t *)one->values + rows};
    const int64_t *number = (const int64_t *)one->lookups, *place = NULL;
    uint64_t bits = 1;
    for (int64_t i = 0; i < rows; i++)
        bits |= (uint64_t)number[i];
    int left = 0; /* passes, of which the last one ends in `found` */
    for (; bits; bits >>= DIGIT)
        left++;
    for (int shift = 0; left-- > 0; shift += DIGIT) {
        int64_t begins[1 << DIGIT] = {0}, sum = 0, *to = numbers[left % 2], *to_place = places[left % 2];
#define DIGIT_OF(number) ((uint64_t)(number) >> shift & ((1 << DIGIT) - 1))
        for (int64_t i = 0; i < rows; i++)
            begins[DIGIT_OF(number[i])]++;
        for (int digit = 0; digit < 1 << DIGIT; digit++) {
            const int64_t count = begins[digit];
            begins[digit] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = begins[DIGIT_OF(number[i])]++;
            to[at] = number[i];
            to_place[at] = place ? place[i] : i;
        }
        number = to, place = to_place;
    }
    for (int64_t i = 0; i < rows; i++)
        ranks[i] = i ? ranks[i - 1] + (number[i] != number[i - 1]) : 0;
    return rows ? ranks[rows - 1] + 1 : 0;
}
