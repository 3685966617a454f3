"""The code that travels with a checkpoint: the classes that it names, and the files that hold them."""

import sys
from typing import Any

from torch import nn
from transformers.dynamic_module_utils import custom_object_save


def defining_class(model: nn.Module) -> type[nn.Module]:
    """The class that somebody wrote: wrappers of torch, such as FSDP's, derive a class from that of the model."""
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
        and vars(cls).get("_auto_class")
        and cls.config_class is model_class.config_class
    }


class SavedCode:
    """For a `PreTrainedModel`: saves its own code, not that of a wrapper, and names all classes of its family."""

    def save_pretrained(self, save_directory, is_main_process: bool = True, *arguments: Any, **kwargs: Any) -> Any:
        """As `transformers.PreTrainedModel.save_pretrained`."""
        model_class = defining_class(self)
        if self._auto_class is None or model_class.__module__ == "__main__":
            return super().save_pretrained(save_directory, is_main_process, *arguments, **kwargs)
        self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **auto_classes(model_class)}
        if model_class is type(self):
            return super().save_pretrained(save_directory, is_main_process, *arguments, **kwargs)
        registered, self._auto_class = self._auto_class, None  # transformers would save the wrapper's module
        try:
            saved = super().save_pretrained(save_directory, is_main_process, *arguments, **kwargs)
        finally:
            self._auto_class = registered
        if is_main_process:
            custom_object_save(model_class.__new__(model_class), save_directory)
        return saved
