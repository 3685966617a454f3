"""LRU: linear recurrent units with gated linear units between them (Zucchet et al. 2023, section 2.2 and figure 1).

Recurrent channels are independent, so that each layer can learn online, exactly, from all of its past.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from ..block.linear_maps import linear_maps
from ..block.real_valued_inputs import RealValuedInputs
from ..block.recurrent_backbone import LayerInputs, RecurrentModel, RecurrentPreTrainedModel
from ..block.recurrent_causal_lm import RecurrentForCausalLM
from ..block.recurrent_sequence_classification import RecurrentForSequenceClassification
from ..block.recurrent_state import RecurrentState, upcast
from ..units.recurrent_unit import RecurrentUnit
from ..units.recurrent_units import build_layer_unit
from .configuration_lru import LruConfig


class LruReadOut(nn.Module):
    """y = Re(C h) + D ∘ u: with h as real numbers, the real part of any complex C is a real map."""

    def __init__(self, config: LruConfig, unit: RecurrentUnit):
        super().__init__()
        self.state_map = nn.Linear(unit.output_size, config.hidden_size, bias=False)
        self.skip = nn.Parameter(torch.empty(config.hidden_size))

    def reset_parameters(self) -> None:
        init.normal_(self.skip, mean=0.0, std=1.0)

    def forward(self, states: Tensor, inputs: Tensor) -> Tensor:
        return self.state_map(states.to(self.state_map.weight.dtype)) + self.skip.to(inputs.dtype) * inputs


class LruGLU(nn.Module):
    """(W_1 GeLU(y) + b_1) ∘ σ(W_2 GeLU(y) + b_2)."""

    def __init__(self, config: LruConfig):
        super().__init__()
        self.value_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.gate_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.dropout(nn.functional.gelu(hidden))
        value, gate = linear_maps(hidden, self.value_proj, self.gate_proj)
        return self.dropout(value * torch.sigmoid(gate))


class LruLayer(GradientCheckpointingLayer):
    """x + GLU(y) with u = LayerNorm(x), h the states of the unit that reads u, and y = Re(C h) + D ∘ u."""

    def __init__(self, config: LruConfig, layer_index: int):
        super().__init__()
        options = {"bias": config.recurrent_bias}
        if config.recurrent_unit == "lru":
            options |= {"r_min": config.r_min, "r_max": config.r_max, "max_phase": config.max_phase}
        width = config.hidden_size
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.recurrent_unit = build_layer_unit(
            config, width, layer_index, output_size=None if config.read_out else width, **options
        )
        self.read_out = LruReadOut(config, self.recurrent_unit) if config.read_out else None
        self.glu = LruGLU(config) if config.glu else nn.Identity()

    def forward(self, hidden: Tensor, inputs: LayerInputs) -> tuple[Tensor, RecurrentState]:
        normed = self.norm(hidden)
        states, final_state = self.recurrent_unit(
            normed, inputs.state["recurrent"], inputs.reset_mask, inputs.padding_mask
        )
        output = states.to(hidden.dtype) if self.read_out is None else self.read_out(states, normed)
        return hidden + self.glu(output), {"recurrent": final_state}


class LruPreTrainedModel(RecurrentPreTrainedModel):
    """Initialisation, loading and saving of LRU models, and the learning rates of their parameters."""

    config_class = LruConfig
    _no_split_modules = ["LruLayer"]  # noqa: RUF012 (transformers' own name and form)

    def parameter_learning_rate_factors(self) -> dict[str, float]:
        """Factors of the learning rate by parameter, where they are not 1: λ and γ learn more slowly."""
        return {
            f"{prefix}.{name}": self.config.learning_rate_factor
            for prefix, module in self.named_modules()
            if isinstance(module, RecurrentUnit)
            for name in module.no_weight_decay
        }


class LruModel(RealValuedInputs, LruPreTrainedModel, RecurrentModel):
    """Encoder and N layers: an embedding for tokens, a linear map with bias for real-valued inputs.

    The decoder reads the residual stream without a norm.
    """

    encoder_bias = True

    def build_layer(self, config: LruConfig, layer_index: int) -> nn.Module:
        return LruLayer(config, layer_index)


class LruForCausalLM(LruPreTrainedModel, RecurrentForCausalLM):
    """LRU with a head tied to its embedding."""

    backbone_class = LruModel


class LruForSequenceClassification(LruPreTrainedModel, RecurrentForSequenceClassification):
    """LRU that gives a whole sequence, of tokens or of real values, one label.

    The logits are the mean of all steps' logits. With `config.per_step_loss`, for online learning (section 4.3), the
    loss is the mean over the sequences of the mean over their steps.
    """

    backbone_class = LruModel

    def __init__(self, config: LruConfig):
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def sequence_loss(self, hidden, logits, labels, attention_mask, num_items_in_batch) -> Tensor:
        """With `config.per_step_loss`, where labels are classes, the loss of all steps."""
        if not self.config.per_step_loss:
            return super().sequence_loss(hidden, logits, labels, attention_mask, num_items_in_batch)
        steps = labels.unsqueeze(1).expand(hidden.shape[:2])
        losses = nn.functional.cross_entropy(upcast(self.score(hidden)).transpose(1, 2), steps, reduction="none")
        if attention_mask is None:
            losses = losses.mean(1)
        else:
            real = attention_mask != 0
            losses = (losses * real).sum(1) / real.sum(1)
        return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch
