"""A learner of one stream as C99: a header and a source file, without allocation and without global variables.

It does what `OnlineLearner` with stride 1 and exact real-time recurrent learning does, or `VectorLearner`, on a
recording of the same program.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hf_recurrent.export.c_footprint import Footprint, code_bytes, rows_operations, update_operations
from hf_recurrent.export.c_helpers import HELPERS, helpers_of
from hf_recurrent.export.c_learner_counts import COPIED_CODE, STACK_BYTES, TABLE_BYTES
from hf_recurrent.export.c_learner_helpers import LEARNER_HELPERS, sensitivities_text, update_text
from hf_recurrent.export.c_learner_interfaces import token_interface, vector_interface
from hf_recurrent.export.c_learner_plan import LearnerPlan, LearnerSetting, learner_setting, token_plan
from hf_recurrent.export.c_learner_printer import LearnerPrinter
from hf_recurrent.export.c_learner_text import Interface, header_text, source_text
from hf_recurrent.export.c_source import allocate, named
from hf_recurrent.export.c_tables import literal, used_tables
from hf_recurrent.export.vector_block import VectorBlock, vector_plan
from hf_recurrent.kernels.block_trace import BlockTrace
from hf_recurrent.kernels.step_graph import UnsupportedOp, Value
from hf_recurrent.learning_rules.compiled_block import CompiledBlock
from hf_recurrent.learning_rules.compiled_program import CompiledReading, Uncompilable
from hf_recurrent.online.vector_learner import VectorLearner


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
    if not hasattr(model, "lm_head") or getattr(model.config, "input_size", None) is not None:
        raise ValueError(f"`model` is a {type(model).__name__}; it must be a language model that reads tokens.")
    _check(model, setting)
    with _unsupported():
        block, plan = token_plan(model, setting)
        learn = _print_block(block, plan, {}, ("nats", "nats[{}]"))
        predict = _print_reading(CompiledReading(model).record(), plan, {}, ("logits", "logits[{}]"))
    interface = token_interface(model.config.vocab_size, setting.end, predict.text, plan.counts)
    return _learner(plan, interface, learn, predict, name)


def c_vector_learner(learner: VectorLearner, name: str = "model", numbers: str = "float32") -> CLearner:
    """Print a learner of vectors: its weights as they are, and nothing else of what it has learned.

    Args:
        learner: of float32 weights.
        name: prefix of all names; an identifier of C.
        numbers: as in [`LearnerSetting`].

    Raises:
        ValueError: the model, its units or the optimizer are not supported.
    """
    _check(learner.model, learner_setting(learner, numbers))
    inputs = {"input": "input[{}]", "target": "target[{}]"}
    with _unsupported():
        block, plan = vector_plan(learner, numbers)
        learn = _print_block(block, plan, inputs, ("error", "learner->error[{}]"))
        predict = _print_reading(block.record(learns=False), plan, inputs, ("following", "values[{}]"))
    config = learner.model.config
    targets = config.num_labels if learner.has_targets else None
    interface = vector_interface(config.input_size, learner.settings.window, predict.text, targets)
    return _learner(plan, interface, learn, predict, name)


class _Body:
    def __init__(self, printer: LearnerPrinter):
        offsets, self.size = allocate(printer.statements, printer.scratch)
        self.text = printer.body(offsets).replace("work[", "learner->work[")
        self.tables = used_tables(printer.tables, self.text)
        self.operations = printer.operations
        self.table_bytes = sum(len(table.binary()) for table in self.tables)


@contextmanager
def _unsupported() -> Iterator[None]:
    """Inside, a reason why there is no learner in C becomes a ValueError."""
    try:
        yield
    except (Uncompilable, UnsupportedOp) as error:
        raise ValueError(f"The learner cannot be exported to C: {str(error).rstrip('.')}.") from error


def _learner(plan: LearnerPlan, interface: Interface, learn: _Body, predict: _Body, name: str) -> CLearner:
    tables = [table.definition() for body in (learn, predict) for table in body.tables]
    text, functions, calls = learn.text, HELPERS | LEARNER_HELPERS, "NAME_norm_of("
    calls += " NAME_sum( NAME_change_rows(" if plan.table else ""
    if plan.is_narrow:
        text = text.replace("NAME_sensitivities(", "NAME_sensitivities(&learner->saved.random, ")
        functions, calls = functions | {"sensitivities": sensitivities_text()}, f"{calls} NAME_wide( NAME_narrow("
    calls += " NAME_of_fixed( NAME_to_fixed(" if plan.num_fixed else ""
    helpers = helpers_of("\n".join((text, predict.text, calls)), functions)
    tables_size = learn.table_bytes + predict.table_bytes + (TABLE_BYTES if plan.counts else 0)
    header = header_text(plan, interface, max(learn.size, predict.size), tables_size)
    source = source_text(plan, interface, [*tables, *helpers], _update(plan), text)
    weights = plan.weights_file()
    footprint = _footprint(plan, header, source, len(weights), learn.operations)
    return CLearner(footprint.commented(named(header, name)), named(source, name), weights, footprint)


def _footprint(plan: LearnerPlan, header: str, source: str, weights: int, operations: int) -> Footprint:
    sizes = {macro: int(size) for macro, size in re.findall(r"#define NAME_(\w+_BYTES) (\d+)", header)}
    code = code_bytes(re.sub(r"static const \w+ \w+\[\d+\] = \{.*?\};", "", source, flags=re.DOTALL))
    code, stack = (code + COPIED_CODE, STACK_BYTES) if plan.counts else (code, 0)
    operations += update_operations(plan.kind, plan.num_trained)
    if plan.table is not None:
        operations += rows_operations(plan.num_orders, plan.table.width)
    return Footprint(code, sizes["TABLE_BYTES"] + weights, sizes["LEARNER_BYTES"], stack, operations)


def _update(plan: LearnerPlan) -> str:
    """The function of the optimizer."""
    text, group = update_text(plan.kind, plan.setting.numbers, plan.num_fixed), plan.setting.dense.param_groups[0]
    betas = group["betas"] if "betas" in group else (0.0, group.get("alpha", 0.0))
    numbers = {"EPS": group.get("eps", 0.0)}
    for number, beta in enumerate(betas, 1):
        numbers |= {f"BETA{number}": beta, f"REST{number}": 1 - beta}
        numbers |= {f"LOG_BETA{number}": math.log(beta)} if beta else {}
    return re.sub(
        r"\b[A-Z_]+\d?\b", lambda match: literal(numbers[match[0]]) if match[0] in numbers else match[0], text
    )


def _check(model: torch.nn.Module, setting: LearnerSetting) -> None:
    if model.dtype != torch.float32:
        raise ValueError(
            f"`model` has {model.dtype} weights; a learner in C needs float32: call `model.float()` first."
        )
    setting.check()


def _print_block(
    block: CompiledBlock | VectorBlock, plan: LearnerPlan, inputs: dict[str, str], result: tuple[str, str]
) -> _Body:
    """The statements of a block with these inputs; `result` is one of its values and its C text."""
    trace, values = block.record()
    if trace.guards:
        raise UnsupportedOp("a copy of a weight")
    printer = LearnerPrinter(trace.graph, plan, inputs)
    results = {result[0]: (values[result[0]], result[1])}
    for name, value in values.items():
        if name.startswith("state "):
            results[name] = value, f"learner->saved.{plan.fields[name][0]}[{{}}]"
        elif name.startswith("sums "):
            results[name] = value, "learner->of_rows[{}]"
        elif name.startswith("gradient "):
            results[name] = value, f"learner->gradient[{plan.offsets[name.removeprefix('gradient ')]} + {{}}]"
    printer.write_results(results, trace.effects, "if (NAME_update(learner)) return NAME_DIVERGED;")
    return _Body(printer)


def _print_reading(
    recorded: tuple[BlockTrace, dict[str, Value]], plan: LearnerPlan, inputs: dict[str, str], result: tuple[str, str]
) -> _Body:
    """The statements of a step that does not learn; arguments as in [`_print_block`]."""
    (trace, values), (name, text) = recorded, result
    printer = LearnerPrinter(trace.graph, plan, inputs, first_table=1000)
    printer.write_results({name: (values[name], text)}, [], "")
    return _Body(printer)
