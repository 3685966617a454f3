"""Footprints of a model as exported C: its step, and its learner with each optimizer."""

from collections.abc import Iterator, Mapping

from transformers import PreTrainedModel

from hf_recurrent.export.c_footprint import Footprint
from hf_recurrent.export.c_learner import LearnerSetting, c_learner
from hf_recurrent.export.c_source import c_step
from hf_recurrent.export.programs import export_step
from hf_recurrent.export.step_module import StepModule


def c_footprints(
    model: PreTrainedModel, settings: Mapping[str, LearnerSetting]
) -> Iterator[tuple[str, Footprint | str]]:
    """Name of a program → its footprint, or the reason why the model cannot be exported as that program.

    Args:
        model: with float32 weights, on the CPU.
        settings: name of a learner → how it learns.
    """
    yield "step", _of_step(model)
    for name, setting in settings.items():
        try:
            yield f"learner, {name}", c_learner(model, setting).footprint
        except ValueError as error:
            yield f"learner, {name}", str(error)


def _of_step(model: PreTrainedModel) -> Footprint | str:
    try:
        return c_step(export_step(model, own_operators=True), "model", StepModule(model).state_names).footprint
    except (TypeError, ValueError) as error:
        return str(error)
