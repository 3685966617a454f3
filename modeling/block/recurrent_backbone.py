"""Model without a head that all recurrent families share: embedding, layers, state.

`forward` is the same call for a block of T steps, a prompt and one byte. The state goes in and comes out as a flat
dictionary with one entry a layer and part, such as `layers.0.recurrent`; it never lives on the module.

Shape letters: B streams or batch, T steps, M model width, N layers.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from ..contexts.ngram_embedding import NgramEmbedding, read_ngrams
from ..step.captured_block import run_captured_block
from ..step.module_watch import check_weights
from ..step.single_step import run_single_step
from ..units.recurrent_unit import RecurrentUnit, lecun_std
from .block_inputs import Padding, check_arguments, read_masks
from .recurrent_blocks import Contraction, resets_itself, rms_norm
from .recurrent_state import RecurrentState, StatefulModel, check_state, in_state_dtype
from .saved_code import SavedCode
from .tensor_checks import check_embeddings, check_token_ids, kept_steps

NGRAMS = "ngrams"  # the part of the state with the last bytes


class LayerInputs(NamedTuple):
    """Inputs of a layer in addition to its hidden states."""

    state: RecurrentState
    reset_mask: Tensor | None
    padding_mask: Tensor | None
    lengths: Tensor | None


class RecurrentOutput(ModelOutput):
    """A `ModelOutput` that stores a field where it is set, in a fifth of the time of transformers' own."""

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """As the constructor with all fields, in their order, in a third of the time."""
        output = cls.__new__(cls)
        output.__dict__.update(fields)
        for name, value in fields.items():
            if value is not None:
                OrderedDict.__setitem__(output, name, value)
        return output

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None and name in type(self).__dataclass_fields__:
            OrderedDict.__setitem__(self, name, value)
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        # Accelerate makes outputs from a dictionary of all fields in place of the first one.
        if not isinstance(next(iter(self.values()), None), Tensor):
            super().__post_init__()


@dataclass
class RecurrentModelOutput(RecurrentOutput):
    """Output of a recurrent model without a head.

    Args:
        last_hidden_state: (B, T, M), after the final norm; fewer steps with `logits_to_keep`.
        state: the state after the last real step of every row, with `use_cache`.
        hidden_states: N + 1 tensors (B, T, M), with `output_hidden_states`: the embedding, then every layer's
            output, the last one after the final norm.
    """

    last_hidden_state: Tensor | None = None
    state: RecurrentState | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class RecurrentPreTrainedModel(StatefulModel, SavedCode, PreTrainedModel):
    """Initialisation, loading and saving of recurrent models."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """LeCun normal; maps back to the residual stream with std 1/sqrt(2 · fan-in · N) (Memora, appendix F)."""
        if isinstance(module, Contraction):
            std = lecun_std(2 * module.in_features * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=lecun_std(module.in_features))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            # As the head that it is tied to, with the model width as fan-in.
            init.normal_(module.weight, mean=0.0, std=lecun_std(module.embedding_dim))
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            for parameter, fill in ((module.weight, init.ones_), (getattr(module, "bias", None), init.zeros_)):
                if parameter is not None:
                    fill(parameter)
        elif resets_itself(module):
            module.reset_parameters()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise a module once, also a unit with all parameters in its maps, which transformers would skip."""
        if isinstance(module, RecurrentUnit) and next(module.parameters(recurse=False), None) is None:
            is_custom_code = all(getattr(each, "_is_hf_initialized", False) for each in module.parameters())
        super()._initialize_weights(module, is_custom_code)

    def parameters_without_weight_decay(self) -> set[str]:
        """Names of the parameters without a neutral value at zero, which trainers exclude from weight decay."""
        return {
            f"{prefix}.{name}"
            for prefix, module in self.named_modules()
            for name in getattr(module, "no_weight_decay", ())
        }


class EmbeddedInputs(NamedTuple):
    """A block's ids as vectors."""

    hidden: Tensor  # (B, T, M), what the layers read
    output: Tensor | None = None  # (B, T, M), added to the final hidden states, with `config.ngram_output`
    state: RecurrentState = {}  # noqa: RUF012 (never changed); the parts after the block that depend on ids alone


class RecurrentBackbone(RecurrentPreTrainedModel):
    """Inputs and state of every recurrent model, of all families.

    A model gives `embed_tokens`, `layer_layout` and `read_block`; `embed_inputs` is the one place where ids become
    vectors.
    """

    _auto_class = "AutoModel"

    def __init__(self, config):
        super().__init__(config)
        self.embed_ngrams = NgramEmbedding(config) if config.ngram_orders else None
        self.output_ngrams = NgramEmbedding(config) if config.ngram_output else None

    def layer_layout(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts of one stream's state that `read_block` reads and returns."""
        raise NotImplementedError

    def state_layout(self) -> dict[str, tuple[int, ...]]:
        layout = self.layer_layout()
        return layout if self.embed_ngrams is None else layout | {NGRAMS: (self.config.ngram_orders[-1] - 1,)}

    def embed_inputs(
        self,
        input_ids: Tensor,
        state: RecurrentState,
        reset_mask: Tensor | None = None,
        padding: Padding | None = None,
    ) -> EmbeddedInputs:
        """Embed a block of ids (B, T). Of the state before it, only the part `ngrams` is read."""
        hidden = self.embed_tokens(input_ids)
        if self.embed_ngrams is None:
            return EmbeddedInputs(hidden)
        rows, recent = read_ngrams(self.config, input_ids, state[NGRAMS], reset_mask, padding)
        output = None if self.output_ngrams is None else self.output_ngrams(rows)
        return EmbeddedInputs(hidden + self.embed_ngrams(rows), output, {NGRAMS: recent})

    def read_embedded(
        self,
        embedded: EmbeddedInputs,
        state: RecurrentState,
        reset_mask: Tensor | None = None,
        padding: Padding | None = None,
        kept: slice | Tensor = slice(None),
        output_hidden_states: bool = False,
    ) -> tuple[Tensor, RecurrentState, list[Tensor] | None]:
        """`read_block`, with what its ids add to the outputs and to the state."""
        hidden, new_state, hidden_states = self.read_block(
            embedded.hidden, state, reset_mask, padding, kept, output_hidden_states
        )
        if embedded.output is not None:
            hidden = hidden + embedded.output[:, kept]
            if output_hidden_states:
                hidden_states[-1] = hidden_states[-1] + embedded.output
        return hidden, new_state | embedded.state, hidden_states

    def read_block(
        self,
        hidden: Tensor,
        state: RecurrentState,
        reset_mask: Tensor | None,
        padding: Padding | None,
        kept: slice | Tensor,
        output_hidden_states: bool,
    ) -> tuple[Tensor, RecurrentState, list[Tensor] | None]:
        """Read a block of embedded inputs (B, T, M) after a state that is checked.

        Returns:
            The outputs (B, kept steps, M), the state after the last real step of every row, and, with
            `output_hidden_states`, the hidden states of all layers and steps.
        """
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        state: RecurrentState | None = None,
        reset_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs,
    ) -> RecurrentModelOutput | tuple:
        """Read a block. See [`RecurrentForCausalLM.forward`] for the arguments.

        `logits_to_keep` selects the steps of `last_hidden_state` here; 0 for all.
        """
        check_arguments(kwargs)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return_dict = self.config.return_dict if return_dict is None else return_dict
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            check_token_ids("input_ids", input_ids, self.config.vocab_size)
        else:
            check_embeddings("inputs_embeds", inputs_embeds, self.config.hidden_size)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        shape = inputs.shape[:2]
        if state is None:
            state = self.init_state(shape[0], inputs.device)
        reset_mask, padding = read_masks(shape, attention_mask, reset_mask, kwargs)
        kept = kept_steps(logits_to_keep)
        embedded = self._embedded(input_ids, inputs_embeds, state, reset_mask, padding)

        single_step = None
        if shape[1] == 1 and reset_mask is None and padding is None and not output_hidden_states:
            single_step = self._single_step(embedded, state)
        if single_step is None:
            check_state(state, self.state_shapes(shape[0]), inputs.device)
            check_weights(self, inputs.device)
            # A state may have been stored in a narrower type; complex units have no arithmetic for bfloat16.
            state = in_state_dtype(state, self.dtype)
            hidden, new_state, hidden_states = self.read_embedded(
                embedded, state, reset_mask, padding, kept, output_hidden_states
            )
        else:
            hidden, new_state = single_step
            hidden, hidden_states = hidden[:, kept], None
        output = RecurrentModelOutput(
            last_hidden_state=hidden,
            state=new_state if use_cache else None,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()

    def _embedded(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        state: RecurrentState,
        reset_mask: Tensor | None,
        padding: Padding | None,
    ) -> EmbeddedInputs:
        if self.embed_ngrams is None:
            return EmbeddedInputs(inputs_embeds) if input_ids is None else self.embed_inputs(input_ids, state)
        if input_ids is None:
            raise ValueError("`inputs_embeds` are given, but this model has n-grams, which need `input_ids`.")
        check_state(state, self.state_shapes(input_ids.shape[0]), input_ids.device)
        check_weights(self, input_ids.device)
        return self.embed_inputs(input_ids, state, reset_mask, padding)

    def _single_step(self, embedded: EmbeddedInputs, state: RecurrentState) -> tuple[Tensor, RecurrentState] | None:
        """Output (B, 1, M) and new state of a fast step of the layers, if there is one."""
        if embedded.state:
            state = {name: tensor for name, tensor in state.items() if name not in embedded.state}
        found = run_single_step(self, embedded.hidden, state)
        if found is None:
            return None
        hidden, new_state = found
        return hidden if embedded.output is None else hidden + embedded.output, new_state | embedded.state


class RecurrentLayer(GradientCheckpointingLayer):
    """x + Block(RMSNorm(x)), twice: first a recurrent block, then a gated MLP (Memora, section 4; De et al. 2024).

    Args:
        recurrent_block: (hidden, [`LayerInputs`]) → (output, state parts).
        mlp: hidden → output.
    """

    def __init__(self, config, recurrent_block: nn.Module, mlp: nn.Module):
        super().__init__()
        self.recurrent_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.recurrent_block = recurrent_block
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = mlp

    def forward(self, hidden: Tensor, inputs: LayerInputs) -> tuple[Tensor, RecurrentState]:
        # A block may know a faster way to compute the whole layer; it returns None where it has to be as below.
        fused_layer = getattr(self.recurrent_block, "fused_layer", None)
        if fused_layer is not None and (result := fused_layer(self, hidden, inputs)) is not None:
            return result
        output, state = self.recurrent_block(rms_norm(self.recurrent_norm, hidden), inputs)
        hidden = hidden + output
        return hidden + self.mlp(rms_norm(self.mlp_norm, hidden)), state


class RecurrentModel(RecurrentBackbone):
    """Embedding, N layers, final norm. A family gives its layer, final norm, if any, and parts of the state."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([self.build_layer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = self.build_final_norm(config)
        self.layer_shapes = [self.layer_state_shapes(index) for index in range(config.num_hidden_layers)]
        self.gradient_checkpointing = False
        self.post_init()

    def build_layer(self, config, layer_index: int) -> nn.Module:
        """One layer, counted from 0: `forward(hidden, LayerInputs) → (hidden, state parts)`."""
        raise NotImplementedError

    def build_final_norm(self, config) -> nn.Module:
        """The norm before the head; none by default."""
        return nn.Identity()

    def layer_state_shapes(self, layer_index: int) -> dict[str, tuple[int, ...]]:
        """Shape of every part of that layer's state, without the batch."""
        return {"recurrent": (self.config.state_size,)}

    def layer_layout(self) -> dict[str, tuple[int, ...]]:
        return {
            f"layers.{layer}.{part}": shape
            for layer, shapes in enumerate(self.layer_shapes)
            for part, shape in shapes.items()
        }

    def read_block(self, hidden, state, reset_mask, padding, kept, output_hidden_states):
        plain = padding is None and not output_hidden_states and not torch.compiler.is_compiling()
        if plain and (captured := run_captured_block(self, hidden, state, reset_mask)) is not None:
            return captured[0][:, kept], captured[1], []
        if padding is not None:
            hidden, reset_mask = padding.pack(hidden), padding.pack_resets(reset_mask)
        hidden, new_state, hidden_states = self.read_layers(hidden, state, reset_mask, padding)
        if padding is not None:
            hidden = padding.unpack(hidden)
            hidden_states = [padding.unpack(tensor) for tensor in hidden_states] if output_hidden_states else []
        return hidden[:, kept], new_state, hidden_states

    def read_layers(
        self, hidden: Tensor, state: RecurrentState, reset_mask: Tensor | None = None, padding: Padding | None = None
    ) -> tuple[Tensor, RecurrentState, list[Tensor]]:
        """Output (B, T, M) of all layers and the final norm for packed inputs, the new state, all hidden states."""
        hidden_states = [hidden]
        new_state: RecurrentState = {}
        padding_mask, lengths = (None, None) if padding is None else (padding.mask, padding.lengths)
        for number, layer in enumerate(self.layers):
            layer_state = {part: state[f"layers.{number}.{part}"] for part in self.layer_shapes[number]}
            hidden, layer_state = layer(hidden, LayerInputs(layer_state, reset_mask, padding_mask, lengths))
            new_state |= {f"layers.{number}.{part}": tensor for part, tensor in layer_state.items()}
            hidden_states.append(hidden)
        hidden_states[-1] = hidden = rms_norm(self.norm, hidden)
        return hidden, new_state, hidden_states
