"""Memora: a recurrent-only language model of gated linear recurrent units (Memora, section 4).

In the order of the paper's section: the gated recurrent block, the gated MLP, the layer, the model. LN is LayerNorm
without parameters.
"""

from torch import Tensor, nn

from ..block.gated_norm import gated_norm
from ..block.linear_maps import linear_map, linear_maps
from ..block.recurrent_backbone import LayerInputs, RecurrentLayer, RecurrentModel, RecurrentPreTrainedModel
from ..block.recurrent_blocks import Contraction, layer_norm
from ..block.recurrent_causal_lm import RecurrentForCausalLM
from ..block.recurrent_sequence_classification import RecurrentForSequenceClassification
from ..block.recurrent_state import RecurrentState
from ..block.training_kernels import is_plain_layer
from ..units.recurrent_units import build_layer_unit
from .configuration_memora import MemoraConfig
from .fused_layer import fused_memora_layer


class MemoraRecurrentBlock(nn.Module):
    """W_out · LN( GeLU(LN(W_gate u)) ∘ LN(unit(u)) )."""

    def __init__(self, config: MemoraConfig, layer_index: int):
        super().__init__()
        self.eps = config.norm_eps
        self.norm_after_contraction = config.norm_after_contraction
        unit = build_layer_unit(config, config.hidden_size, layer_index)
        self.gate_proj = nn.Linear(config.hidden_size, unit.output_size, bias=False)
        self.recurrent_unit = unit
        self.out_proj = Contraction(unit.output_size, config.hidden_size)

    def forward(self, hidden: Tensor, inputs: LayerInputs) -> tuple[Tensor, RecurrentState]:
        gate = linear_map(self.gate_proj, hidden)
        recurrent, final_state = self.recurrent_unit(
            hidden, inputs.state["recurrent"], inputs.reset_mask, inputs.padding_mask
        )
        output = linear_map(self.out_proj, gated_norm(gate, recurrent, self.eps))
        if self.norm_after_contraction:
            output = layer_norm(output, self.eps)
        return output, {"recurrent": final_state}

    def fused_layer(
        self, layer: nn.Module, hidden: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, RecurrentState] | None:
        """The whole layer of this block and a [`MemoraMLP`] as one kernel, where there is one for its inputs."""
        if not (is_plain_layer(self, MemoraRecurrentBlock) and is_plain_layer(layer.mlp, MemoraMLP)):
            return None
        return fused_memora_layer(layer, hidden, inputs)


class MemoraMLP(nn.Module):
    """W_down · LN( GeLU(LN(W_g u)) ∘ LN(W_u u) )."""

    def __init__(self, config: MemoraConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.norm_after_contraction = config.norm_after_contraction
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Contraction(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = linear_maps(hidden, self.gate_proj, self.up_proj)
        output = linear_map(self.down_proj, gated_norm(gate, value, self.eps))
        return layer_norm(output, self.eps) if self.norm_after_contraction else output


class MemoraPreTrainedModel(RecurrentPreTrainedModel):
    """Initialisation, loading and saving of Memora models."""

    config_class = MemoraConfig
    _no_split_modules = ["RecurrentLayer"]  # noqa: RUF012 (transformers' own name and form)


class MemoraModel(MemoraPreTrainedModel, RecurrentModel):
    """Embedding, N Memora layers and a final norm without parameters."""

    def build_layer(self, config: MemoraConfig, layer_index: int) -> nn.Module:
        return RecurrentLayer(config, MemoraRecurrentBlock(config, layer_index), MemoraMLP(config))

    def build_final_norm(self, config: MemoraConfig) -> nn.Module:
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps, elementwise_affine=False)


class MemoraForCausalLM(MemoraPreTrainedModel, RecurrentForCausalLM):
    """Memora with a head tied to its embedding."""

    backbone_class = MemoraModel


class MemoraForSequenceClassification(MemoraPreTrainedModel, RecurrentForSequenceClassification):
    """Memora that gives a whole sequence one label."""

    backbone_class = MemoraModel
