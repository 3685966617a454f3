"""The functions of an exported learner that its user calls, for tokens and for vectors."""

import re
from textwrap import indent

from hf_recurrent.export.c_learner_counts import BEGINS_BYTES, CountPlan
from hf_recurrent.export.c_learner_text import Interface
from hf_recurrent.online.vector_learner import LARGEST_VALUE, SMALLEST_ERROR


def token_interface(vocab_size: int, end: int | None, predict: str, counts: CountPlan | None) -> Interface:
    """The interface of a learner of tokens, whose statements `predict` compute `logits` from `id`."""
    texts = {"PREDICT": indent(predict, "    "), "END": str(-1 if end is None else end)}
    texts |= dict.fromkeys(_COUNTED, "") if counts is None else _COUNTED
    functions = re.sub(r"\b([A-Z]{3,})\b", lambda match: texts.get(match[1], match[1]), _TOKENS)
    functions = re.sub(r"\n\n(?=    [^ ]|        const int outcome|    \})", "\n", functions)
    return Interface(
        title="A recurrent model that learns from a stream, one token after another",
        macros=f"#define NAME_VOCAB_SIZE {vocab_size}",
        outcomes=("a token outside of the vocabulary", "nothing was read since the beginning of the episode"),
        saved="""    uint32_t updates; /* of the weights */
    uint32_t tokens_read;
    int32_t last; /* the last token, whose successor is unknown; -1 between episodes */""",
        memory=("", 0),
        declarations="""/* Logits of the next token. Returns NAME_OK or NAME_NO_CONTEXT. */
int NAME_predict(struct NAME_learner *learner, float *logits);
/* Read a token and learn from it; `nats` gets its loss before, 0 at the beginning of an episode. After NAME_DIVERGED,
 * weights and state are those before the token. */
int NAME_learn(struct NAME_learner *learner, int token, float *nats);""",
        functions=functions,
        block="int id, int label, float *nats",
        begin="learner->saved.last = -1;",
        start="learner->saved.last = -1;",
        allowed="last >= -1 && last < NAME_VOCAB_SIZE",
        loaded="" if counts is None else _LOADED.replace("BEGIN", str(counts.size - BEGINS_BYTES)),
    )


_COUNTED = {
    "MIX": "    NAME_mix(learner, id, logits);",
    "BEFORE": "        NAME_network(learner, (int)learner->saved.last, learner->network);",
    "AFTER": "        NAME_count(learner, (int)learner->saved.last, token, learner->network, nats, 0);",
    "BEGINS": "        NAME_begin_episode(learner);",
}
_LOADED = """    /* As Python saves it. */
    if (((unsigned char *)learner->saved.counts)[BEGIN]) NAME_begin_episode(learner);
"""
_TOKENS = """/* The network's logits of the token after `id`. */
static void NAME_network(struct NAME_learner *learner, int id, float *logits) {
PREDICT
}

int NAME_predict(struct NAME_learner *learner, float *logits) {
    const int id = (int)learner->saved.last;
    if (id < 0) return NAME_NO_CONTEXT;
    NAME_network(learner, id, logits);
MIX
    return NAME_OK;
}

int NAME_learn(struct NAME_learner *learner, int token, float *nats) {
    *nats = 0.0f;
    if (token < 0 || token >= NAME_VOCAB_SIZE) return NAME_BAD_INPUT;
    if (learner->saved.last < 0) {
        NAME_forget_state(learner);
        NAME_forget_sensitivities(learner);
BEGINS
    } else {
BEFORE
        const int outcome = NAME_block(learner, (int)learner->saved.last, token, nats);
        if (outcome != NAME_OK) return outcome;
AFTER
    }
    learner->saved.last = token == END ? -1 : token;
    learner->saved.tokens_read++;
    return NAME_OK;
}"""


def vector_interface(size: int, window: int, predict: str, targets: int | None = None) -> Interface:
    """The interface of a learner of vectors.

    Args:
        size: values of a vector.
        window: vectors that the running means look back on.
        predict: statements that compute `values`, the next scaled vector or the scaled target, from `input`.
        targets: values of a target; None to learn to predict the next vector.
    """
    if targets is None:
        fields, count = dict.fromkeys(("mean", "variance", "input", "target", "error"), size), "NAME_INPUTS"
        title, macros = "a series of measurements", f"#define NAME_INPUTS {size}"
        no_context = "nothing was read since the beginning of the series"
        known = "1 if `last` is a vector whose successor is unknown; 0 between series"
        declarations, functions = _DECLARED_VECTORS, _VECTORS
    else:
        fields, count = dict.fromkeys(("mean", "variance", "input"), size), "NAME_TARGETS"
        fields |= dict.fromkeys(("target_mean", "target_variance", "target", "error"), targets)
        title = "a target from each vector and all before"
        macros = f"#define NAME_INPUTS {size}\n#define NAME_TARGETS {targets}"
        no_context, known = "not returned by this learner", "0 between series"
        declarations, functions = _DECLARED_TARGETS, _TARGETS
    texts = {"PREDICT": indent(predict, "    "), "LARGEST": f"{LARGEST_VALUE!r}f"}
    texts |= {"SMALLEST": f"{SMALLEST_ERROR!r}f", "WINDOW": f"{float(window)!r}f"}
    return Interface(
        title=f"A recurrent model that learns to predict {title}",
        macros=macros,
        outcomes=("a value that is not finite, or larger than 1e15", no_context),
        saved=f"""    uint32_t updates; /* of the weights */
    uint32_t vectors_read;
    int32_t last_known; /* {known} */""",
        memory=("".join(f"    float {field}[{width}];\n" for field, width in fields.items()), sum(fields.values())),
        declarations=declarations,
        functions=re.sub("|".join(texts), lambda match: texts[match[0]], functions),
        block="const float *input, const float *target",
        begin="learner->saved.last_known = 0;",
        start=f"for (int i = 0; i < {count}; i++) learner->saved.errors[i] = 1.0f;",
        allowed="last == 0 || last == 1",
    )


_DECLARED_VECTORS = """/* The next vector. Returns NAME_OK or NAME_NO_CONTEXT. */
int NAME_predict(struct NAME_learner *learner, float *values);
/* Read a vector and learn from it; `score` gets the squared error of its prediction over the usual one: about 1 if it
 * was expected, more for anomalies, 0 for the first vector of a series. After NAME_BAD_INPUT and NAME_DIVERGED,
 * weights and state are as before the vector. */
int NAME_learn(struct NAME_learner *learner, const float *values, float *score);"""
_DECLARED_TARGETS = """/* The target of a vector; nothing changes. Returns NAME_OK or NAME_BAD_INPUT. */
int NAME_predict(struct NAME_learner *learner, const float *values, float *target);
/* Read a vector and learn its target; `score` gets the squared error of its prediction over the usual one, about 1.
 * After NAME_BAD_INPUT and NAME_DIVERGED, weights and state are as before the vector. */
int NAME_learn(struct NAME_learner *learner, const float *values, const float *target, float *score);"""
_SCALING = """/* Factor of a running mean over `seen` values. */
static float NAME_rate(uint32_t seen) {
    return fmaxf(1.0f / ((float)seen + 1.0f), 1.0f / WINDOW);
}

static void NAME_scaled(const float *values, const float *mean, const float *variance, float *scaled,
                        int size) {
    for (int i = 0; i < size; i++) {
        scaled[i] = (values[i] - mean[i]) / (variance[i] > 0.0f ? sqrtf(variance[i]) : 1.0f);
    }
}"""
_VECTORS = f"""{_SCALING}

int NAME_predict(struct NAME_learner *learner, float *values) {{
    const struct NAME_saved *saved = &learner->saved;
    const float *input = learner->input;
    if (!saved->last_known) return NAME_NO_CONTEXT;
    NAME_scaled(saved->last, saved->mean, saved->variance, learner->input, NAME_INPUTS);
PREDICT
    for (int i = 0; i < NAME_INPUTS; i++) {{
        values[i] = saved->mean[i] + (saved->variance[i] > 0.0f ? sqrtf(saved->variance[i]) : 1.0f) * values[i];
    }}
    return NAME_OK;
}}

int NAME_learn(struct NAME_learner *learner, const float *values, float *score) {{
    struct NAME_saved *saved = &learner->saved;
    const float rate = NAME_rate(saved->vectors_read);
    *score = 0.0f;
    for (int i = 0; i < NAME_INPUTS; i++) {{
        const float change = values[i] - saved->mean[i];
        if (!(fabsf(values[i]) <= LARGEST)) return NAME_BAD_INPUT;
        learner->mean[i] = saved->mean[i] + rate * change;
        learner->variance[i] = (1.0f - rate) * (saved->variance[i] + rate * change * change);
    }}
    if (!saved->last_known) {{
        NAME_forget_state(learner);
        NAME_forget_sensitivities(learner);
    }} else {{
        NAME_scaled(saved->last, learner->mean, learner->variance, learner->input, NAME_INPUTS);
        NAME_scaled(values, learner->mean, learner->variance, learner->target, NAME_INPUTS);
        const int outcome = NAME_block(learner, learner->input, learner->target);
        if (outcome != NAME_OK) return outcome;
        const float of_errors = NAME_rate(saved->updates);
        for (int i = 0; i < NAME_INPUTS; i++) {{
            const float square = learner->error[i] * learner->error[i];
            *score += square / (saved->errors[i] + SMALLEST) / (float)NAME_INPUTS;
            saved->errors[i] += of_errors * (square - saved->errors[i]);
        }}
    }}
    memcpy(saved->mean, learner->mean, sizeof saved->mean);
    memcpy(saved->variance, learner->variance, sizeof saved->variance);
    memcpy(saved->last, values, sizeof saved->last);
    saved->last_known = 1;
    if (saved->vectors_read < UINT32_MAX) saved->vectors_read++;
    return NAME_OK;
}}"""
_TARGETS = f"""{_SCALING}

/* Running mean and variance with these values too; 0 if one of them is not allowed. */
static int NAME_scales(const float *values, const float *mean, const float *variance, float rate, float *new_mean,
                       float *new_variance, int size) {{
    for (int i = 0; i < size; i++) {{
        const float change = values[i] - mean[i];
        if (!(fabsf(values[i]) <= LARGEST)) return 0;
        new_mean[i] = mean[i] + rate * change;
        new_variance[i] = (1.0f - rate) * (variance[i] + rate * change * change);
    }}
    return 1;
}}

/* Scale a vector, and begin a series with a state of 0. */
static int NAME_begin(struct NAME_learner *learner, const float *values) {{
    const struct NAME_saved *saved = &learner->saved;
    if (!NAME_scales(values, saved->mean, saved->variance, NAME_rate(saved->vectors_read), learner->mean,
                     learner->variance, NAME_INPUTS)) return 0;
    NAME_scaled(values, learner->mean, learner->variance, learner->input, NAME_INPUTS);
    if (!saved->last_known) {{
        NAME_forget_state(learner);
        NAME_forget_sensitivities(learner);
    }}
    return 1;
}}

int NAME_predict(struct NAME_learner *learner, const float *read, float *values) {{
    const struct NAME_saved *saved = &learner->saved;
    const float *input = learner->input;
    if (!NAME_begin(learner, read)) return NAME_BAD_INPUT;
PREDICT
    for (int i = 0; i < NAME_TARGETS; i++) {{
        const float variance = saved->target_variance[i];
        values[i] = saved->target_mean[i] + (variance > 0.0f ? sqrtf(variance) : 1.0f) * values[i];
    }}
    return NAME_OK;
}}

int NAME_learn(struct NAME_learner *learner, const float *values, const float *target, float *score) {{
    struct NAME_saved *saved = &learner->saved;
    *score = 0.0f;
    if (!NAME_scales(target, saved->target_mean, saved->target_variance, NAME_rate(saved->vectors_read),
                     learner->target_mean, learner->target_variance, NAME_TARGETS)) return NAME_BAD_INPUT;
    if (!NAME_begin(learner, values)) return NAME_BAD_INPUT;
    NAME_scaled(target, learner->target_mean, learner->target_variance, learner->target, NAME_TARGETS);
    const int outcome = NAME_block(learner, learner->input, learner->target);
    if (outcome != NAME_OK) return outcome;
    const float of_errors = NAME_rate(saved->updates);
    for (int i = 0; i < NAME_TARGETS; i++) {{
        const float square = learner->error[i] * learner->error[i];
        *score += square / (saved->errors[i] + SMALLEST) / (float)NAME_TARGETS;
        saved->errors[i] += of_errors * (square - saved->errors[i]);
    }}
    memcpy(saved->mean, learner->mean, sizeof saved->mean);
    memcpy(saved->variance, learner->variance, sizeof saved->variance);
    memcpy(saved->target_mean, learner->target_mean, sizeof saved->target_mean);
    memcpy(saved->target_variance, learner->target_variance, sizeof saved->target_variance);
    memcpy(saved->last, values, sizeof saved->last);
    saved->last_known = 1;
    if (saved->vectors_read < UINT32_MAX) saved->vectors_read++;
    return NAME_OK;
}}"""
