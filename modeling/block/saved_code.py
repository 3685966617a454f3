"""The code that travels with a checkpoint: the classes that it names, and the files that hold them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..units.own_code import AUTO_MAP_KEY, HUB_ARGUMENTS, OWN_CODE, find_own_unit
from .configuration_recurrent import packaged
from .tensor_checks import align_weights

logger = logging.get_logger(__name__)


def defining_class(model: nn.Module) -> type[nn.Module]:
    """The model's class without wrappers of torch, such as FSDP's, which derive a class from it."""
    return next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))


def auto_classes(model_class: type[nn.Module]) -> dict[str, str]:
    """`auto_map` of all models that the module of a class registers for the same configuration.

    So an Auto class finds a base model, a language model and a classifier in the files of each of them.
    """
    module = sys.modules[model_class.__module__]
    return {
        cls._auto_class: f"{module.__name__.rpartition('.')[2]}.{cls.__name__}"
        for cls in vars(module).values()
        if isinstance(cls, type)
        and cls.__module__ == module.__name__
        and getattr(cls, "_auto_class", None)
        and cls.config_class is model_class.config_class
    }


@contextmanager
def named_as(wrapper: type, module: str, name: str) -> Iterator[None]:
    """Inside the block, a class has another module and name, by which transformers finds its code."""
    before = wrapper.__module__, wrapper.__name__
    wrapper.__module__, wrapper.__name__ = module, name
    try:
        yield
    finally:
        wrapper.__module__, wrapper.__name__ = before


class SavedCode:
    """For a `PreTrainedModel`: saves its own code, not a wrapper's, and names all classes of its family.

    The code of a user-defined recurrent unit is part of it.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *arguments: Any, config=None, **kwargs: Any) -> Any:
        """As `transformers.PreTrainedModel.from_pretrained`; the code of a user-defined unit must be trusted.

        On a CPU, weights are aligned for the kernels.

        Raises:
            ValueError: the checkpoint has code of a recurrent unit, which is neither trusted nor registered.
        """
        if pretrained_model_name_or_path is not None:
            hub_arguments = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
            fields = config
            if not isinstance(config, PreTrainedConfig):
                fields, _ = PreTrainedConfig.get_config_dict(config or pretrained_model_name_or_path, **hub_arguments)
            trusted = bool(kwargs.get("trust_remote_code"))
            find_own_unit(fields, pretrained_model_name_or_path, trusted, **hub_arguments)
        found = super().from_pretrained(pretrained_model_name_or_path, *arguments, config=config, **kwargs)
        align_weights(found[0] if isinstance(found, tuple) else found)  # a pair with `output_loading_info`
        return found

    def save_pretrained(self, save_directory, *arguments: Any, **kwargs: Any) -> Any:
        """As `transformers.PreTrainedModel.save_pretrained`."""
        model_class, unit = defining_class(self), OWN_CODE.get(getattr(self.config, "recurrent_unit", None))
        module = model_class.__module__
        if self._auto_class is not None and module != "__main__":
            names = {**(getattr(self.config, "auto_map", None) or {}), **auto_classes(model_class)}
            names.pop(AUTO_MAP_KEY, None)
            if unit is not None and unit.reference is not None:
                names[AUTO_MAP_KEY] = unit.reference
            self.config.auto_map = names
        if unit is not None and unit.file is None:
            logger.warning(
                f"The recurrent unit {self.config.recurrent_unit!r} is not defined in a file: its code is not saved, "
                "and the checkpoint loads only where it is registered. To save it, move it to a file."
            )
            unit = None
        with packaged(model_class, unit) as module, named_as(type(self), module, model_class.__name__):
            return super().save_pretrained(save_directory, *arguments, **kwargs)
