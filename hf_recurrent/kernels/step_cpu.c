/* Programs of vector operations, run in one call on a CPU: one step of a recurrent network for several streams, or the
 * forward and backward pass of a block of one stream.
 *
 * With one byte and few streams a network is one pass over its weights, and a small one takes less time to compute than
 * the calls of its operations. Plain C without Python.h: bytecode.py writes the program, step_cpu.py and block_cpu.py
 * pass addresses.
 *
 * Every result is computed in the same order whatever the number of streams, so that a stream has the same bits in any
 * batch.
 */
#include "kernel.h"
#include "bytecode.h"
#include <math.h>

#define LINE 64 /* bytes of a cache line */
#define PAIR_BLOCK 32 /* bfloat16 values: 16 words of value i, and value 16 + i in the upper half */
#define NGRAM_MODULUS 2147483647 /* as in modeling/contexts/ngram_embedding.py */
#define MOST_NGRAM_ID 16777216

typedef int64_t program(
    int64_t streams, int64_t first, int64_t count, const int64_t *code, const int64_t *end, void *const *bases);
typedef double sum_of_squares(const struct parameter *parameters, int64_t count);
typedef void updater(const struct update *update, const struct parameter *parameter);
typedef int64_t tables_check(const struct blocks *blocks);
typedef void tables_updater(const struct blocks *blocks);

#define BODY "interpreter.h"
#include "versions.h"

#ifdef X86_LEVELS
#define CHOOSE(type, name) \
    static type *const name##s[2][3] = { \
        {name##_float32_base, name##_float32_avx2, name##_float32_avx512}, \
        {name##_float64_base, name##_float64_avx2, name##_float64_avx512}}; \
    type *const name = name##s[is_double][level()]
#else
#define CHOOSE(type, name) type *const name = is_double ? name##_float64_base : name##_float32_base
#endif

EXPORT int64_t hf_step_version(void) { return VERSION; }

/* Runs a program; `segments` are triples of the first word, the end, and whether a chain takes this segment row by row,
 * because it reads states that it writes. In a chain, stream t is step t of one stream. Returns an outcome; after
 * another than DONE, nothing was changed but scratch memory and outputs. */
EXPORT int64_t hf_step_run(
    int64_t is_double, int64_t streams, int64_t chain, const int64_t *code, const int64_t *segments, int64_t count,
    void *const *bases)
{
    CHOOSE(program, run);
    int64_t outcome = DONE;
    for (const int64_t *segment = segments; segment < segments + 3 * count && outcome == DONE; segment += 3) {
        if (chain && segment[2])
            for (int64_t row = 0; row < streams && outcome == DONE; row++)
                outcome = run(streams, row, 1, code + segment[0], code + segment[1], bases);
        else
            outcome = run(streams, 0, streams, code + segment[0], code + segment[1], bases);
    }
    return outcome;
}

/* The norm of all gradients together. */
EXPORT double hf_step_norm(int64_t is_double, const struct parameter *parameters, int64_t count)
{
    CHOOSE(sum_of_squares, squares);
    return sqrt(squares(parameters, count));
}

/* One step of an optimizer. */
EXPORT void hf_step_update(
    int64_t is_double, const struct update *update, const struct parameter *parameters, int64_t count)
{
    CHOOSE(updater, change);
    for (const struct parameter *parameter = parameters; parameter < parameters + count; parameter++)
        change(update, parameter);
}

/* The blocks of a program, each with the update of the weights by its gradient, clipped. Returns the outcome of the block
 * after the last that is done; an outcome of GRADIENT_NOT_FINITE has changed sensitivities and no weights. */
EXPORT int64_t hf_step_learn(
    int64_t is_double, const int64_t *code, const int64_t *segments, int64_t count, void **bases, struct blocks *blocks,
    struct update *update, const struct parameter *parameters, int64_t parameter_count)
{
    CHOOSE(tables_check, tables_are_finite);
    CHOOSE(tables_updater, change_tables);
    for (blocks->done = 0; blocks->done < blocks->count; blocks->done++) {
        const int64_t outcome = hf_step_run(is_double, 1, 0, code, segments, count, bases);
        if (outcome != DONE)
            return outcome;
        const double norm = hf_step_norm(is_double, parameters, parameter_count);
        blocks->norm = tables_are_finite(blocks) ? norm : NAN;
        if (!(blocks->norm < INFINITY))
            return GRADIENT_NOT_FINITE;
        const double scale = blocks->most_norm / (norm + 1e-6);
        update->scale = scale < 1 ? scale : 1;
        update->correction1 = blocks->corrections[blocks->done][0];
        update->correction2 = blocks->corrections[blocks->done][1];
        hf_step_update(is_double, update, parameters, parameter_count);
        change_tables(blocks);
        blocks->rows += blocks->lookups;
        blocks->steps += blocks->lookups;
        for (int64_t i = 0; i < blocks->moving; i++)
            bases[blocks->moves[i][0]] = (char *)bases[blocks->moves[i][0]] + blocks->moves[i][1];
        for (int64_t i = 0; i < blocks->swapped; i++) {
            void *const before = bases[blocks->swaps[i][0]];
            bases[blocks->swaps[i][0]] = bases[blocks->swaps[i][1]];
            bases[blocks->swaps[i][1]] = before;
        }
    }
    return DONE;
}
