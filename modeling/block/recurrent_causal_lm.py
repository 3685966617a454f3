"""Model and language-model head that all recurrent families share.

`forward` is the same call for a block of T steps, a prompt and one byte. The state goes in and comes out as a flat
dictionary with one entry a layer and part, such as `layers.0.recurrent`; it never lives on the module.

Shape letters: B streams or batch, T steps, M model width, N layers, V vocabulary.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from ..contexts.count_memory import STATE_PART
from ..contexts.counted_predictions import CountedPredictions, build_count_memory, take_counts
from ..step.module_watch import check_weights
from ..step.single_step import choose_step_weights, run_single_step
from ..units.recurrent_unit import RecurrentUnit, lecun_std
from .block_inputs import Padding, check_arguments, read_masks
from .causal_lm_loss import causal_lm_loss
from .recurrent_blocks import Contraction
from .recurrent_generation import RecurrentGenerationMixin
from .recurrent_state import RecurrentState, StatefulModel, check_state
from .saved_code import SavedCode
from .tensor_checks import check_embeddings, check_token_ids, kept_steps


class LayerInputs(NamedTuple):
    """Inputs of a layer in addition to its hidden states."""

    state: RecurrentState
    reset_mask: torch.Tensor | None
    padding_mask: torch.Tensor | None
    lengths: torch.Tensor | None


class RecurrentOutput(ModelOutput):
    """A `ModelOutput` that stores a field where it is set, in a fifth of the time of transformers' own."""

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None and name in type(self).__dataclass_fields__:
            OrderedDict.__setitem__(self, name, value)
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        # Accelerate makes outputs from a dictionary of all fields in place of the first one.
        if not isinstance(next(iter(self.values()), None), torch.Tensor):
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

    last_hidden_state: torch.Tensor | None = None
    state: RecurrentState | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class RecurrentCausalLMOutput(RecurrentOutput):
    """Output of a recurrent language model.

    Args:
        loss: nats per target byte, if there are labels.
        logits: (B, T, V), or fewer steps with `logits_to_keep`.
        state: the state after the last real step of every row, with `use_cache`.
        hidden_states: N + 1 tensors (B, T, M), with `output_hidden_states`.
        token_losses: (B, T), nats of every target, with `per_token`.
        network_losses: (B, T), the same without the count memory.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    state: RecurrentState | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    token_losses: torch.Tensor | None = None
    network_losses: torch.Tensor | None = None


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
        elif hasattr(module, "reset_parameters") and not type(module).__module__.startswith("torch.nn."):
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


class RecurrentBackbone(RecurrentPreTrainedModel):
    """Inputs and state of every recurrent model, of all families.

    A model gives `embed_tokens`, `state_layout` and `read_block`; `embed_inputs` is the one place where ids become
    vectors.
    """

    _auto_class = "AutoModel"

    def embed_inputs(self, input_ids: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """The inputs (B, T, M) of a block from its ids (B, T) and the state before it, which is not checked yet."""
        return self.embed_tokens(input_ids)

    def read_block(
        self,
        hidden: torch.Tensor,
        state: RecurrentState,
        reset_mask: torch.Tensor | None,
        padding: Padding | None,
        kept: slice | torch.Tensor,
        output_hidden_states: bool,
    ) -> tuple[torch.Tensor, RecurrentState, list[torch.Tensor] | None]:
        """Read a block of embedded inputs.

        Args:
            hidden: (B, T, M), the embedded inputs.
            state: of these streams, already checked.
            reset_mask: (B, T) bool, or None.
            padding: None without padding.
            kept: the steps whose output is returned.
            output_hidden_states: return the hidden states of all layers and steps.

        Returns:
            The outputs (B, kept steps, M), the state after the last real step of every row, and the hidden states or
            None.
        """
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        state: RecurrentState | None = None,
        reset_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
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
        hidden = self.embed_inputs(input_ids, state) if inputs_embeds is None else inputs_embeds
        reset_mask, padding = read_masks(shape, attention_mask, reset_mask, kwargs)
        kept = kept_steps(logits_to_keep)

        single_step = None
        if shape[1] == 1 and reset_mask is None and padding is None and not output_hidden_states:
            single_step = run_single_step(self, hidden, state)
        if single_step is None:
            check_state(state, self.state_shapes(shape[0]), hidden.device)
            check_weights(self, hidden.device)
            hidden, new_state, hidden_states = self.read_block(
                hidden, state, reset_mask, padding, kept, output_hidden_states
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

    def forward(self, hidden: torch.Tensor, inputs: LayerInputs) -> tuple[torch.Tensor, RecurrentState]:
        output, state = self.recurrent_block(self.recurrent_norm(hidden), inputs)
        hidden = hidden + output
        return hidden + self.mlp(self.mlp_norm(hidden)), state


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

    def state_layout(self) -> dict[str, tuple[int, ...]]:
        return {
            f"layers.{layer}.{part}": shape
            for layer, shapes in enumerate(self.layer_shapes)
            for part, shape in shapes.items()
        }

    def read_block(self, hidden, state, reset_mask, padding, kept, output_hidden_states):
        if padding is not None:
            hidden, reset_mask = padding.pack(hidden), padding.pack_resets(reset_mask)
        hidden, new_state, hidden_states = self.read_layers(hidden, state, reset_mask, padding)
        if padding is not None:
            hidden = padding.unpack(hidden)
            hidden_states = [padding.unpack(tensor) for tensor in hidden_states] if output_hidden_states else []
        return hidden[:, kept], new_state, hidden_states

    def read_layers(
        self,
        hidden: torch.Tensor,
        state: RecurrentState,
        reset_mask: torch.Tensor | None = None,
        padding: Padding | None = None,
    ) -> tuple[torch.Tensor, RecurrentState, list[torch.Tensor]]:
        """All layers and the final norm, on packed inputs.

        Returns:
            The output (B, T, M), the new state, and the hidden states of all layers.
        """
        hidden_states = [hidden]
        new_state: RecurrentState = {}
        padding_mask, lengths = (None, None) if padding is None else (padding.mask, padding.lengths)
        for number, layer in enumerate(self.layers):
            layer_state = {part: state[f"layers.{number}.{part}"] for part in self.layer_shapes[number]}
            hidden, layer_state = layer(hidden, LayerInputs(layer_state, reset_mask, padding_mask, lengths))
            new_state |= {f"layers.{number}.{part}": tensor for part, tensor in layer_state.items()}
            hidden_states.append(hidden)
        hidden_states[-1] = hidden = self.norm(hidden)
        return hidden, new_state, hidden_states


class RecurrentForCausalLM(RecurrentPreTrainedModel, CountedPredictions, RecurrentGenerationMixin):
    """A recurrent model with a head tied to its embedding. A family gives its `backbone_class`.

    Raises:
        ValueError: `config.input_size` is set: a language model reads tokens.
    """

    backbone_class: type[RecurrentBackbone]
    _auto_class = "AutoModelForCausalLM"
    _keys_to_ignore_on_load_unexpected = [r"^count_memory\."]  # noqa: RUF012 (with `count_memory_slots=0`, the network)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' own form)

    def __init__(self, config):
        if (size := getattr(config, "input_size", None)) is not None:
            raise ValueError(f"`input_size` is {size}, but a language model reads tokens; it must be None here.")
        super().__init__(config)
        self.model = self.backbone_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.count_memory = build_count_memory(config)
        self.post_init()

    def state_layout(self) -> dict[str, tuple[int, ...]]:
        counts = {} if self.count_memory is None else self.count_memory.state_layout()
        return self.model.state_layout() | counts

    @property
    def integer_state_parts(self) -> frozenset[str]:
        return frozenset() if self.count_memory is None else frozenset({STATE_PART})

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits (B, T, V) of the steps whose final hidden states (B, T, M) are given."""
        return self.lm_head(hidden)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        state: RecurrentState | None = None,
        reset_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs,
    ) -> RecurrentCausalLMOutput | tuple:
        """Read a block of T bytes, a prompt, or one byte.

        Args:
            input_ids: (B, T); or `inputs_embeds`, (B, T, M).
            attention_mask: (B, T) or longer: the last T columns; 0 where a step is padding and leaves the state as is.
            state: from an earlier call for these streams; zeros by default.
            reset_mask: (B, T) bool, true where a byte is the first of its episode: the state before it is zero.
            labels: (B, T), the same bytes as `input_ids`; shifted inside, -100 is ignored.
            use_cache: return the state; `config.use_cache` by default.
            logits_to_keep: number of last steps with logits, or their indices; 0 for all.
            kwargs: `shift_labels` (B, T), already the next bytes, so that T = 1 trains too, instead of `labels` (no
                parameter, since transformers' `Trainer` wants those labels in each batch); `num_items_in_batch`, by
                which the summed loss is divided; marks of packed documents, whose starts are resets. With `per_token`,
                the output has the losses of all `shift_labels` and no logits ([`token_losses`]).

        Raises:
            ValueError: a shape does not match, or a token id is outside the vocabulary.
        """
        config = vars(self.config)  # its own way to an attribute takes as long as the step of a small model
        return_dict = config["return_dict"] if return_dict is None else return_dict
        use_cache = config["use_cache"] if use_cache is None else use_cache
        shift_labels, num_items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
        per_token = kwargs.pop("per_token", False)
        hidden_states = loss = token_losses = network_losses = None
        given = (attention_mask, reset_mask, inputs_embeds, output_hidden_states, *kwargs.values())
        is_plain = given.count(None) == len(given)
        rest, counts = take_counts(state, self.count_memory)
        mixes = self.count_memory is not None and not self.training
        single_step = self._read_token(input_ids, rest, logits_to_keep) if is_plain else None
        if single_step is None:
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                state=rest,
                reset_mask=reset_mask,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                output_hidden_states=output_hidden_states,
                logits_to_keep=0 if mixes or per_token else logits_to_keep,
                return_dict=True,
                **kwargs,
            )
            logits = self.compute_logits(outputs.last_hidden_state)
            new_state, hidden_states = outputs.state, outputs.hidden_states
        else:
            logits, new_state = single_step
        if mixes or per_token:
            masks = (None, None) if is_plain else read_masks(logits.shape[:2], attention_mask, reset_mask, kwargs)
        if per_token:
            losses = self.mixed_losses(input_ids, counts, logits, shift_labels, *masks)
            (token_losses, network_losses, counts), logits, shift_labels = losses, None, None
        elif mixes:
            logits, counts = self.mix_counts(input_ids, counts, logits, kept_steps(logits_to_keep), *masks)
        if counts is not None and new_state is not None:
            new_state = new_state | {STATE_PART: counts}
        if labels is not None or shift_labels is not None:
            loss = causal_lm_loss(logits, labels, shift_labels, num_items)
        new_state = new_state if use_cache else None
        output = RecurrentCausalLMOutput(loss, logits, new_state, hidden_states, token_losses, network_losses)
        return output if return_dict else output.to_tuple()

    def compile_step(self, weights: str | None = None) -> None:
        """Compile the step of single tokens now, with its weights in another type. Blocks and gradients are as before.

        A float32 model's step on a CPU is compiled by itself at its first use. With "bfloat16" or "int8" (symmetric,
        a scale for each output) it keeps a copy of all matrices in that type and reads less memory for every token.

        Args:
            weights: "bfloat16", "int8", or None for the model's own type.

        Raises:
            ValueError: `weights` is unknown, or the model has an operation that cannot be compiled.
            RuntimeError: the kernel was not built, or the model is not float32 on the CPU.
        """
        choose_step_weights(self, weights)

    def _read_token(
        self, input_ids: torch.Tensor | None, state: RecurrentState | None, kept: int | torch.Tensor
    ) -> tuple[torch.Tensor, RecurrentState] | None:
        """Logits (B, 1, V) and new state of one token per stream, or None where the whole `forward` has to run."""
        if torch.is_grad_enabled() or not isinstance(input_ids, torch.Tensor) or not input_ids.is_cpu:
            return None
        shape = input_ids.shape
        if len(shape) != 2 or shape[1] != 1 or not isinstance(kept, int) or kept < 0:
            return None
        config = vars(self.config)
        if config["output_hidden_states"]:
            return None
        check_token_ids("input_ids", input_ids, config["vocab_size"])
        state = self.model.init_state(shape[0], input_ids.device) if state is None else state
        return run_single_step(self, input_ids, state)
