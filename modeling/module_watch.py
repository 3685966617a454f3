"""Noticing that a network was changed since something was derived from it."""

from torch import nn


class ModuleWatch:
    """Whether a network is still what it was: the same modules, parameters and attributes, no hooks.

    What stands for its `forward` has to ask before it does. The values of parameters may change in place.
    """

    def __init__(self, root: nn.Module):
        parents = [(parent._modules, name) for parent in root.modules() for name in parent._modules]
        self.modules = [
            (children, name, child, child.__class__, len(child.__dict__))
            for children, name in parents
            if (child := children[name]) is not None
        ]
        self.parameters = [
            (module._parameters, name, parameter, parameter.data_ptr(), parameter.dtype)
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        # What stands in front of a method of the class, such as another `forward`.
        self.shadowed = any(callable(getattr(type(m), name, None)) for m in root.modules() for name in m.__dict__)

    def unchanged(self) -> bool:
        if self.shadowed:
            return False
        for children, name, child, kind, attributes in self.modules:
            if (
                children.get(name) is not child
                or child.__class__ is not kind
                or child._forward_hooks
                or child._forward_pre_hooks
                or len(child.__dict__) != attributes  # something may stand in front of a method
            ):
                return False
        for parameters, name, parameter, address, dtype in self.parameters:
            if parameters.get(name) is not parameter or parameter.data_ptr() != address or parameter.dtype != dtype:
                return False
        return True
