"""Detection of changes to a network, for caches that depend on it."""

from operator import attrgetter, is_, itemgetter

import torch
from torch import nn

_INTERNAL = vars(nn.Module()).keys() - {"training"}
_PLAIN = (bool, int, float, str, type(None))
_dtype = attrgetter("dtype")


class ModuleWatch:
    """Notices changed modules, parameters, buffers, attributes and hooks; values of parameters may change in place.

    Call `unchanged()` before using the cache. It runs once a byte, so everything is compared in `map`, without a loop
    in Python.
    """

    def __init__(self, root: nn.Module):
        modules = list(root.modules())
        self.modules = modules[1:]  # without the root: a reference to it would keep it alive
        self.sized = [vars(module) for module in modules]
        self.sized += [module._modules for module in modules if module._modules]
        self.hooks = [hooks for module in self.modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        plain, others = [], []
        for module in modules:
            names = vars(module).keys() - _INTERNAL
            values = [name for name in names if isinstance(vars(module)[name], _PLAIN)]
            plain += [(vars(module), values)] if values else []
            others += [(vars(module), name) for name in names.difference(values)]
            tables = (module._modules, module._parameters, module._buffers)
            others += [(table, name) for table in tables for name in table]
        self.plain_tables, self.getters = [table for table, _ in plain], [itemgetter(*names) for _, names in plain]
        self.tables, self.names = zip(*others, strict=True)
        self.objects = [table[name] for table, name in others]
        self.tensors = [value for value in self.objects if isinstance(value, torch.Tensor)]
        self.seen = self._look()
        # Hooks, and attributes that hide a method of the class, such as another `forward`.
        self.overridden = any(self.hooks) or any(
            callable(getattr(type(module), name, None)) for module in modules for name in vars(module)
        )

    def unchanged(self) -> bool:
        try:
            return all(map(is_, map(dict.get, self.tables, self.names), self.objects)) and self._look() == self.seen
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or has become a tensor
            return False

    def _look(self) -> tuple:
        values = [*map(itemgetter.__call__, self.getters, self.plain_tables)]
        addresses = [*map(torch.Tensor.data_ptr, self.tensors)]
        dtypes, classes, sizes = [*map(_dtype, self.tensors)], [*map(type, self.modules)], [*map(len, self.sized)]
        return any(self.hooks), values, addresses, dtypes, classes, sizes
