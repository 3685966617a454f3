"""Footprints of a model as exported C: its step, and its learner with each optimizer."""

import itertools
from collections.abc import Iterable, Iterator

from transformers import PreTrainedModel

from hf_recurrent.export.c_footprint import Footprint
from hf_recurrent.export.c_learner import c_learner, c_vector_learner
from hf_recurrent.export.c_learner_plan import learner_setting
from hf_recurrent.export.c_source import c_step
from hf_recurrent.export.formats import NUMBERS
from hf_recurrent.export.programs import export_step
from hf_recurrent.export.step_module import StepModule
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.vector_learner import VectorLearner


def c_footprints(
    model: PreTrainedModel | None, optimizers: Iterable[str], inputs: int | None = None, targets: int | None = None
) -> Iterator[tuple[str, Footprint | str]]:
    """Name of a program → its footprint, or the reason why the model cannot be exported as that program.

    Args:
        model: with float32 weights, on the CPU; None with `inputs`.
        optimizers: names, of the learner; see [`LearnerSettings`].
        inputs: values of a vector, for the new model of [`VectorLearner`] instead of `model`.
        targets: values of a target, with `inputs`; None to predict the next vector.
    """
    if inputs is None:
        yield "step", _of_step(model)
    for optimizer, numbers in itertools.product(optimizers, NUMBERS):
        suffix = "" if numbers == NUMBERS[0] else f", {numbers}"
        try:
            if inputs is None:
                setting = learner_setting(OnlineLearner(model, optimizer=optimizer), numbers)
                found = c_learner(model, setting).footprint
            else:
                learner = VectorLearner.new(inputs, num_targets=targets, optimizer=optimizer)
                found = c_vector_learner(learner, numbers=numbers).footprint
        except ValueError as error:
            found = str(error)
        yield f"learner, {optimizer}{suffix}", found


def _of_step(model: PreTrainedModel) -> Footprint | str:
    try:
        return c_step(export_step(model, own_operators=True), "model", StepModule(model).state_names).footprint
    except (TypeError, ValueError) as error:
        return str(error)
