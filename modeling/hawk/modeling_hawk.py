"""Hawk: gated recurrent blocks of a temporal convolution and RG-LRU, and gated MLPs (De et al. 2024, section 2).

In the sizes of the Memora paper: no biases, dense gates, MLP of width 3 M, embedding tied to the head.
"""

from torch import Tensor, nn

from ..block.linear_maps import linear_map, linear_maps
from ..block.recurrent_backbone import LayerInputs, RecurrentLayer, RecurrentModel, RecurrentPreTrainedModel
from ..block.recurrent_blocks import Contraction, TemporalConvolution, gated_gelu
from ..block.recurrent_causal_lm import RecurrentForCausalLM
from ..block.recurrent_sequence_classification import RecurrentForSequenceClassification
from ..block.recurrent_state import RecurrentState
from ..block.training_kernels import is_plain_layer
from ..units.recurrent_units import build_layer_unit
from .configuration_hawk import HawkConfig
from .fused_layer import fused_hawk_layer


class HawkRecurrentBlock(nn.Module):
    """W_out ( GeLU(W_gate u) ∘ unit(conv(W_x u)) )."""

    def __init__(self, config: HawkConfig, layer_index: int):
        super().__init__()
        unit = build_layer_unit(config, config.state_size, layer_index)
        self.gate_proj = nn.Linear(config.hidden_size, unit.output_size, bias=False)
        self.in_proj = nn.Linear(config.hidden_size, config.state_size, bias=False)
        self.convolution = TemporalConvolution(config.state_size, config.conv_kernel)
        self.recurrent_unit = unit
        self.out_proj = Contraction(unit.output_size, config.hidden_size)

    def forward(self, hidden: Tensor, inputs: LayerInputs) -> tuple[Tensor, RecurrentState]:
        gate, projected = linear_maps(hidden, self.gate_proj, self.in_proj)
        convolved, taps = self.convolution(projected, inputs.state["convolution"], inputs.reset_mask, inputs.lengths)
        recurrent, final_state = self.recurrent_unit(
            convolved, inputs.state["recurrent"], inputs.reset_mask, inputs.padding_mask
        )
        output = linear_map(self.out_proj, gated_gelu(gate, recurrent.to(gate.dtype)))
        return output, {"recurrent": final_state, "convolution": taps}

    def fused_layer(
        self, layer: nn.Module, hidden: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, RecurrentState] | None:
        """The whole layer of this block and a [`HawkMLP`] as one kernel, where there is one for its inputs."""
        if not (is_plain_layer(self, HawkRecurrentBlock) and is_plain_layer(layer.mlp, HawkMLP)):
            return None
        return fused_hawk_layer(layer, hidden, inputs)


class HawkMLP(nn.Module):
    """W_down ( GeLU(W_g u) ∘ W_u u )."""

    def __init__(self, config: HawkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Contraction(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = linear_maps(hidden, self.gate_proj, self.up_proj)
        return linear_map(self.down_proj, gated_gelu(gate, value))


class HawkPreTrainedModel(RecurrentPreTrainedModel):
    """Initialisation, loading and saving of Hawk models."""

    config_class = HawkConfig
    _no_split_modules = ["RecurrentLayer"]  # noqa: RUF012 (transformers' own name and form)


class HawkModel(HawkPreTrainedModel, RecurrentModel):
    """Embedding, N Hawk layers and a final RMSNorm."""

    def build_layer(self, config: HawkConfig, layer_index: int) -> nn.Module:
        return RecurrentLayer(config, HawkRecurrentBlock(config, layer_index), HawkMLP(config))

    def build_final_norm(self, config: HawkConfig) -> nn.Module:
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def layer_state_shapes(self, layer_index: int) -> dict[str, tuple[int, ...]]:
        taps = (self.config.conv_kernel - 1, self.config.state_size)
        return {**super().layer_state_shapes(layer_index), "convolution": taps}


class HawkForCausalLM(HawkPreTrainedModel, RecurrentForCausalLM):
    """Hawk with a head tied to its embedding."""

    backbone_class = HawkModel


class HawkForSequenceClassification(HawkPreTrainedModel, RecurrentForSequenceClassification):
    """Hawk that gives a whole sequence one label."""

    backbone_class = HawkModel
