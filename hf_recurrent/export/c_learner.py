"""A learner of one stream as C99: a header and a source file, without allocation and without global variables.

It does what `OnlineLearner` does with stride 1 and exact real-time recurrent learning, on the same recorded program.
"""

import math
import re
from typing import NamedTuple

import torch

from hf_recurrent.export.c_file import allocate, named
from hf_recurrent.export.c_footprint import Footprint, code_bytes, update_operations
from hf_recurrent.export.c_helpers import HELPERS, helpers_of
from hf_recurrent.export.c_learner_helpers import LEARNER_HELPERS, UPDATES
from hf_recurrent.export.c_learner_plan import LearnerPlan, LearnerSetting
from hf_recurrent.export.c_learner_printer import LearnerPrinter
from hf_recurrent.export.c_learner_text import header_text, source_text
from hf_recurrent.export.c_tables import used_tables
from hf_recurrent.kernels.step_graph import UnsupportedOp
from hf_recurrent.learning_rules.compiled_block import CompiledBlock
from hf_recurrent.learning_rules.compiled_program import Uncompilable
from hf_recurrent.learning_rules.compiled_reading import CompiledReading
from hf_recurrent.learning_rules.compiled_update import CompiledUpdate
from hf_recurrent.learning_rules.rules import build_learning_rule


class CLearner(NamedTuple):
    """An exported learner.

    Args:
        header: C text, to be saved as NAME.h.
        source: C text.
        weights: the content of the file that `NAME_init` reads.
        footprint: the weights are counted as constants.
    """

    header: str
    source: str
    weights: bytes
    footprint: Footprint


def c_learner(model: torch.nn.Module, setting: LearnerSetting, name: str = "model") -> CLearner:
    """Print a learner of a model.

    Args:
        model: a language model of float32 weights on the CPU, with diagonal recurrent units.
        setting: how it learns.
        name: prefix of all names; an identifier of C.

    Raises:
        ValueError: the model, its units or the optimizer are not supported.
    """
    _check(model, setting)
    try:
        block = CompiledBlock(build_learning_rule("rtrl", model), 1, 1, resets=False)
        plan = LearnerPlan(block, setting)
        parts = _print_block(block, plan), _print_reading(CompiledReading(model), plan)
    except (Uncompilable, UnsupportedOp) as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"The learner cannot be exported to C: {reason}.") from error
    learn, predict = (_Body(printer) for printer in parts)
    tables = [table.definition() for body in (learn, predict) for table in body.tables]
    calls = "\n".join((learn.text, predict.text, "NAME_norm_of("))
    helpers = helpers_of(calls, HELPERS | LEARNER_HELPERS)
    header = header_text(plan, max(learn.size, predict.size), learn.table_bytes + predict.table_bytes)
    source = source_text(plan, [*tables, *helpers], _update(plan), learn.text, predict.text)
    weights = plan.weights_file()
    footprint = _footprint(plan, header, source, len(weights), learn.operations)
    return CLearner(footprint.commented(named(header, name)), named(source, name), weights, footprint)


def _footprint(plan: LearnerPlan, header: str, source: str, weights: int, operations: int) -> Footprint:
    sizes = {macro: int(size) for macro, size in re.findall(r"#define NAME_(\w+_BYTES) (\d+)", header)}
    code = re.sub(r"static const \w+ \w+\[\d+\] = \{.*?\};", "", source, flags=re.DOTALL)
    operations += update_operations(plan.kind, plan.num_trained)
    return Footprint(code_bytes(code), sizes["TABLE_BYTES"] + weights, sizes["LEARNER_BYTES"], 0, operations)


def _update(plan: LearnerPlan) -> str:
    """The function of the optimizer."""
    text, group = UPDATES[plan.kind], plan.setting.optimizer.param_groups[0]
    betas = group["betas"] if "betas" in group else (0.0, group["alpha"])
    for macro, value in zip(("BETA1", "BETA2", "EPS"), (*betas, group["eps"]), strict=True):
        text = re.sub(rf"\b{macro}\b", repr(float(value)), text)
    return text


def _check(model: torch.nn.Module, setting: LearnerSetting) -> None:
    if not hasattr(model, "lm_head") or getattr(model.config, "input_size", None) is not None:
        raise ValueError(f"`model` is a {type(model).__name__}; it must be a language model that reads tokens.")
    if getattr(model, "count_memory", None) is not None:
        raise ValueError("`model` has a count memory, which a learner in C does not support.")
    if getattr(model.config, "ngram_orders", None):
        raise ValueError("`model` has tables of n-grams, which a learner in C does not support.")
    if model.dtype != torch.float32:
        raise ValueError(
            f"`model` has {model.dtype} weights; a learner in C needs float32: call `model.float()` first."
        )
    if not CompiledUpdate.is_supported(setting.optimizer):
        kind = type(setting.optimizer).__name__
        raise ValueError(f"`setting.optimizer` is {kind}; it must be AdamW or RMSprop without weight decay.")
    if not 0 <= setting.max_grad_norm < math.inf:
        raise ValueError(f"`setting.max_grad_norm` is {setting.max_grad_norm}; it must be finite and at least 0.")


class _Body:
    """The statements of a printer."""

    def __init__(self, printer: LearnerPrinter):
        sizes = {number: memory.size for number, memory in printer.scratch.items()}
        offsets, self.size = allocate(printer.statements, sizes)
        self.text = printer.body(offsets).replace("work[", "learner->work[")
        self.tables = used_tables(printer.tables, self.text)
        self.operations = printer.operations
        self.table_bytes = sum(len(table.binary()) for table in self.tables)


def _print_block(block: CompiledBlock, plan: LearnerPlan) -> LearnerPrinter:
    trace, values = block.record()
    if trace.guards:
        raise UnsupportedOp("a copy of a weight")
    printer = LearnerPrinter(trace.graph, plan.layout())
    results = {}
    for name, value in values.items():
        if name == "nats":
            access = "nats[{}]"
        elif name.startswith("state "):
            access = f"learner->saved.{plan.fields[name][0]}[{{}}]"
        else:
            access = f"learner->gradient[{plan.offsets[name.removeprefix('gradient ')]} + {{}}]"
        results[name] = value, access
    printer.write_results(results, trace.effects, "if (NAME_update(learner)) return NAME_DIVERGED;")
    return printer


def _print_reading(reading: CompiledReading, plan: LearnerPlan) -> LearnerPrinter:
    trace, values = reading.record()
    printer = LearnerPrinter(trace.graph, plan.layout(), first_table=1000)
    printer.write_results({"logits": (values["logits"], "logits[{}]")}, [], "")
    return printer
