"""The header and the source file around the statements of an exported learner."""

from textwrap import indent
from typing import NamedTuple

from hf_recurrent.export.c_learner_plan import FILE_VERSION, FIRST_RANDOM, HEADER_BYTES, SAVED_MAGIC, LearnerPlan
from hf_recurrent.export.c_tables import CRC32, WEIGHTS_MAGIC, literal


class Interface(NamedTuple):
    """Parts of C text in which learners of tokens and of vectors differ.

    Args:
        title: first sentence of the header.
        macros: lines.
        outcomes: comments of NAME_BAD_INPUT and NAME_NO_CONTEXT.
        saved: last fields of `struct NAME_saved`, three 32-bit words.
        memory: fields of `struct NAME_learner` that are not saved, and the number of their words.
        declarations: of NAME_predict and NAME_learn.
        functions: their definitions, after NAME_block.
        block: parameters of NAME_block.
        begin: statement that begins a series.
        start: statements of NAME_init.
        allowed: condition for the last saved word, `last`.
        loaded: last statements of NAME_load.
    """

    title: str
    macros: str
    outcomes: tuple[str, str]
    saved: str
    memory: tuple[str, int]
    declarations: str
    functions: str
    block: str
    begin: str
    start: str
    allowed: str
    loaded: str = ""


def header_text(plan: LearnerPlan, interface: Interface, work: int, table_bytes: int) -> str:
    """NAME.h, with `work` elements of memory for intermediate results; `table_bytes` of constants are in NAME.c."""
    saved, weights = plan.saved_bytes, plan.weight_bytes
    counts, words = plan.counts, plan.num_trained + max(work, 1) + interface.memory[1] + plan.table_memory[1] + 2
    if counts is not None:
        weights, words = weights + counts.file_bytes, words + 256 + words % 2
        words += counts.copy_bytes // 4
    ram = saved + 4 * words
    bad_input, no_context = interface.outcomes
    return f"""/*
 * {interface.title}: exact real-time recurrent learning.
 * C99. Link with -lm. Nothing is allocated, and all memory is in one struct of the caller.
 */
#ifndef NAME_LEARNER_H
#define NAME_LEARNER_H

#include <stddef.h>
#include <stdint.h>

{interface.macros}
#define NAME_LEARNER_BYTES {ram} /* of RAM: struct NAME_learner */
#define NAME_TABLE_BYTES {table_bytes} /* of flash, in addition to the code */
#define NAME_WEIGHTS_FILE_SIZE {HEADER_BYTES + weights}
#define NAME_SAVED_SIZE {HEADER_BYTES + saved}

enum {{
    NAME_OK,
    NAME_BAD_INPUT, /* {bad_input}; a damaged file, or one of another model */
    NAME_NO_CONTEXT, /* {no_context} */
    NAME_DIVERGED /* the loss or its gradient is NaN or infinite */
}};

{_structs(plan, interface, max(work, 1))}

/* Begin with the weights in the bytes of NAME.weights. Returns NAME_OK or NAME_BAD_INPUT. */
int NAME_init(struct NAME_learner *learner, const void *file, size_t size);
{interface.declarations}
/* Begin another series: what was learned stays, the state is zero. */
void NAME_reset(struct NAME_learner *learner);
/* Write all that was learned to NAME_SAVED_SIZE bytes. */
void NAME_save(const struct NAME_learner *learner, void *file);
/* Continue from these bytes. Returns NAME_OK, or NAME_BAD_INPUT; then the learner is unchanged. */
int NAME_load(struct NAME_learner *learner, const void *file, size_t size);

#endif
"""


def _structs(plan: LearnerPlan, interface: Interface, work: int) -> str:
    """The memory of a learner."""
    arrays = [f"    {part.type} {part.field}[{part.size}];" for part in plan.parts]
    arrays += ["    uint32_t random; /* for rounding */"] if plan.is_narrow else []
    memory, alignment = interface.memory[0] + plan.table_memory[0], ""
    if plan.counts is not None:
        arrays.insert(0, f"    uint64_t counts[{plan.counts.size // 8}]; /* the count memory, with its state */")
        memory += f"    uint64_t copy[{plan.counts.copy_bytes // 8}];\n    float network[256];\n"
        odd = (plan.num_trained + work + interface.memory[1] + plan.table_memory[1]) % 2
        alignment = "\n    uint32_t alignment;" if odd else ""
    fields = "\n".join(arrays)
    return f"""/* What `NAME_save` saves. */
struct NAME_saved {{
{fields}
{interface.saved}
}};

struct NAME_learner {{
    struct NAME_saved saved;
    float gradient[{plan.num_trained}];
    float work[{work}];
{memory}    float learning_rate; /* may be changed at any time */
    float max_grad_norm; /* the same; 0 for no clipping */{alignment}
}};"""


def source_text(plan: LearnerPlan, interface: Interface, definitions: list[str], update: str, learn: str) -> str:
    """NAME.c, with tables and functions as `definitions`, and the statements of NAME_block as `learn`."""
    parts = ['#include "NAME.h"\n\n#include <math.h>\n#include <string.h>', *definitions, CRC32, _FILES, _forget(plan)]
    block = f"""/* Forward and backward pass of one step, sensitivities, weights, state. */
static int NAME_block(struct NAME_learner *learner, {interface.block}) {{
{indent(learn, "    ")}
    return NAME_OK;
}}"""
    reset = f"void NAME_reset(struct NAME_learner *learner) {{\n    {interface.begin}\n}}"
    counts = [] if plan.counts is None else [plan.counts.source()]
    parts += [*counts, update, _update(plan), block, interface.functions, reset, _file_interface(plan, interface)]
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
        fields = [field for name, (field, _) in plan.fields.items() if name.startswith(part)]
        return "\n".join(f"    memset(learner->saved.{field}, 0, sizeof learner->saved.{field});" for field in fields)

    return f"""static void NAME_forget_sensitivities(struct NAME_learner *learner) {{
{clears("carried")}
}}

static void NAME_forget_state(struct NAME_learner *learner) {{
{clears("state")}
}}"""


def _update(plan: LearnerPlan) -> str:
    calls = "\n".join(
        f"    NAME_change{'_fixed' * (end <= plan.num_fixed)}"
        f"(learner, {begin}, {end - begin}, {literal(factor)}, scale);"
        for begin, end, factor in plan.rates
    )
    table, of_rows, condition = plan.table, "", "!(norm < INFINITY)"
    if table is not None:
        condition = f"!(norm < INFINITY && fabsf(NAME_sum(learner->of_rows, {table.width})) < INFINITY)"
        place = plan.offsets[table.name] - plan.num_fixed
        of_rows = f"""
    NAME_change_rows(learner->saved.weights + {place}, learner->saved.row_sums, learner->rows, learner->of_rows,
                     learner->table_learning_rate, {literal(table.eps)}, {plan.num_orders}, {table.width});"""
    return f"""/* Change the weights. After a NaN or infinite gradient, the sensitivities may have diverged. */
static int NAME_update(struct NAME_learner *learner) {{
    const float norm = NAME_norm_of(learner->gradient, {plan.num_trained});
    float scale = 1.0f;
    if ({condition}) {{
        NAME_forget_sensitivities(learner);
        return NAME_DIVERGED;
    }}
    if (learner->max_grad_norm > 0.0f) scale = fminf(1.0f, learner->max_grad_norm / (norm + 1e-6f));
    if (learner->saved.updates < UINT32_MAX) learner->saved.updates++;
{calls}{of_rows}
    return NAME_OK;
}}"""


def _file_interface(plan: LearnerPlan, interface: Interface) -> str:
    """The functions of the header that read and write files."""
    layout, weights, saved = f"{plan.checksum:#010x}u", plan.weight_bytes, plan.saved_bytes
    learned = 0 if plan.counts is None else plan.counts.file_bytes
    counts = "" if plan.counts is None else f"{plan.counts.start}\n    "
    at, copies = learned, []
    for part in plan.weight_parts:
        place = f"payload + {at}" if at else "payload"
        copies.append(f"memcpy(learner->saved.{part.field}, {place}, sizeof learner->saved.{part.field});")
        at += part.num_bytes
    copied = "\n    ".join(copies)
    rate = "" if plan.table is None else literal(plan.table.rate)
    table = f"learner->table_learning_rate = {rate};\n    " if rate else ""
    random = f"learner->saved.random = {FIRST_RANDOM}u;\n    " if plan.is_narrow else ""
    return f"""int NAME_init(struct NAME_learner *learner, const void *file, size_t size) {{
    const unsigned char *payload = NAME_payload(file, size, {WEIGHTS_MAGIC:#x}u, {layout}, {weights + learned}u);
    if (!payload) return NAME_BAD_INPUT;
    memset(learner, 0, sizeof *learner);
    {counts}{copied}
    {random}{interface.start}
    {table}learner->learning_rate = {literal(plan.learning_rate)};
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
    if (!({interface.allowed})) return NAME_BAD_INPUT;
    memcpy(&learner->saved, payload, {saved});
{interface.loaded}    return NAME_OK;
}}"""
