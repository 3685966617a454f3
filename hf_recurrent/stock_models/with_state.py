"""`with_state`: a stock recurrent model that takes and returns a state."""

import importlib

from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state

# `model_type` → module whose `CLASSES` are the classes of the family, each with its subclass that carries a state.
_FAMILIES = {name: name for name in ("mamba", "mamba2", "recurrent_gemma", "xlstm")} | {"falcon_mamba": "mamba"}


def with_state(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model`, which takes and returns a [`RecurrentState`] from now on if its family can.

    Families: `MambaForCausalLM`, `FalconMambaForCausalLM`, `Mamba2ForCausalLM`, `RecurrentGemmaForCausalLM`,
    `xLSTMForCausalLM`. The model is changed in place: it gets `init_state`, and calls with `state`, `reset_mask` or
    `shift_labels` work as [`RecurrentForCausalLM.forward`]. Other calls, the weights and their names, and what
    `save_pretrained` writes stay the same. Other models, and ours, are returned unchanged.

    Raises:
        ValueError: the family is known, but this model cannot carry a state.
    """
    family = _FAMILIES.get(getattr(getattr(model, "config", None), "model_type", None))
    if supports_recurrent_state(model) or family is None:
        return model
    module = importlib.import_module(f"hf_recurrent.stock_models.{family}")
    if (kind := module.CLASSES.get(type(model))) is not None:
        kind.check(model)
        for name, part in model.named_modules():
            if type(part) in module.CLASSES:
                part.__class__ = module.CLASSES[type(part)]
                part.state_name = ".".join(name.split(".")[1:3])  # backbone.layers.0.mixer → layers.0
    return model


def check_recurrent(name: str, model: PreTrainedModel) -> None:
    """Raise a TypeError unless `model` takes and returns a recurrent state."""
    if not supports_recurrent_state(model):
        raise TypeError(
            f"`{name}` is a {type(model).__name__}, which has no recurrent state; use `generate()` of transformers."
        )
