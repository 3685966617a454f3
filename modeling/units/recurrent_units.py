"""The recurrent units by name (`config.recurrent_unit`): interchangeable parts of a block, which carry the state."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from ..block.configuration_recurrent import RecurrentConfig
from .delta_units import RWKV7, GatedDelta
from .dense_units import GRU, DenseLinear
from .gated_units import (
    GLRU,
    HGRN,
    QRNN,
    RGLRU,
    ComplexGLRU,
    ComplexGLRUConjugate,
    ComplexGLRUConjugateReadOut,
    ComplexGLRUReadOut,
    GateLoop,
    MinGRU,
    MinLSTM,
)
from .nonlinear_units import ELSTM, SLSTM, SRU, IndRNN
from .own_code import OWN_CODE, own_code_of
from .recurrent_unit import RecurrentUnit
from .state_space_units import GSS, H3, S5, Mamba2
from .time_invariant_units import LRU, ComplexLRU, ComplexLRUConjugate, RealLRU

_Unit = TypeVar("_Unit", bound=type[RecurrentUnit])

_UNITS: dict[str, type[RecurrentUnit]] = {
    "glru": GLRU,
    "complex_glru": ComplexGLRU,
    "complex_glru_conjugate": ComplexGLRUConjugate,
    "complex_glru_read_out": ComplexGLRUReadOut,
    "complex_glru_conjugate_read_out": ComplexGLRUConjugateReadOut,
    "rg_lru": RGLRU,
    "real_lru": RealLRU,
    "complex_lru": ComplexLRU,
    "complex_lru_conjugate": ComplexLRUConjugate,
    "mingru": MinGRU,
    "minlstm": MinLSTM,
    "hgrn": HGRN,
    "qrnn": QRNN,
    "s5": S5,
    "gss": GSS,
    "h3": H3,
    "mamba2": Mamba2,
    "gated_delta": GatedDelta,
    "rwkv7": RWKV7,
    "lru": LRU,
    "gateloop": GateLoop,
    "indrnn": IndRNN,
    "sru": SRU,
    "elstm": ELSTM,
    "slstm": SLSTM,
    "gru": GRU,
    "dense_linear": DenseLinear,
}
_BUILT_IN = frozenset(_UNITS)
# Units of this package, and registered ones.
RECURRENT_UNITS: Mapping[str, type[RecurrentUnit]] = MappingProxyType(_UNITS)


def register_recurrent_unit(name: str) -> Callable[[_Unit], _Unit]:
    """Class decorator that makes a unit of your own available as `config.recurrent_unit`.

    Checkpoints of models with this unit hold the file of the class. So the file may import only the standard library,
    numpy, safetensors, torch, transformers, and names of `hf_recurrent` with code in `hf_recurrent.modeling`. The code
    of a class in `__main__` or in a notebook is not saved.

    Args:
        name: name of the unit, which no unit of this package has.

    Raises:
        ValueError: the class is not a [`RecurrentUnit`], the name is taken by other code, or the file would not load
            from a checkpoint.
    """

    def register(unit_class: _Unit) -> _Unit:
        if not isinstance(unit_class, type) or not issubclass(unit_class, RecurrentUnit):
            raise ValueError(f"`{name}` registers {unit_class!r}; it must be a subclass of `RecurrentUnit`.")
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"`{unit_class.__name__}` is registered as {name!r}; the name must be an identifier.")
        if name in _BUILT_IN:
            raise ValueError(f"{name!r} is a recurrent unit of this package; choose another name.")
        code, earlier = own_code_of(unit_class), OWN_CODE.get(name)
        if earlier is not None and (code.text is None or code.text != earlier.text):
            raise ValueError(
                f"The recurrent unit {name!r} is registered already, with other code, from "
                f"`{earlier.file or '__main__'}`; choose another name, or restart Python after a change."
            )
        _UNITS[name], OWN_CODE[name] = unit_class, code
        return unit_class

    return register


def build_recurrent_unit(name: str, input_size: int, state_size: int, **options) -> RecurrentUnit:
    """The unit of that name; `options` are the keyword arguments of [`RecurrentUnit`]. Raises its ValueErrors too."""
    if name not in RECURRENT_UNITS:
        nearest = difflib.get_close_matches(str(name), RECURRENT_UNITS, 1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"`recurrent_unit` is {name!r}; it must be one of {', '.join(sorted(RECURRENT_UNITS))}.{hint} Import the "
            "file of a unit of your own before the model is built (`--import FILE` on the command line)."
        )
    return RECURRENT_UNITS[name](input_size, state_size, **options)


def build_layer_unit(
    config: RecurrentConfig, input_size: int, layer_index: int, output_size: int | None = None, **options
) -> RecurrentUnit:
    """The unit of one layer, by the configuration; `output_size` is the width that the layer needs, None for any."""
    unit = build_recurrent_unit(
        config.recurrent_unit,
        input_size,
        config.state_size,
        layer_index=layer_index,
        num_layers=config.num_hidden_layers,
        allow_negative_eigenvalues=config.allow_negative_eigenvalues,
        **options,
    )
    if output_size not in (None, unit.output_size):
        raise ValueError(
            f"`recurrent_unit` is a {type(unit).__name__} whose output has {unit.output_size} numbers; it must have "
            f"{output_size}, because the layer adds it to its input."
        )
    return unit
