"""The compiled pass over sensitivities on a CPU, used by [`SensitivityEngine`].

`sensitivities_cpu.c` is plain C, loaded with ctypes, which releases the interpreter's lock while it computes. This
module checks and prepares the tensors. Importing it raises ImportError where the kernel was not built, or was built
from another version of its source.

Shape letters: B streams, C channels of a group, G channel groups, I inputs of a linear map. `rows` is the number of
outputs of a map in a group.
"""

import ctypes
import struct

import torch

from .addresses import address, check_shapes
from .compiled import load_library
from .thread_count import free_threads
from .thread_pool import use_pool

_VERSION = 3  # of the struct in sensitivities_cpu.c
# Below this, a second thread costs more than it takes over.
_SERIAL_ELEMENTS = 1 << 22

_library = load_library("_sensitivities_cpu", "hf_sensitivities_version", _VERSION)
use_pool(_library, "sensitivities")
_functions = {torch.float32: _library.hf_sensitivities_float32, torch.float64: _library.hf_sensitivities_float64}
for _function in _functions.values():
    _function.argtypes, _function.restype = (ctypes.c_char_p,), None
_pack = struct.Struct("=11q").pack


def can_advance(carried: torch.Tensor, steps: int) -> bool:
    """True where [`advance`] supports sensitivities (B, C, rows, G, I) and blocks of `steps` steps."""
    return (
        steps == 1
        and carried.shape[1] == 1
        and carried.device.type == "cpu"
        and carried.dtype in _functions
        and carried.is_contiguous()
    )


def advance(
    carried: torch.Tensor,
    transition: torch.Tensor,
    of_rows: torch.Tensor,
    inputs: torch.Tensor,
    grad_state: torch.Tensor | None,
    gradient: torch.Tensor | None,
) -> None:
    """S ← J S + e xᵀ in place, and gradient += Σ_b grad_state ∘ S with the old S, all of one type.

    Args:
        carried: S, (B, 1, rows, G, I) for which [`can_advance`] holds.
        transition: J, (B, 1, 1, G).
        of_rows: e, (B, 1, 1, rows, G).
        inputs: x, (B, 1, I).
        grad_state: (B, 1, G); required with a gradient.
        gradient: contiguous (rows, G, I), or None.
    """
    batch_size, _, parts, groups, columns = carried.shape
    rows = parts * groups
    shaped = {
        "carried": (carried, (batch_size, 1, parts, groups, columns)),
        "transition": (transition, (batch_size, 1, 1, groups)),
        "of_rows": (of_rows, (batch_size, 1, 1, parts, groups)),
        "inputs": (inputs, (batch_size, 1, columns)),
    }
    if gradient is not None:
        shaped["grad_state"] = grad_state, (batch_size, 1, groups)
        shaped["gradient"] = gradient, (parts, groups, columns)
    check_shapes(shaped)
    tensors = {  # keeps copies alive
        name: tensor if name in ("carried", "gradient") else tensor.resolve_neg().contiguous()
        for name, (tensor, _) in shaped.items()
    }
    pointers = [address(name, tensor, carried.dtype, tensor.numel()) for name, tensor in tensors.items()]
    pointers += [0, 0] if gradient is None else []
    threads = min(free_threads(), rows) if carried.numel() >= _SERIAL_ELEMENTS else 1
    _functions[carried.dtype](_pack(batch_size, rows, columns, groups, threads, *pointers))
