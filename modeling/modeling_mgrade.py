"""mGRADE: delay convolution, minimal gated recurrence and MLP in every layer (mGRADE, section 3).

The convolution remembers the last Γ inputs as they were, the recurrence all before them in compressed form. Without
the one it is the paper's minGRU, without the other its TCN. M (the paper's H) is the model width, K taps, N layers.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_mgrade import MgradeConfig
from .delay_convolution import DelayConvolution
from .recurrent_causal_lm import (
    LayerInputs,
    RecurrentForCausalLM,
    RecurrentModel,
    RecurrentModelOutput,
    RecurrentPreTrainedModel,
)
from .recurrent_sequence_classification import RecurrentForSequenceClassification, RecurrentSequenceClassifierOutput
from .recurrent_state import RecurrentState
from .recurrent_units import build_recurrent_unit


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

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.up_proj(hidden)))


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
            self.recurrent_unit = build_recurrent_unit(
                config.recurrent_unit,
                width,
                width,
                layer_index=layer_index,
                num_layers=config.num_hidden_layers,
                bias=True,
                allow_negative_eigenvalues=config.allow_negative_eigenvalues,
            )
        if config.mlp_layers > 0:
            self.mlp = MgradeMLP(config)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps) if config.layer_norm else nn.Identity()

    def forward(self, hidden: torch.Tensor, inputs: LayerInputs) -> tuple[torch.Tensor, RecurrentState]:
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
        # In the order they came in: another order would be another graph to a compiled model.
        return self.norm(hidden), {part: state[part] for part in inputs.state}


class MgradePreTrainedModel(RecurrentPreTrainedModel):
    """Initialisation, loading and saving of mGRADE models, and what they take at inference."""

    config_class = MgradeConfig
    _no_split_modules = ["MgradeLayer"]  # noqa: RUF012 (transformers' own name and form)
    # In bfloat16 a position above 256 would be wrong by more than a step.
    _keep_in_fp32_modules_strict = ["positions"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DelayConvolution):
            module.reset_parameters()
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def memory_footprint(self) -> MemoryFootprint:
        """Parameters and buffered activations, in floats, as appendix B counts them.

        The buffer is what the convolutions carry, M · Σ_l Γ_l for each stream; the recurrent state, M floats a layer,
        is not in the paper's count.
        """
        buffer = self.config.hidden_size * sum(self.config.receptive_fields())
        return MemoryFootprint(self.num_parameters(), buffer)


class MgradeModel(MgradePreTrainedModel, RecurrentModel):
    """Encoder and N mGRADE layers: an embedding for tokens, a linear map without bias for real-valued inputs."""

    def __init__(self, config: MgradeConfig):
        super().__init__(config)
        if config.input_size is not None:
            self.embed_tokens = nn.Linear(config.input_size, config.hidden_size, bias=False)
            self.post_init()

    def build_layer(self, config: MgradeConfig, layer_index: int) -> nn.Module:
        return MgradeLayer(config, layer_index)

    def build_final_norm(self, config: MgradeConfig) -> nn.Module:
        # Every layer ends with its own norm.
        return nn.Identity()

    def layer_state_shapes(self, layer_index: int) -> dict[str, tuple[int, ...]]:
        config, shapes = self.config, {}
        if config.recurrent_unit is not None:
            shapes["recurrent"] = (config.state_size,)
        if config.spacing is not None:
            shapes["convolution"] = (config.receptive_fields()[layer_index], config.hidden_size)
        return shapes

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        state: RecurrentState | None = None,
        reset_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> RecurrentModelOutput | tuple:
        """Read a block. `input_values` are real, (B, T, `config.input_size`), in place of `input_ids`.

        See [`RecurrentForCausalLM.forward`] for the other arguments.

        Raises:
            ValueError: what is given is not what the encoder reads, or a shape does not fit.
        """
        if input_values is not None:
            if input_ids is not None or inputs_embeds is not None:
                raise ValueError("Give exactly one of `input_ids`, `inputs_embeds` and `input_values`.")
            inputs_embeds = self._encode(input_values)
        elif input_ids is not None and self.config.input_size is not None:
            raise ValueError(
                f"This model reads real values (`config.input_size` is {self.config.input_size}); "
                "give `input_values` in place of `input_ids`."
            )
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            state=state,
            reset_mask=reset_mask,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            **kwargs,
        )

    def _encode(self, input_values: torch.Tensor) -> torch.Tensor:
        size = self.config.input_size
        if size is None:
            raise ValueError("`input_values` are given, but this model reads tokens: `config.input_size` is None.")
        if input_values.dim() != 3 or input_values.shape[-1] != size:
            raise ValueError(f"`input_values` has shape {tuple(input_values.shape)}; it must be (B, T, {size}).")
        return self.embed_tokens(input_values.to(self.embed_tokens.weight.dtype))


class MgradeForCausalLM(MgradePreTrainedModel, RecurrentForCausalLM):
    """mGRADE with a decoder of its own, or tied to the encoder with `config.tie_word_embeddings`.

    Raises:
        ValueError: `config.input_size` is set: bytes are predicted from bytes.
    """

    backbone_class = MgradeModel

    def __init__(self, config: MgradeConfig):
        if config.input_size is not None:
            raise ValueError(
                f"`input_size` is {config.input_size}, but a language model reads tokens; it must be None here."
            )
        super().__init__(config)


class MgradeForSequenceClassification(MgradePreTrainedModel, RecurrentForSequenceClassification):
    """mGRADE that gives a whole sequence, of tokens or of real values, one label."""

    backbone_class = MgradeModel

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

        See [`RecurrentForSequenceClassification.forward`] for the other arguments.
        """
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            labels=labels,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            **kwargs,
        )


# The code travels with every checkpoint, for machines without this package.
MgradeModel.register_for_auto_class("AutoModel")
MgradeForCausalLM.register_for_auto_class("AutoModelForCausalLM")
MgradeForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
