"""The header and the source file around the statements of an exported learner."""

from hf_recurrent.export.c_learner_plan import FILE_VERSION, HEADER_BYTES, SAVED_MAGIC, LearnerPlan
from hf_recurrent.export.c_literals import literal
from hf_recurrent.export.c_tables import CRC32, WEIGHTS_MAGIC


def header_text(plan: LearnerPlan, work: int, table_bytes: int) -> str:
    """NAME.h.

    Args:
        plan: [`LearnerPlan`].
        work: elements of memory for intermediate results.
        table_bytes: of constants in the source file.
    """
    fields = "\n".join(f"    float {field}[{size}];" for field, size in plan.fields.values())
    first = f"    float first[{plan.num_trained}];\n" if plan.num_moments == 2 else ""
    saved, weights = 4 * plan.saved_words, 4 * plan.num_weights
    ram = saved + 4 * (plan.num_trained + work + 2)
    return f"""/*
 * A recurrent model that learns from a stream, one token after another: exact real-time recurrent learning.
 * C99. Link with -lm. Nothing is allocated, and all memory is in one struct of the caller.
 */
#ifndef NAME_LEARNER_H
#define NAME_LEARNER_H

#include <stddef.h>
#include <stdint.h>

#define NAME_VOCAB_SIZE {plan.vocab_size}
#define NAME_LEARNER_BYTES {ram} /* of RAM: struct NAME_learner */
#define NAME_TABLE_BYTES {table_bytes} /* of flash, in addition to the code */
#define NAME_WEIGHTS_FILE_SIZE {HEADER_BYTES + weights}
#define NAME_SAVED_SIZE {HEADER_BYTES + saved}

enum {{
    NAME_OK,
    NAME_BAD_INPUT, /* a token outside of the vocabulary; a damaged file, or one of another model */
    NAME_NO_CONTEXT, /* nothing was read since the beginning of the episode */
    NAME_DIVERGED /* the loss or its gradient is NaN or infinite */
}};

/* What `NAME_save` saves. */
struct NAME_saved {{
    float weights[{plan.num_weights}];
{first}    float second[{plan.num_trained}];
{fields}
    uint32_t updates; /* of the weights */
    uint32_t tokens_read;
    int32_t last; /* the last token, whose successor is unknown; -1 between episodes */
}};

struct NAME_learner {{
    struct NAME_saved saved;
    float gradient[{plan.num_trained}];
    float work[{max(work, 1)}];
    float learning_rate; /* may be changed at any time */
    float max_grad_norm; /* the same; 0 for no clipping */
}};

/* Begin with the weights in the bytes of NAME.weights. Returns NAME_OK or NAME_BAD_INPUT. */
int NAME_init(struct NAME_learner *learner, const void *file, size_t size);
/* Logits of the next token. Returns NAME_OK or NAME_NO_CONTEXT. */
int NAME_predict(struct NAME_learner *learner, float *logits);
/* Read a token and learn from it; `nats` gets its loss before, 0 at the beginning of an episode. After NAME_DIVERGED,
 * weights and state are those before the token. */
int NAME_learn(struct NAME_learner *learner, int token, float *nats);
/* Write all that was learned to NAME_SAVED_SIZE bytes. */
void NAME_save(const struct NAME_learner *learner, void *file);
/* Continue from these bytes. Returns NAME_OK, or NAME_BAD_INPUT; then the learner is unchanged. */
int NAME_load(struct NAME_learner *learner, const void *file, size_t size);

#endif
"""


def source_text(plan: LearnerPlan, definitions: list[str], update: str, learn: str, predict: str) -> str:
    """NAME.c.

    Args:
        plan: [`LearnerPlan`].
        definitions: tables and functions.
        update: the function of the optimizer.
        learn, predict: statements.
    """
    parts = ['#include "NAME.h"\n\n#include <math.h>\n#include <string.h>', *definitions, CRC32, _FILES, _forget(plan)]
    parts += [update, _update(plan), _block(learn), _interface(plan, predict), _file_interface(plan)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


_FILES = """/* The payload of a file, or null if it is not what it must be. */
static const unsigned char *NAME_payload(const void *file, size_t size, uint32_t magic, uint32_t layout,
                                         uint32_t expected) {
    const unsigned char *bytes = file;
    uint32_t header[5];
    if (!file || size != expected + sizeof header) return 0;
    memcpy(header, bytes, sizeof header);
    if (header[0] != magic || header[1] != VERSIONu || header[2] != expected || header[3] != layout) return 0;
    return NAME_crc32(bytes + sizeof header, expected) == header[4] ? bytes + sizeof header : 0;
}""".replace("VERSION", str(FILE_VERSION))


def _forget(plan: LearnerPlan) -> str:
    def clears(part: str) -> str:
        fields = [(field, size) for name, (field, size) in plan.fields.items() if name.startswith(part)]
        lines = [f"    for (int i = 0; i < {size}; i++) learner->saved.{field}[i] = 0.0f;" for field, size in fields]
        return "\n".join(lines)

    return f"""static void NAME_forget_sensitivities(struct NAME_learner *learner) {{
{clears("carried")}
}}

static void NAME_forget_state(struct NAME_learner *learner) {{
{clears("state")}
}}"""


def _update(plan: LearnerPlan) -> str:
    calls = "\n".join(
        f"    NAME_change(learner, {begin}, {end}, {literal(factor)}, (float)scale);"
        for begin, end, factor in plan.rates
    )
    return f"""/* Change the weights. After a NaN or infinite gradient, the sensitivities may have diverged. */
static int NAME_update(struct NAME_learner *learner) {{
    const double norm = NAME_norm_of(learner->gradient, {plan.num_trained});
    double scale = 1.0;
    if (!(norm < (double)INFINITY)) {{
        NAME_forget_sensitivities(learner);
        return NAME_DIVERGED;
    }}
    if (learner->max_grad_norm > 0.0f) scale = fmin(1.0, (double)learner->max_grad_norm / (norm + 1e-6));
    learner->saved.updates++;
{calls}
    return NAME_OK;
}}"""


def _indented(body: str) -> str:
    return "\n".join(f"    {line}" for line in body.splitlines())


def _block(learn: str) -> str:
    return f"""/* Forward and backward pass of one token with its successor, sensitivities, weights, state. */
static int NAME_block(struct NAME_learner *learner, int id, int label, float *nats) {{
{_indented(learn)}
    return NAME_OK;
}}"""


def _interface(plan: LearnerPlan, predict: str) -> str:
    """The functions of the header that learn and predict."""
    end = -1 if plan.setting.end is None else plan.setting.end
    return f"""int NAME_predict(struct NAME_learner *learner, float *logits) {{
    const int id = (int)learner->saved.last;
    if (id < 0) return NAME_NO_CONTEXT;
{_indented(predict)}
    return NAME_OK;
}}

int NAME_learn(struct NAME_learner *learner, int token, float *nats) {{
    *nats = 0.0f;
    if (token < 0 || token >= NAME_VOCAB_SIZE) return NAME_BAD_INPUT;
    if (learner->saved.last < 0) {{
        NAME_forget_state(learner);
        NAME_forget_sensitivities(learner);
    }} else {{
        const int outcome = NAME_block(learner, (int)learner->saved.last, token, nats);
        if (outcome != NAME_OK) return outcome;
    }}
    learner->saved.last = token == {end} ? -1 : token;
    learner->saved.tokens_read++;
    return NAME_OK;
}}"""


def _file_interface(plan: LearnerPlan) -> str:
    """The functions of the header that read and write files."""
    layout, weights, saved = f"{plan.checksum:#010x}u", 4 * plan.num_weights, 4 * plan.saved_words
    return f"""int NAME_init(struct NAME_learner *learner, const void *file, size_t size) {{
    const unsigned char *payload = NAME_payload(file, size, {WEIGHTS_MAGIC:#x}u, {layout}, {weights}u);
    if (!payload) return NAME_BAD_INPUT;
    memset(learner, 0, sizeof *learner);
    memcpy(learner->saved.weights, payload, sizeof learner->saved.weights);
    learner->saved.last = -1;
    learner->learning_rate = {literal(plan.learning_rate)};
    learner->max_grad_norm = {literal(plan.setting.max_grad_norm)};
    return NAME_OK;
}}

void NAME_save(const struct NAME_learner *learner, void *file) {{
    unsigned char *bytes = file;
    uint32_t header[5] = {{{SAVED_MAGIC:#x}u, {FILE_VERSION}u, {saved}u, {layout}, 0}};
    memcpy(bytes + sizeof header, &learner->saved, {saved});
    header[4] = NAME_crc32(bytes + sizeof header, {saved});
    memcpy(bytes, header, sizeof header);
}}

int NAME_load(struct NAME_learner *learner, const void *file, size_t size) {{
    const unsigned char *payload = NAME_payload(file, size, {SAVED_MAGIC:#x}u, {layout}, {saved}u);
    int32_t last;
    if (!payload) return NAME_BAD_INPUT;
    memcpy(&last, payload + {saved - 4}, sizeof last);
    if (last < -1 || last >= NAME_VOCAB_SIZE) return NAME_BAD_INPUT;
    memcpy(&learner->saved, payload, {saved});
    return NAME_OK;
}}"""
