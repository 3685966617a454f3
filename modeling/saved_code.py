"""The code that travels with a checkpoint: the classes that it names, and the files that hold them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


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


@contextmanager
def named_as(wrapper: type, cls: type) -> Iterator[None]:
    """Inside the block, a class has the module and the name of another, by which transformers finds its code."""
    before = wrapper.__module__, wrapper.__name__
    wrapper.__module__, wrapper.__name__ = cls.__module__, cls.__name__
    try:
        yield
    finally:
        wrapper.__module__, wrapper.__name__ = before


class SavedCode:
    """For a `PreTrainedModel`: saves its own code, not that of a wrapper, and names all classes of its family."""

    def save_pretrained(self, save_directory, *arguments: Any, **kwargs: Any) -> Any:
        """As `transformers.PreTrainedModel.save_pretrained`."""
        model_class = defining_class(self)
        if self._auto_class is not None and model_class.__module__ != "__main__":
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **auto_classes(model_class)}
        with named_as(type(self), model_class):
            return super().save_pretrained(save_directory, *arguments, **kwargs)
