"""Functions in C that only an exported learner calls: products with changing weights, backward passes, the update."""

import re

from hf_recurrent.export.c_helpers import HELPERS

_STEP = "(1.0f / 4096)"  # of numbers in fixed point; see `FIXED_SCALE`

LEARNER_HELPERS = {
    "of_fixed": f"""/* Of a number in fixed point, from -8 to 8. */
static float NAME_of_fixed(int16_t x) {{
    return (float)x * {_STEP};
}}""",
    "to_fixed": """/* To fixed point by stochastic rounding: the mean over `random` is x. */
static int16_t NAME_to_fixed(float x, uint32_t *random) {
    *random ^= *random << 13;
    *random ^= *random >> 17;
    *random ^= *random << 5;
    x = fmaxf(-32768.0f, fminf(32767.0f, x * 4096.0f + (float)(*random >> 8) * (1.0f / 16777216)));
    const int y = (int)x;
    return (int16_t)(y - ((float)y > x));
}""",
    "add_scaled": """/* y += factor * x; blocks of fixed length, so that -O2 vectorizes. */
static void NAME_add_scaled(float factor, const float *restrict x, float *restrict y, int size) {
    int i = 0;
    for (; i + 8 <= size; i += 8) {
        for (int k = 0; k < 8; k++) y[i + k] += factor * x[i + k];
    }
    for (i = size - size % 8; i < size; i++) y[i] += factor * x[i];
}""",
    "map": """/* y (rows) = table (rows, columns) x. */
static void NAME_map(const float *table, const float *x, float *y, int rows, int columns) {
    for (int row = 0; row < rows; row++, table += columns) y[row] = NAME_dot(table, x, columns);
}""",
    "map_back": """/* y (columns) = x (rows) table (rows, columns). */
static void NAME_map_back(const float *x, const float *table, float *y, int rows, int columns) {
    for (int i = 0; i < columns; i++) y[i] = 0.0f;
    for (int row = 0; row < rows; row++, table += columns) NAME_add_scaled(x[row], table, y, columns);
}""",
    "outer": """/* y (rows, columns) = a (rows) times b (columns). */
static void NAME_outer(const float *restrict a, const float *restrict b, float *restrict y, int rows, int columns) {
    for (int row = 0; row < rows; row++, y += columns) {
        int i = 0;
        for (; i + 8 <= columns; i += 8) {
            for (int k = 0; k < 8; k++) y[i + k] = a[row] * b[i + k];
        }
        for (i = columns - columns % 8; i < columns; i++) y[i] = a[row] * b[i];
    }
}""",
    "norm_backward": """/* The gradient of x through a LayerNorm without weights. */
static void NAME_norm_backward(float eps, const float *x, const float *grad, float *y, int size) {
    const float mean = NAME_sum(x, size) / (float)size, of_mean = NAME_sum(grad, size) / (float)size;
    for (int i = 0; i < size; i++) y[i] = x[i] - mean;
    const float scale = 1.0f / sqrtf(NAME_dot(y, y, size) / (float)size + eps);
    const float of_scale = NAME_dot(y, grad, size) / (float)size * scale * scale;
    for (int i = 0; i < size; i++) y[i] = scale * (grad[i] - of_mean - y[i] * of_scale);
}""",
    "advance": """/* One row of one channel: gradient += of_state * s, then s = factor * s + of_row * x. */
static void NAME_advance(float *restrict s, float factor, float of_row, const float *restrict x, float of_state,
                         float *restrict gradient, int size) {
    int i = 0;
    for (; i + 8 <= size; i += 8) {
        for (int k = 0; k < 8; k++) gradient[i + k] += of_state * s[i + k];
        for (int k = 0; k < 8; k++) s[i + k] = factor * s[i + k] + of_row * x[i + k];
    }
    for (i = size - size % 8; i < size; i++) {
        gradient[i] += of_state * s[i];
        s[i] = factor * s[i] + of_row * x[i];
    }
}""",
    "sensitivities": """/* Real-time recurrent learning of a parameter, (rows, groups, columns):
 * gradient += sum over channels of of_state * s, then s = transition s + of_rows x^T, where s is (channels, rows,
 * groups, columns), transition (channels, channels, groups) and x null for a vector. */
static void NAME_sensitivities(float *s, const float *transition, const float *of_rows, const float *x,
                               const float *of_state, float *gradient, int channels, int rows, int groups,
                               int columns) {
    const int all = rows * groups;
    for (int row = 0; row < all; row++) {
        const int group = row % groups;
        if (channels == 1 && x && gradient) {
            const long at = (long)row * columns;
            NAME_advance(s + at, transition[group], of_rows[row], x, of_state[group], gradient + at, columns);
            continue;
        }
        for (int i = 0; i < columns; i++) {
            float before[4];
            for (int c = 0; c < channels; c++) {
                before[c] = s[(long)(c * all + row) * columns + i];
                if (gradient) gradient[(long)row * columns + i] += of_state[c * groups + group] * before[c];
            }
            for (int c = 0; c < channels; c++) {
                float after = 0.0f;
                const float *factors = transition + c * channels * groups + group;
                for (int d = 0; d < channels; d++) after += factors[d * groups] * before[d];
                after += of_rows[c * all + row] * (x ? x[i] : 1.0f);
                s[(long)(c * all + row) * columns + i] = after;
            }
        }
    }
}""",
    "ngram_rows": """/* Rows of a table at the hashes of the last bytes: a window of ids + 1, newest last. */
static void NAME_ngram_rows(const uint32_t *factors, const uint16_t *lengths, const float *window, uint32_t *found,
                            int orders, uint32_t rows, int length) {
    uint64_t sum = 0;
    for (int order = 0, lag = 0; order < orders; order++) {
        for (; lag < lengths[order]; lag++) {
            const float id = window[length - 1 - lag];
            if (id >= 1.0f && id <= 16777216.0f) sum += (uint64_t)factors[lag] * (uint64_t)id;
        }
        found[order] = (uint32_t)order * rows + (uint32_t)(sum % 2147483647u % rows);
    }
}""",
    "read_rows": """/* Rows of a table, one after another. */
static void NAME_read_rows(const float *table, const uint32_t *rows, float *y, int count, int width) {
    for (int k = 0; k < count; k++, y += width) {
        for (int i = 0; i < width; i++) y[i] = table[(size_t)rows[k] * (size_t)width + (size_t)i];
    }
}""",
    "change_rows": """/* Row-wise Adagrad: `sums` has one number for each row of the table. */
static void NAME_change_rows(float *table, float *sums, const uint32_t *rows, const float *gradient, float rate,
                             float eps, int count, int width) {
    const float square = NAME_dot(gradient, gradient, width) / (float)width;
    for (int k = 0; k < count; k++) {
        sums[rows[k]] += square;
        float *row = table + (size_t)rows[k] * (size_t)width;
        NAME_add_scaled(-rate / (sqrtf(sums[rows[k]]) + eps), gradient, row, width);
    }
}""",
    "wide": """/* Of bfloat16, the upper half of a float. */
static float NAME_wide(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}""",
    "narrow": """/* To bfloat16 by stochastic rounding, so that small changes add up: the mean over `random` is x. */
static uint16_t NAME_narrow(float x, uint32_t *random) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    *random ^= *random << 13;
    *random ^= *random >> 17;
    *random ^= *random << 5;
    if ((bits & 0x7f800000u) < 0x7f000000u) bits += *random >> 16;
    return (uint16_t)(bits >> 16);
}""",
    "norm_of": """static float NAME_norm_of(const float *x, long size) {
    float total = 0.0f;
    for (long begin = 0; begin < size; begin += 1024) {
        const int count = size - begin < 1024 ? (int)(size - begin) : 1024;
        total += NAME_dot(x + begin, x + begin, count);
    }
    return sqrtf(total);
}""",
}


def _in_fixed_point(text: str, matrix: str) -> str:
    """A product of which this parameter is in fixed point; its result is `FIXED_SCALE` times what it was."""
    text = re.sub(rf"const float (\*(?:restrict )?{matrix}\b)", r"const int16_t \1", text)
    return re.sub(r"NAME_(dot|add_scaled|map_back|map)\(", r"NAME_\1_fixed(", text)


LEARNER_HELPERS |= {
    "dot_fixed": _in_fixed_point(HELPERS["dot"], "x"),
    "add_scaled_fixed": _in_fixed_point(LEARNER_HELPERS["add_scaled"], "x"),
    "map_fixed": _in_fixed_point(LEARNER_HELPERS["map"], "table").replace("= NAME_dot", f"= {_STEP} * NAME_dot"),
    "map_back_fixed": _in_fixed_point(LEARNER_HELPERS["map_back"], "table").replace("x[row]", f"{_STEP} * x[row]"),
}


def sensitivities_text() -> str:
    """NAME_sensitivities with sensitivities in bfloat16."""
    text = LEARNER_HELPERS["sensitivities"]
    text = text.replace("(float *s,", "(uint32_t *random, uint16_t *s,")
    begin, end = text.index("        if (channels == 1 && x"), text.index("        for (int i = 0; i < columns")
    text = text[:begin] + text[end:]
    text = text.replace("before[c] = s[(long)(c * all + row) * columns + i]", "before[c] = NAME_wide(s[AT])")
    text = text.replace("s[(long)(c * all + row) * columns + i] = after;", "s[AT] = NAME_narrow(after, random);")
    return text.replace("AT", "(long)(c * all + row) * columns + i")


def update_text(kind: str, numbers: str, num_fixed: int = 0) -> str:
    """The functions of an optimizer: of weights as floats, and of those in fixed point where there are some.

    β, log β and 1 - β of its moments stand there as BETA, LOG_BETA and REST, with 1 or 2 at the end, and ε as EPS.
    The first `num_fixed` weights are in fixed point.
    """
    first = f"(begin - {num_fixed})" if num_fixed else "begin"  # no address outside of the array, not even on the way
    weights = f"float *restrict weights = learner->saved.weights + {first};"
    texts = [_change(kind, "", weights, numbers != "float32")]
    if num_fixed:
        texts.append(_change(kind, "_fixed", "int16_t *restrict weights = learner->saved.fixed + begin;", True))
    return "\n\n".join(texts)


def _change(kind: str, suffix: str, weights: str, narrow: bool) -> str:
    comment, moments, rates, statements = _UPDATES[kind]
    lines, before, after = [], [], []
    for moment in moments:
        lines.append(f"{'uint16_t' if narrow else 'float'} *restrict {moment}s = learner->saved.{moment} + begin;")
        before.append(f"float {moment} = {f'NAME_wide({moment}s[i])' if narrow else f'{moment}s[i]'};")
        value = f"NAME_narrow({moment}, &learner->saved.random)" if narrow else moment
        after.append(f"{moment}s[i] = {value};")
    if suffix:
        *statements, last = statements
        change = last.removeprefix("weights[i] -= ").removesuffix(";")
        after.append(f"weights[i] = NAME_to_fixed(NAME_of_fixed(weights[i]) - {change}, &learner->saved.random);")
    head = "".join(f"    {line}\n" for line in (*lines, *rates))
    body = [*before, *statements, *after]
    # -O2 vectorizes blocks of fixed length; random numbers come one after another.
    loop = _whole(body) if suffix or (narrow and moments) else _in_blocks(body)
    return f"""/* {comment} */
static void NAME_change{suffix}(struct NAME_learner *learner, long begin, long size, float factor, float scale) {{
    const float *restrict gradient = learner->gradient + begin;
    {weights}
{head}{loop}}}"""


def _whole(body: list[str]) -> str:
    lines = "".join(f"        {line}\n" for line in body)
    return f"    for (long i = 0; i < size; i++) {{\n{lines}    }}\n"


def _in_blocks(body: list[str]) -> str:
    block = "".join(f"            {line.replace('[i]', '[begin_of + k]')}\n" for line in body)
    rest = "".join(f"        {line}\n" for line in body)
    return f"""    const long blocks = size - size % 8;
    /* Blocks of fixed length, so that -O2 -fno-math-errno vectorizes. */
    for (long begin_of = 0; begin_of < blocks; begin_of += 8) {{
        for (int k = 0; k < 8; k++) {{
{block}        }}
    }}
    for (long i = blocks; i < size; i++) {{
{rest}    }}
"""


# Comment, moments, statements before the loop, and those for each weight.
_UPDATES = {
    "adamw": (
        "AdamW without weight decay, as torch has it; 1 - beta^updates without doubles.",
        ("first", "second"),
        (
            "const float updates = (float)learner->saved.updates;",
            "const float rate = learner->learning_rate * factor / -expm1f(updates * LOG_BETA1);",
            "const float root = 1.0f / sqrtf(-expm1f(updates * LOG_BETA2));",
        ),
        (
            "const float g = gradient[i] * scale;",
            "first += REST1 * (g - first);",
            "second = BETA2 * second + REST2 * g * g;",
            "weights[i] -= rate * first / (sqrtf(second) * root + EPS);",
        ),
    ),
    "rmsprop": (
        "RMSProp, as torch has it.",
        ("second",),
        ("const float rate = learner->learning_rate * factor;",),
        (
            "const float g = gradient[i] * scale;",
            "second = BETA2 * second + REST2 * g * g;",
            "weights[i] -= rate * g / (sqrtf(second) + EPS);",
        ),
    ),
    "sgd": (
        "Stochastic gradient descent.",
        (),
        ("const float rate = learner->learning_rate * factor * scale;",),
        ("weights[i] -= rate * gradient[i];",),
    ),
}
MOMENTS = {kind: moments for kind, (_, moments, *_) in _UPDATES.items()}
