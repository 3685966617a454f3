/* The bytecode of a program: what bytecode.py writes and the interpreter reads. Raise VERSION with every change.
 *
 * An instruction is its opcode, the number of its 64-bit words, and the fields of its struct.
 */
#include <stdint.h>

#define VERSION 8
/* From MATMUL on: of a block of one stream, with its backward pass. */
enum opcode {
    LINEAR, NORM, EMBEDDING, COPY, GATHER, MAP, REDUCE, SOFTMAX, ATTENTION, PRODUCT, QUANTIZE, UNCHANGED, TOKEN,
    NGRAMS,
    MATMUL, BROADCAST, SCAN, SCAN_BACKWARD, NORM_BACKWARD, NLL_LOSS, NLL_LOSS_BACKWARD, LOOKUP, LOOKUP_BACKWARD,
    SENSITIVITIES, FINITE
};
enum weights { SAME_TYPE, BFLOAT16, INT8 };
enum reduction { SUM, MEAN, MAXIMUM, MINIMUM };
/* CHANGED: a weight is not what the program was made from. */
enum outcome { DONE, CHANGED, NOT_FINITE, GRADIENT_NOT_FINITE };

/* A row of elements for each stream: bases[base] + scaled · streams + offset + stream · stride. */
struct operand {
    int64_t base, scaled, offset, stride;
};

/* The fields of instructions; an absent operand has base -1. */
struct linear { /* to = weight (width, depth) · x + bias, for `count` rows of each stream */
    int64_t count, width, depth, pitch, type;
    struct operand weight, scale, bias, x, x_scale, to;
};
struct norm { /* `count` rows of each stream */
    int64_t count, width, center;
    double eps;
    struct operand x, weight, bias, to;
};
struct embedding {
    int64_t width, pitch, type;
    struct operand table, scale, ids, to;
};
struct copy {
    int64_t width;
    struct operand x, to;
};
struct gather { /* to[to_index[i]] = x[index[i]]; without `to_index`, to[i]; `run` elements at each offset */
    int64_t width, run;
    struct operand index, to_index, x, to;
};
struct element_function { /* an element-wise function; operands below `operands` are in memory, the others temporary */
    int64_t function, to, a, b, c;
    double scalar;
};
struct map {
    int64_t width, operands, functions;
    /* struct operand [operands], struct element_function [functions] */
};
struct reduce { /* (outer, count, inner) → (outer, inner) */
    int64_t outer, count, inner, kind;
    struct operand x, to;
};
struct softmax {
    int64_t rows, width;
    struct operand x, to;
};
struct attention { /* q (heads, queries, width), k and v (heads, keys, width) */
    int64_t heads, queries, keys, width, causal;
    double scale;
    struct operand q, k, v, mask, scores, to;
};
struct product { /* (matrices, rows, depth) · (matrices, depth, width) */
    int64_t matrices, rows, depth, width;
    struct operand a, b, to;
};
struct quantize { /* int16 values with a scale for each of `count` rows */
    int64_t count, width;
    struct operand x, to, scale;
};
struct unchanged {
    int64_t bytes;
    struct operand a, b;
};

struct token { /* the id as an element */
    struct operand ids, to;
};
/* Rows of a table (orders · rows, width) at the hashes of the last bytes: `steps` windows of `length` ids + 1, newest
 * last, 0 for none; see modeling/contexts/ngram_embedding.py. */
struct ngrams {
    int64_t width, pitch, type, steps, orders, rows, length;
    struct operand table, scale, factors, lengths, windows, to;
};

/* ---- Of blocks ---- */

struct matmul { /* to (rows, width) = a · b; a[r, k] = a[r a_row + k a_depth], b[k, i] = b[k b_depth + i b_width] */
    int64_t rows, depth, width, a_row, a_depth, b_depth, b_width;
    struct operand a, b, to, packed; /* `packed`, where b_width is not 1: memory for b with its rows padded */
};
struct broadcast { /* (outer, inner) → (outer, count, inner) */
    int64_t outer, count, inner;
    struct operand x, to;
};
struct scan { /* h_t = a_t h_{t-1} + b_t, (steps, width); imaginary parts follow the real ones in `to` */
    int64_t steps, width;
    struct operand a, b, state, a_imag, b_imag, state_imag, reset, to;
};
struct scan_backward { /* to: gradients of a, b (steps, width) and the state (width), each with its imaginary part */
    int64_t steps, width;
    struct operand a, h, state, grad_h, grad_final;
    struct operand a_imag, h_imag, state_imag, grad_h_imag, grad_final_imag, reset, to;
};
struct norm_backward { /* of a LayerNorm without weights */
    int64_t count, width;
    double eps;
    struct operand x, grad, to;
};
struct nll_loss { /* to[t] = -x[t, label[t]]; backward: to[t, label[t]] = -grad[t], zero elsewhere; none if label < 0 */
    int64_t steps, width, one_grad;
    struct operand x, labels, to; /* x: the gradient, in the backward pass */
};
struct lookup { /* to[t] = table[id[t]]; backward: to[id[t]] += x[t], zero elsewhere */
    int64_t steps, height, width;
    struct operand x, ids, to;
};
struct sensitivities { /* see hf_recurrent/learning_rules/sensitivities.py */
    int64_t steps, channels, rows, groups, columns;
    struct operand carried;    /* S (C, rows, G, I), in place: S <- J S + sum_t e_t x_t^T */
    struct operand transition; /* J (C, C, G) */
    struct operand of_rows;    /* e (T, C, rows, G) */
    struct operand inputs;     /* x (T, I); absent for a vector, whose I is 1 */
    struct operand grad_state; /* d (C, G), absent without a gradient */
    struct operand gradient;   /* (rows, G, I); absent if it is a b^T */
    struct operand a, b;       /* (rows · G), (I) */
    struct operand to;         /* gradient + sum_C d S, of the old S */
};
struct finite {
    struct operand x;
};

/* Of a map, element by element. */
enum function {
    F_COPY, F_SPLAT, F_SET, F_ADD, F_SUB, F_MUL, F_DIV, F_MAX, F_MIN, F_ADD_SCALAR, F_MUL_SCALAR, F_RSUB_SCALAR,
    F_AT_LEAST, F_AT_MOST, F_NEG, F_ABS, F_SQRT, F_RSQRT, F_RECIPROCAL, F_EXP, F_EXPM1, F_LOG, F_LOG1P, F_SIGMOID,
    F_TANH, F_GELU, F_SOFTPLUS, F_SIN, F_COS, F_ERF, F_POW, F_FLOOR, F_ROUND, F_MUL_ADD, F_WHERE, F_EQ, F_LT, F_LE
};

/* ---- The update of the weights ---- */

/* One parameter of an update. Pointers are integers. Without `rows`, the gradient has `count` elements; with it, the
 * gradient is rows columns^T, and `columns` has `width` elements. */
struct parameter {
    int64_t weights, first, second, gradient, count, rows, columns, width;
    double learning_rate;
};
struct update {
    int64_t kind; /* 0: AdamW, 1: RMSProp */
    double scale; /* of all gradients */
    double beta1, beta2, eps, correction1, correction2; /* RMSProp: beta2 is alpha */
};
struct trained_table { /* rows of `width` elements, with a sum each: row-wise Adagrad */
    int64_t table, row_sums, width, gradient; /* of the sums of rows: (steps, width) */
    double rate, eps;
};
struct blocks { /* blocks of one stream, one after another, with an update after each */
    int64_t count, moving, swapped, tables; /* of blocks; of the arrays */
    const int64_t (*moves)[2]; /* a base that moves with each block, and bytes */
    const int64_t (*swaps)[2]; /* two bases that change places after each block: a state before and after it */
    const double (*corrections)[2]; /* of each update */
    const struct trained_table *trained_tables;
    const int64_t *rows, *steps; /* that a block reads from each table, ascending, and the steps that read them */
    int64_t lookups, step_count; /* of a block */
    double most_norm; /* of a gradient that is not clipped */
    double norm; /* of the last gradient */
    int64_t done; /* blocks with their updates */
};
