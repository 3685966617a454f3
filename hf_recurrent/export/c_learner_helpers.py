"""Functions in C that only an exported learner calls: products with changing weights, backward passes, the update."""

LEARNER_HELPERS = {
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
    "norm_of": """static float NAME_norm_of(const float *x, long size) {
    float total = 0.0f;
    for (long begin = 0; begin < size; begin += 1024) {
        const int count = size - begin < 1024 ? (int)(size - begin) : 1024;
        total += NAME_dot(x + begin, x + begin, count);
    }
    return sqrtf(total);
}""",
}

# β, log β and 1 - β of the moments become BETA, LOG_BETA and REST, with 1 or 2 at the end, and ε becomes EPS.
_LOOP = """    long i = begin;
    /* Blocks of fixed length, so that -O2 -fno-math-errno vectorizes. */
    for (; i + 8 <= end; i += 8) {
        for (int k = 0; k < 8; k++) {CHANGE_BLOCK
        }
    }
    for (; i < end; i++) {CHANGE_ONE
    }
}"""


def _update(head: str, statements: tuple[str, ...]) -> str:
    """The function of an optimizer; AT is the place of a weight."""
    block, one = (
        "".join(f"\n{indent}{line.replace('AT', place)}" for line in statements)
        for indent, place in ((12 * " ", "i + k"), (8 * " ", "i"))
    )
    return head + _LOOP.replace("CHANGE_BLOCK", block).replace("CHANGE_ONE", one)


UPDATES = {
    "adamw": _update(
        """/* AdamW without weight decay, as torch has it; 1 - beta^updates without doubles. */
static void NAME_change(struct NAME_learner *learner, long begin, long end, float factor, float scale) {
    const float updates = (float)learner->saved.updates;
    const float rate = learner->learning_rate * factor / -expm1f(updates * LOG_BETA1);
    const float root = 1.0f / sqrtf(-expm1f(updates * LOG_BETA2));
    struct NAME_saved *saved = &learner->saved;
""",
        (
            "const float g = learner->gradient[AT] * scale;",
            "saved->first[AT] += REST1 * (g - saved->first[AT]);",
            "saved->second[AT] = BETA2 * saved->second[AT] + REST2 * g * g;",
            "saved->weights[AT] -= rate * saved->first[AT] / (sqrtf(saved->second[AT]) * root + EPS);",
        ),
    ),
    "rmsprop": _update(
        """/* RMSProp, as torch has it. */
static void NAME_change(struct NAME_learner *learner, long begin, long end, float factor, float scale) {
    const float rate = learner->learning_rate * factor;
    struct NAME_saved *saved = &learner->saved;
""",
        (
            "const float g = learner->gradient[AT] * scale;",
            "saved->second[AT] = BETA2 * saved->second[AT] + REST2 * g * g;",
            "saved->weights[AT] -= rate * g / (sqrtf(saved->second[AT]) + EPS);",
        ),
    ),
    "sgd": _update(
        """/* Stochastic gradient descent. */
static void NAME_change(struct NAME_learner *learner, long begin, long end, float factor, float scale) {
    const float rate = learner->learning_rate * factor * scale;
    struct NAME_saved *saved = &learner->saved;
""",
        ("saved->weights[AT] -= rate * learner->gradient[AT];",),
    ),
}
