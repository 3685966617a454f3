"""Detection of changes to a network, for caches that depend on it, and of weights whose memory was freed."""

from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from ..block.tensor_checks import check_memory, has_memory, is_traced

_PACKAGE = __package__.removesuffix(".step") + "."
# In a `StepLoop`; a look takes as long as the step of a small model.
STEPS_PER_LOOK = 64
_INTERNAL = vars(nn.Module()).keys() - {"training"}
_PLAIN_TYPES = (bool, int, float, str, type(None))
# All that tells whether a tensor is still the same numbers in the same memory.
_READ = (Tensor.data_ptr, attrgetter("dtype"), Tensor.stride, Tensor.numel, Tensor.is_neg)
_storage, _bytes = Tensor.untyped_storage, torch.UntypedStorage.nbytes


def is_plain_module(module: nn.Module) -> bool:
    """True for modules of torch and of this package; others, such as adapters, may depend on more than tensors."""
    place = type(module).__module__
    return place.startswith(("torch.nn.modules.", _PACKAGE))


def _content(value: object) -> dict | list | set | None:
    """The part of an attribute that can change in place: a container of plain values, or fields of a configuration."""
    if isinstance(value, PreTrainedConfig):
        return vars(value)
    if type(value) not in (dict, list, set):
        return None
    items = value.values() if isinstance(value, dict) else value
    return value if all(isinstance(item, (*_PLAIN_TYPES, tuple)) for item in items) else None


def _is_compared_by_identity(value: object) -> bool:
    """True for values of which an equal one may be another: tensors, containers, configurations."""
    return not isinstance(value, _PLAIN_TYPES) and type(value).__eq__ is not object.__eq__


class ModuleWatch:
    """Notices changed modules, parameters, buffers, attributes and hooks; values of parameters may change in place.

    Call `unchanged()` before using the cache. It runs once a byte, after a kernel that has read all weights, so it
    touches little memory and compares lists, whose items are first compared by identity, without a loop in Python.
    """

    def __init__(self, root: nn.Module):
        modules = list(root.modules())
        self.modules = modules[1:]  # without the root: a reference to it would keep it alive
        self.root, self.training, self.children = vars(root), root.training, root._modules.copy()
        self.sized = [vars(module) for module in modules]
        self.sized += [module._modules for module in modules if module._modules]
        self.hooks = [hooks for module in self.modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        getters, identical, contents = [], [], {}
        for module in modules:
            own, tables = vars(module), (module._modules, module._parameters, module._buffers)
            names = own.keys() - _INTERNAL
            for table, keys in ((own, names), *((table, table) for table in tables)):
                by_identity = [key for key in keys if _is_compared_by_identity(table[key])]
                identical += [(table, key) for key in by_identity]
                if equal := [key for key in keys if key not in by_identity]:
                    getters.append((itemgetter(*equal), table))
            contents |= {id(held): held for name in names if (held := _content(own[name])) is not None}
        self.getters, self.compared = zip(*getters, strict=True)
        self.tables, self.names = zip(*identical, strict=True) if identical else ((), ())
        self.objects = [table[name] for table, name in identical]
        tensors = [value for value in self.objects if isinstance(value, Tensor)]
        self.tensors = [tensor for tensor in tensors if has_memory(tensor)]
        self.contents = [*contents.values()]
        self.copies = [held.copy() for held in self.contents]
        self.seen = self._look()
        # Hooks, attributes that hide a method of the class, such as another `forward`, and tensors of other kinds.
        self.overridden = (
            any(self.hooks)
            or len(self.tensors) < len(tensors)
            or any(callable(getattr(type(module), name, None)) for module in modules for name in vars(module))
        )

    def root_unchanged(self) -> bool:
        """False if the root's mode or one of its children was changed; a small part of `unchanged()`."""
        return self.root["training"] is self.training and self.root["_modules"] == self.children

    def unchanged(self) -> bool:
        try:
            same = all(map(is_, map(dict.get, self.tables, self.names), self.objects))
            return same and self.contents == self.copies and self._look() == self.seen
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or has become a tensor
            return False

    def _look(self) -> tuple:
        values = [*map(call, self.getters, self.compared)]
        tensors = [[*map(read, self.tensors)] for read in _READ]
        classes, sizes = [*map(type, self.modules)], [*map(len, self.sized)]
        return any(self.hooks), values, tensors, classes, sizes


class StepLoop:
    """A loop of single steps of one model, which looks at all of the model at its first step and at every 64th.

    Between them it looks at the root's mode and children, and whether a hook was added to any module of the process.
    Other changes take effect up to 64 steps late. Until then the steps compute the model as it was: a compiled
    step keeps its weights' memory and checks that it was not freed or moved. Not for a CUDA graph, which does neither.
    """

    def __init__(self):
        self._watch: ModuleWatch | None = None
        self._left = self._hooks = 0

    def unchanged(self, watch: ModuleWatch) -> bool:
        """`watch.unchanged()`, as the last complete look has found it."""
        hooks = RemovableHandle.next_id  # counts all hooks; read before the look, as another thread may add one
        if watch is self._watch and self._left and hooks == self._hooks and watch.root_unchanged():
            self._left -= 1
            return True
        same = watch.unchanged()
        self._watch, self._hooks, self._left = watch, hooks, STEPS_PER_LOOK - 1 if same else 0
        return same


class _Storages:
    """The storages of a network's weights as they were when each was checked."""

    def __init__(self, root: nn.Module):
        tables = [t for module in root.modules() for t in (module._modules, module._parameters, module._buffers)]
        self.sized = [table for table in tables if table]
        self.tables, self.names = zip(*[(table, name) for table in tables for name in table], strict=True)
        self.objects = [table[name] for table, name in zip(self.tables, self.names, strict=True)]
        self.tensors = [value for value in self.objects if isinstance(value, Tensor) and has_memory(value)]
        self.seen = self._look()

    def unchanged(self) -> bool:
        return all(map(is_, map(dict.get, self.tables, self.names), self.objects)) and self._look() == self.seen

    def _look(self) -> tuple:
        return [*map(_bytes, map(_storage, self.tensors))], [*map(len, self.sized)]


_checked: WeakKeyDictionary[nn.Module, _Storages] = WeakKeyDictionary()


def check_weights(root: nn.Module, device: torch.device) -> None:
    """Raise a ValueError that names the first weight of `root` whose memory was freed; `device` is of its inputs."""
    if is_traced() or device.type == "meta":
        return
    found = _checked.get(root)
    if found is not None and found.unchanged():
        return
    found = _Storages(root)
    if not any(module._forward_pre_hooks or "forward" in vars(module) for module in root.modules()):
        _check_each(root)  # else these may bring weights back
    _checked[root] = found


def _check_each(root: nn.Module) -> None:
    for name, tensor in chain(root.named_parameters(), root.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"`{name}` is on the meta device, but the inputs are not; load the weights first.")
        if has_memory(tensor):
            check_memory(name, tensor)
