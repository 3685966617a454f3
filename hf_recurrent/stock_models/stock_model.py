"""Parts that all stock families share: one block, layers with a state, the model around them.

Shape letters: B streams or batch, T steps, M model width, K convolution taps, Q steps of a chunk.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_recurrent.modeling.block.block_inputs import Padding, check_arguments, read_masks
from hf_recurrent.modeling.block.causal_lm_loss import causal_lm_loss
from hf_recurrent.modeling.block.recurrent_blocks import temporal_convolution
from hf_recurrent.modeling.block.recurrent_causal_lm import RecurrentCausalLMOutput
from hf_recurrent.modeling.block.recurrent_generation import CACHE_ARGUMENTS, StatefulGeneration
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, StatefulModel, check_state, in_state_dtype
from hf_recurrent.modeling.block.tensor_checks import check_token_ids, kept_steps

CHECKPOINTING_ERROR = (
    "`gradient_checkpointing` is True, but the layers of a stock model drop their state then; set it to False, or "
    'carry no state (`regime` "iid").'
)


class Block:
    """State and masks of one block, whose steps are packed; a stock model passes it to its layers as its cache."""

    def __init__(
        self, state: RecurrentState, steps: int, reset_mask: torch.Tensor | None = None, padding: Padding | None = None
    ):
        self.state, self.steps, self.reset_mask, self.padding = state, steps, reset_mask, padding
        self.new_state: RecurrentState = {}

    @property
    def padding_mask(self) -> torch.Tensor | None:
        """(B, T) bool, true at padding, which is at the end of each row."""
        return None if self.padding is None else self.padding.mask

    @property
    def lengths(self) -> torch.Tensor | None:
        """(B,) number of real steps; None if all are."""
        return None if self.padding is None else self.padding.lengths


def given_block(options: Mapping[str, Any]) -> Block | None:
    """The block among the arguments of a layer, where stock code passes its cache."""
    return next((options[name] for name in CACHE_ARGUMENTS if isinstance(options.get(name), Block)), None)


def cache_argument(model: torch.nn.Module) -> str:
    """Name of the argument of a stock `forward`, and of the field of its output, that has the cache."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in CACHE_ARGUMENTS if name in parameters)


class StatePart:
    """A layer of a stock model that has a state; its names begin with `state_name`, such as `layers.0`."""

    state_name = ""

    def part_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor of this layer's state, without the batch."""
        raise NotImplementedError

    def get_part(self, block: Block, part: str) -> torch.Tensor:
        """A tensor of this layer's state before the block."""
        return block.state[f"{self.state_name}.{part}"]

    def set_part(self, block: Block, part: str, tensor: torch.Tensor) -> None:
        """Keep a tensor of this layer's state after the block: a new one, so that gradients reach the block before."""
        block.new_state[f"{self.state_name}.{part}"] = tensor.to(self.get_part(block, part).dtype)


class ConvolutionPart(StatePart):
    """A layer with a depthwise causal `nn.Conv1d`, whose last inputs are part of the state."""

    def convolve(self, convolution: nn.Conv1d, inputs: torch.Tensor, block: Block) -> torch.Tensor:
        """Run the convolution (without an activation) on inputs (B, T, M)."""
        weight = convolution.weight.squeeze(1).flip(-1).t()  # (K, M), the current step first
        output, taps = temporal_convolution(
            inputs, self.get_part(block, "convolution"), weight, block.reset_mask, block.lengths
        )
        self.set_part(block, "convolution", taps)
        return output if convolution.bias is None else output + convolution.bias.to(output.dtype)


CHUNK_STEPS = 64  # on a CPU, 32 to 64 are fastest


def same_episode(
    batch_size: int, steps: int, reset_mask: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps of a chunk that each step sees; inside of it, a recurrence of matrices is computed like attention.

    Returns:
        (B or 1, Q, Q) bool, true where step s ≤ q is of the episode of step q; (B or 1, Q) bool, true where the
        episode has begun before the chunk.
    """
    causal = torch.ones(steps, steps, dtype=torch.bool, device=device).tril().unsqueeze(0)
    if reset_mask is None:
        return causal, torch.ones(1, steps, dtype=torch.bool, device=device)
    episode = reset_mask.cumsum(1)
    return causal & (episode.unsqueeze(2) == episode.unsqueeze(1)), episode == 0


class StockModelWithState(StatefulModel, StatefulGeneration):
    """Mixin of stock language models: a state goes in and comes out.

    `__call__` is extended and not `forward`, whose signature `generate` inspects.
    """

    block_class: type[Block] = Block
    keeps_logits = True  # `forward` has `logits_to_keep`
    state_name = ""

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls.__name__ = cls.__bases__[-1].__name__  # in configurations, cards and messages it is the stock class

    @classmethod
    def check(cls, model: torch.nn.Module) -> None:
        """Raise a ValueError if a model of this class cannot carry a state."""

    def state_layout(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for module in self.modules():
            if isinstance(module, StatePart):
                shapes |= {f"{module.state_name}.{part}": shape for part, shape in module.part_shapes().items()}
        return shapes

    def __call__(self, *arguments, state=None, reset_mask=None, shift_labels=None, **options) -> Any:
        """Read a block from a state, as [`RecurrentForCausalLM.forward`]; the stock call without one."""
        if state is None and reset_mask is None and shift_labels is None:
            return super().__call__(*arguments, **options)
        return self._read_block(*arguments, state=state, reset_mask=reset_mask, shift_labels=shift_labels, **options)

    def _read_block(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        state: RecurrentState | None,
        reset_mask: torch.Tensor | None,
        shift_labels: torch.Tensor | None,
        labels: torch.Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_dict: bool | None = None,
        **others,
    ) -> RecurrentCausalLMOutput:
        if self.training and self.base_model.gradient_checkpointing:
            raise ValueError(CHECKPOINTING_ERROR)
        check_arguments(others)
        check_token_ids("input_ids", input_ids, self.config.vocab_size)
        batch_size, steps = input_ids.shape
        if state is None:
            state = self.init_state(batch_size, input_ids.device)
        check_state(state, self.state_shapes(batch_size), input_ids.device)
        state = in_state_dtype(state, self.dtype)
        reset_mask, padding = read_masks((batch_size, steps), attention_mask, reset_mask, others)
        kept = kept_steps(logits_to_keep)
        options = {"logits_to_keep": logits_to_keep} if self.keeps_logits and padding is None else {}
        if padding is not None:
            input_ids, reset_mask = padding.pack(input_ids), padding.pack_resets(reset_mask)
        block = self.block_class(state, steps, reset_mask, padding)
        logits = self.read_stock(input_ids, block, **options).logits
        if padding is not None:
            logits = padding.unpack(logits)
        if not options:
            logits = logits[:, kept]
        loss = None
        if labels is not None or shift_labels is not None:
            loss = causal_lm_loss(logits, labels, shift_labels, num_items_in_batch)
        return RecurrentCausalLMOutput(loss=loss, logits=logits, state=block.new_state if use_cache else None)

    def read_stock(self, input_ids: torch.Tensor, block: Block, **options) -> Any:
        """The stock call with a block in place of the cache."""
        return super().__call__(input_ids=input_ids, use_cache=True, **{cache_argument(self): block}, **options)

    # ---- Generation from a given state ----

    def prepare_inputs_for_generation(self, input_ids, state=None, **kwargs):
        """Inputs of the next step: with a state the prompt, then single tokens; else the stock class's."""
        if state is None:
            return super().prepare_inputs_for_generation(input_ids, **kwargs)
        if not kwargs.get("is_first_iteration"):
            input_ids = input_ids[:, -1:]
        mask = kwargs.get("attention_mask")
        return {"input_ids": input_ids, "attention_mask": mask, "state": state, "logits_to_keep": 1}
