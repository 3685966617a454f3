"""LRU: linear recurrent units with gated linear units between them (Zucchet et al. 2023, section 2.2 and figure 1).

Recurrent channels that know nothing of each other, so that each layer can learn online, exactly, from all of its past.
M (the paper's H) is the model width, S state width (the paper's N complex numbers are S = 2 N real ones), N layers.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_lru import LruConfig
from .real_valued_inputs import RealValuedInputs, check_reads_tokens
from .recurrent_causal_lm import LayerInputs, RecurrentForCausalLM, RecurrentModel, RecurrentPreTrainedModel
from .recurrent_sequence_classification import RecurrentForSequenceClassification, RecurrentSequenceClassifierOutput
from .recurrent_state import RecurrentState, state_dtype
from .recurrent_unit import RecurrentUnit
from .recurrent_units import build_recurrent_unit


class LruReadOut(nn.Module):
    """y = Re(C h) + D ∘ u: with h as real numbers, the real part of any complex C is a real map."""

    def __init__(self, config: LruConfig):
        super().__init__()
        self.state_map = nn.Linear(config.state_size, config.hidden_size, bias=False)
        self.skip = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, states: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return self.state_map(states.to(self.state_map.weight.dtype)) + self.skip.to(inputs.dtype) * inputs


class LruGLU(nn.Module):
    """(W_1 GeLU(y) + b_1) ∘ σ(W_2 GeLU(y) + b_2)."""

    def __init__(self, config: LruConfig):
        super().__init__()
        self.value_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.gate_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(nn.functional.gelu(hidden))
        return self.dropout(self.value_proj(hidden) * torch.sigmoid(self.gate_proj(hidden)))


class LruLayer(GradientCheckpointingLayer):
    """x + GLU(y) with u = LayerNorm(x), h the states of the unit that reads u, and y = Re(C h) + D ∘ u."""

    def __init__(self, config: LruConfig, layer_index: int):
        super().__init__()
        ring = {"r_min": config.r_min, "r_max": config.r_max, "max_phase": config.max_phase}
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.recurrent_unit = build_recurrent_unit(
            config.recurrent_unit,
            config.hidden_size,
            config.state_size,
            layer_index=layer_index,
            num_layers=config.num_hidden_layers,
            bias=config.recurrent_bias,
            allow_negative_eigenvalues=config.allow_negative_eigenvalues,
            **(ring if config.recurrent_unit == "lru" else {}),
        )
        self.read_out = LruReadOut(config) if config.read_out else None
        self.glu = LruGLU(config) if config.glu else nn.Identity()

    def forward(self, hidden: torch.Tensor, inputs: LayerInputs) -> tuple[torch.Tensor, RecurrentState]:
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

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LruReadOut):
            init.normal_(module.skip, mean=0.0, std=1.0)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def parameter_learning_rate_factors(self) -> dict[str, float]:
        """What trainers multiply a parameter's learning rate by, where that is not 1: slower for λ and γ."""
        return {
            f"{prefix}.{name}": self.config.learning_rate_factor
            for prefix, module in self.named_modules()
            if isinstance(module, RecurrentUnit)
            for name in module.no_weight_decay
        }


class LruModel(RealValuedInputs, LruPreTrainedModel, RecurrentModel):
    """Encoder and N layers: an embedding for tokens, a linear map with bias for real-valued inputs."""

    encoder_bias = True

    def build_layer(self, config: LruConfig, layer_index: int) -> nn.Module:
        return LruLayer(config, layer_index)

    def build_final_norm(self, config: LruConfig) -> nn.Module:
        # The decoder reads the residual stream as it is.
        return nn.Identity()


class LruForCausalLM(LruPreTrainedModel, RecurrentForCausalLM):
    """LRU with a head tied to its embedding.

    Raises:
        ValueError: `config.input_size` is set: bytes are predicted from bytes.
    """

    backbone_class = LruModel

    def __init__(self, config: LruConfig):
        check_reads_tokens(config)
        super().__init__(config)


class LruForSequenceClassification(LruPreTrainedModel, RecurrentForSequenceClassification):
    """LRU that gives a whole sequence, of tokens or of real values, one label.

    The logits are the mean of all steps' logits. With `config.per_step_loss` every step is asked for the label, as
    learning online needs it (section 4.3): the loss is the mean over the sequences of the mean over their steps.
    """

    backbone_class = LruModel

    def __init__(self, config: LruConfig):
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> RecurrentSequenceClassifierOutput | tuple:
        """Read whole sequences; `input_values` are real, (B, T, `config.input_size`), in place of `input_ids`.

        See [`RecurrentForSequenceClassification.forward`] for the other arguments; for `config.per_step_loss` labels
        are classes.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "inputs_embeds": inputs_embeds,
            "input_values": input_values,
        }
        if labels is None or not self.config.per_step_loss:
            return super().forward(
                **inputs,
                labels=labels,
                output_hidden_states=output_hidden_states,
                return_dict=return_dict,
                **kwargs,
            )
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        outputs = super().forward(**inputs, output_hidden_states=True, return_dict=True, **kwargs)
        losses = self._losses_of_steps(outputs.hidden_states[-1], labels, attention_mask)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        output = RecurrentSequenceClassifierOutput(
            loss=losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch,
            logits=outputs.logits,
            hidden_states=outputs.hidden_states if output_hidden_states else None,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _losses_of_steps(self, hidden, labels, attention_mask) -> torch.Tensor:
        """Each sequence's mean cross-entropy over its real steps, (B,)."""
        logits = self.score(hidden)
        steps = labels.unsqueeze(1).expand(hidden.shape[:2])
        losses = nn.functional.cross_entropy(
            logits.to(state_dtype(logits.dtype)).transpose(1, 2), steps, reduction="none"
        )
        if attention_mask is None:
            return losses.mean(1)
        real = attention_mask != 0
        return (losses * real).sum(1) / real.sum(1)


# The code travels with every checkpoint, for machines without this package.
LruModel.register_for_auto_class("AutoModel")
LruForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LruForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
