"""The recurrent units by name (`config.recurrent_unit`): interchangeable parts of a block, which carry the state."""

from .configuration_recurrent import RecurrentConfig
from .dense_units import GRU, DenseLinear
from .gated_units import GLRU, HGRN, QRNN, RGLRU, ComplexGLRU, ComplexGLRUConjugate, MinGRU
from .nonlinear_units import IndRNN
from .recurrent_unit import RecurrentUnit
from .time_invariant_units import LRU, S5, ComplexLRU, ComplexLRUConjugate, RealLRU

RECURRENT_UNITS: dict[str, type[RecurrentUnit]] = {
    "glru": GLRU,
    "complex_glru": ComplexGLRU,
    "complex_glru_conjugate": ComplexGLRUConjugate,
    "rg_lru": RGLRU,
    "real_lru": RealLRU,
    "complex_lru": ComplexLRU,
    "complex_lru_conjugate": ComplexLRUConjugate,
    "mingru": MinGRU,
    "hgrn": HGRN,
    "qrnn": QRNN,
    "s5": S5,
    "lru": LRU,
    "indrnn": IndRNN,
    "gru": GRU,
    "dense_linear": DenseLinear,
}


def build_recurrent_unit(name: str, input_size: int, state_size: int, **options) -> RecurrentUnit:
    """The unit of that name; `options` are the keyword arguments of [`RecurrentUnit`].

    Raises:
        ValueError: `name` is unknown, or the unit does not support these sizes.
    """
    if name not in RECURRENT_UNITS:
        raise ValueError(f"`recurrent_unit` is {name!r}; it must be one of {sorted(RECURRENT_UNITS)}.")
    return RECURRENT_UNITS[name](input_size, state_size, **options)


def build_block_unit(config: RecurrentConfig, input_size: int, layer_index: int) -> RecurrentUnit:
    """The unit of one layer's block, by the configuration."""
    return build_recurrent_unit(
        config.recurrent_unit,
        input_size,
        config.state_size,
        layer_index=layer_index,
        num_layers=config.num_hidden_layers,
        allow_negative_eigenvalues=config.allow_negative_eigenvalues,
    )
