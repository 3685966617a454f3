"""A layer of Memora with GLRU as one operation; see `block/fused_layer.py`."""

from torch import Tensor, nn

from ..block.fused_layer import LayerParts, layer_kernel, run_layer_kernel
from ..block.recurrent_state import RecurrentState
from ..units.gated_units import GLRU


def fused_memora_layer(layer: nn.Module, hidden: Tensor, inputs) -> tuple[Tensor, RecurrentState] | None:
    """The output (B, T, M) and the state after a `RecurrentLayer` with Memora's blocks.

    None where its modules have to be called.
    """
    block, mlp = layer.recurrent_block, layer.mlp
    unit, norms = block.recurrent_unit, (layer.recurrent_norm, layer.mlp_norm)
    if type(unit) is not GLRU:
        return None
    if block.norm_after_contraction or mlp.norm_after_contraction:
        return None
    maps = (
        *(unit.recurrence_gate, unit.input_gate, unit.input_projection, block.gate_proj, block.out_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
    states = (inputs.state["recurrent"],)
    parts = LayerParts(states, (unit,), norms, maps, (unit.nu,))
    if (family := layer_kernel("memora_layer_cpu", hidden, inputs, parts)) is None:
        return None
    matrices = [linear.weight for linear in maps]
    weights = unit.decay_rate(), norms[0].weight, *matrices[:5], norms[1].weight, *matrices[5:]
    eps = norms[0].eps, block.eps, norms[1].eps, mlp.eps
    output, state = run_layer_kernel(family, hidden, inputs.reset_mask, states, weights, eps)
    return output, {"recurrent": state}
