"""Language model that all recurrent families share: a backbone, a head, `generate()`.

Shape letters: B streams or batch, T steps, M model width, N layers, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..contexts.count_memory import STATE_PART
from ..contexts.counted_predictions import CountedPredictions, build_count_memory, take_counts
from ..step.module_watch import StepLoop
from ..step.single_step import choose_step_weights, run_single_step
from .block_inputs import read_masks
from .causal_lm_loss import causal_lm_loss
from .linear_maps import linear_map
from .recurrent_backbone import RecurrentBackbone, RecurrentOutput, RecurrentPreTrainedModel
from .recurrent_generation import RecurrentGenerationMixin
from .recurrent_state import RecurrentState
from .tensor_checks import check_token_ids, kept_steps

# A configuration's own way to an attribute takes as long as the step of a small model.
_fields = object.__getattribute__


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

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: RecurrentState | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    token_losses: Tensor | None = None
    network_losses: Tensor | None = None


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

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The logits (B, T, V) of the steps whose final hidden states (B, T, M) are given."""
        return linear_map(self.lm_head, hidden)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        state: RecurrentState | None = None,
        reset_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
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
            kwargs: `shift_labels` (B, T), already the next bytes, instead of `labels`, so that T = 1 trains too (no
                parameter: transformers' `Trainer` wants those in each batch); `target_weights` (B, T) of their losses;
                `num_items_in_batch`, which divides the summed loss; marks of packed documents, which start at resets;
                `per_token`: the losses of all `shift_labels`, and no logits; `sampled`: a count memory does not learn;
                `step_loop`, from [`loop_of_steps`].

        Raises:
            ValueError: a shape does not match, or a token id is outside the vocabulary.
        """
        config = _fields(self.config, "__dict__")
        return_dict = config["return_dict"] if return_dict is None else return_dict
        use_cache = config["use_cache"] if use_cache is None else use_cache
        shift_labels, num_items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
        per_token, sampled = kwargs.pop("per_token", False), bool(kwargs.pop("sampled", False))
        target_weights, step_loop = kwargs.pop("target_weights", None), kwargs.pop("step_loop", None)
        loss = token_losses = network_losses = None
        given = {"attention_mask": attention_mask, "reset_mask": reset_mask, "inputs_embeds": inputs_embeds}
        given |= {"output_hidden_states": output_hidden_states, **kwargs}
        is_plain = [*given.values()].count(None) == len(given)
        rest, counts = take_counts(state, self.count_memory)
        mixes = self.count_memory is not None and not self.training and (state is None or counts is not None)
        network = {"input_ids": input_ids, "state": rest, "use_cache": use_cache}
        network["logits_to_keep"] = 0 if mixes or per_token else logits_to_keep
        single_step = self._read_token(network, step_loop) if is_plain else None
        logits, new_state, hidden_states = single_step or self._read_network(network | given)
        if mixes or per_token:
            masks = (None, None) if is_plain else read_masks(logits.shape[:2], attention_mask, reset_mask, kwargs)
        if per_token:
            losses = self.mixed_losses(input_ids, counts, logits, shift_labels, *masks)
            (token_losses, network_losses, counts), logits, shift_labels = losses, None, None
        elif mixes:
            logits, counts = self.mix_counts(input_ids, counts, logits, kept_steps(logits_to_keep), *masks, sampled)
        if counts is not None and new_state is not None:
            new_state = new_state | {STATE_PART: counts}
        if labels is not None or shift_labels is not None:
            loss = causal_lm_loss(logits, labels, shift_labels, num_items, target_weights)
        output = RecurrentCausalLMOutput.of(
            loss=loss,
            logits=logits,
            state=new_state,
            hidden_states=hidden_states,
            token_losses=token_losses,
            network_losses=network_losses,
        )
        return output if return_dict else output.to_tuple()

    def _read_network(self, inputs: dict[str, Any]) -> tuple[Tensor, RecurrentState | None, Any]:
        """Logits, new state and hidden states of the network, whose arguments are `inputs`."""
        outputs = self.model(**inputs, return_dict=True)
        return self.compute_logits(outputs.last_hidden_state), outputs.state, outputs.hidden_states

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

    def loop_of_steps(self) -> dict[str, StepLoop]:
        """An argument for all calls of `forward` of one loop that reads single tokens, which it makes faster.

        Such a loop looks for changes of the model less often, see [`StepLoop`]. Values of weights that are changed in
        place take effect at once.
        """
        is_own = type(self).forward is RecurrentForCausalLM.forward and "forward" not in vars(self)
        return {"step_loop": StepLoop()} if is_own else {}

    def _read_token(
        self, inputs: dict[str, Any], loop: StepLoop | None
    ) -> tuple[Tensor, RecurrentState | None, None] | None:
        """As `_read_network` for one token per stream, or None where the whole network has to run."""
        input_ids, state, kept = inputs["input_ids"], inputs["state"], inputs["logits_to_keep"]
        if torch.is_grad_enabled() or not isinstance(input_ids, Tensor) or not input_ids.is_cpu:
            return None
        shape = input_ids.shape
        if len(shape) != 2 or shape[1] != 1 or not isinstance(kept, int) or kept < 0:
            return None
        config = _fields(self.config, "__dict__")
        if config["output_hidden_states"]:
            return None
        check_token_ids("input_ids", input_ids, config["vocab_size"])
        state = self.model.init_state(shape[0], input_ids.device) if state is None else state
        found = run_single_step(self, input_ids, state, loop)
        return None if found is None else (found[0], found[1] if inputs["use_cache"] else None, None)
