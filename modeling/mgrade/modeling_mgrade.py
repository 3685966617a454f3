"""mGRADE: delay convolution, minimal gated recurrence and MLP in every layer (mGRADE, section 3).

The convolution keeps the last Γ inputs exactly, the recurrence all earlier ones in compressed form. Without the
convolution it is the paper's minGRU, without the recurrence its TCN. M is the model width (the paper's H).
"""

from typing import NamedTuple

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ..block.linear_maps import linear_map
from ..block.real_valued_inputs import RealValuedInputs
from ..block.recurrent_backbone import LayerInputs, RecurrentModel, RecurrentPreTrainedModel
from ..block.recurrent_causal_lm import RecurrentForCausalLM
from ..block.recurrent_sequence_classification import RecurrentForSequenceClassification
from ..block.recurrent_state import RecurrentState
from ..units.recurrent_units import build_layer_unit
from .configuration_mgrade import MgradeConfig
from .delay_convolution import DelayConvolution


class MemoryFootprint(NamedTuple):
    """Floats that a model needs at inference (mGRADE, appendix B)."""

    parameters: int
    buffer: int

    @property
    def total(self) -> int:
        """Parameters and buffer: the paper's total memory."""
        return self.parameters + self.buffer


class MgradeMLP(nn.Module):
    """W_2 act(W_1 x + b_1) + b_2, or with one layer act(W_1 x + b_1)."""

    def __init__(self, config: MgradeConfig):
        super().__init__()
        width = config.intermediate_size if config.mlp_layers == 2 else config.hidden_size
        self.up_proj = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(width, config.hidden_size) if config.mlp_layers == 2 else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        return linear_map(self.down_proj, self.activation(linear_map(self.up_proj, hidden)))


class MgradeLayer(GradientCheckpointingLayer):
    """x = conv(u);  x = x + minGRU(x);  x = x + MLP(x);  LayerNorm(x) (figure 1B)."""

    def __init__(self, config: MgradeConfig, layer_index: int):
        super().__init__()
        width = config.hidden_size
        self.convolution = self.recurrent_unit = self.mlp = None
        if config.spacing is not None:
            self.convolution = DelayConvolution(
                width,
                config.tap_positions(layer_index),
                config.receptive_fields()[layer_index],
                learned=config.spacing == "learned",
                uniform=config.position_init == "uniform",
                interpolation_width=config.interpolation_width,
            )
        if config.recurrent_unit is not None:
            self.recurrent_unit = build_layer_unit(config, width, layer_index, output_size=width, bias=True)
        if config.mlp_layers > 0:
            self.mlp = MgradeMLP(config)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps) if config.layer_norm else nn.Identity()

    def forward(self, hidden: Tensor, inputs: LayerInputs) -> tuple[Tensor, RecurrentState]:
        state = {}
        if self.convolution is not None:
            hidden, state["convolution"] = self.convolution(
                hidden, inputs.state["convolution"], inputs.reset_mask, inputs.lengths
            )
        if self.recurrent_unit is not None:
            recurrent, state["recurrent"] = self.recurrent_unit(
                hidden, inputs.state["recurrent"], inputs.reset_mask, inputs.padding_mask
            )
            hidden = hidden + recurrent.to(hidden.dtype)
        if self.mlp is not None:
            hidden = hidden + self.mlp(hidden)
        # In the order of the inputs: a compiled model would build another graph for another order.
        return self.norm(hidden), {part: state[part] for part in inputs.state}


class MgradePreTrainedModel(RecurrentPreTrainedModel):
    """Initialisation, loading and saving of mGRADE models, and their memory at inference."""

    config_class = MgradeConfig
    _no_split_modules = ["MgradeLayer"]  # noqa: RUF012 (transformers' own name and form)
    # In bfloat16 a position above 256 would be wrong by more than a step.
    _keep_in_fp32_modules_strict = ["positions"]  # noqa: RUF012

    def memory_footprint(self) -> MemoryFootprint:
        """Parameters and buffered activations, in floats, as appendix B counts them.

        The buffer holds the inputs of the convolutions, M · Σ_l Γ_l for each stream; the recurrent state, M floats a
        layer, is not in the paper's count.
        """
        buffer = self.config.hidden_size * sum(self.config.receptive_fields())
        return MemoryFootprint(self.num_parameters(), buffer)


class MgradeModel(RealValuedInputs, MgradePreTrainedModel, RecurrentModel):
    """Encoder and N mGRADE layers: an embedding for tokens, a linear map without bias for real-valued inputs."""

    def build_layer(self, config: MgradeConfig, layer_index: int) -> nn.Module:
        return MgradeLayer(config, layer_index)

    def layer_state_shapes(self, layer_index: int) -> dict[str, tuple[int, ...]]:
        config, shapes = self.config, {}
        if config.recurrent_unit is not None:
            shapes["recurrent"] = (config.state_size,)
        if config.spacing is not None:
            shapes["convolution"] = (config.receptive_fields()[layer_index], config.hidden_size)
        return shapes


class MgradeForCausalLM(MgradePreTrainedModel, RecurrentForCausalLM):
    """mGRADE with a decoder of its own, or tied to the encoder with `config.tie_word_embeddings`."""

    backbone_class = MgradeModel


class MgradeForSequenceClassification(MgradePreTrainedModel, RecurrentForSequenceClassification):
    """mGRADE that gives a whole sequence, of tokens or of real values, one label."""

    backbone_class = MgradeModel
