"""A layer of Hawk with RG-LRU as one operation; see `block/fused_layer.py`."""

from torch import Tensor, nn

from ..block.fused_layer import LayerParts, layer_kernel, run_layer_kernel
from ..block.recurrent_blocks import TemporalConvolution, episode_numbers, taps_after
from ..block.recurrent_state import RecurrentState
from ..units.gated_units import RGLRU


def fused_hawk_layer(layer: nn.Module, hidden: Tensor, inputs) -> tuple[Tensor, RecurrentState] | None:
    """The output (B, T, M) and the state after a `RecurrentLayer` with Hawk's blocks.

    None where its modules have to be called.
    """
    block, mlp, taps = layer.recurrent_block, layer.mlp, inputs.state["convolution"]
    unit, convolution, norms = block.recurrent_unit, block.convolution, (layer.recurrent_norm, layer.mlp_norm)
    if (type(unit), type(convolution)) != (RGLRU, TemporalConvolution) or convolution.kernel_size == 1:
        return None
    maps = (
        *(block.gate_proj, block.in_proj, unit.recurrence_gate, unit.input_gate, block.out_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
    states, vectors = (inputs.state["recurrent"], taps), (unit.recurrent_param, convolution.weight)
    parts = LayerParts(states, (unit, convolution), norms, maps, vectors)
    if (family := layer_kernel("hawk_layer_cpu", hidden, inputs, parts)) is None:
        return None
    matrices = [linear.weight for linear in maps]
    weights = (
        *(unit.decay_rate(), norms[0].weight, convolution.weight, *matrices[:5]),
        *(norms[1].weight, *matrices[5:]),
    )
    eps, reset_mask = (norms[0].eps, norms[1].eps), inputs.reset_mask
    output, state, recent = run_layer_kernel(family, hidden, reset_mask, states, weights, eps)
    episode = None if reset_mask is None else episode_numbers(reset_mask, convolution.kernel_size - 1)
    return output, {"recurrent": state, "convolution": taps_after(taps, recent, None, episode)}
