"""A stream of an online learner, and the step for one block of T bytes of it: predict it, and learn from it."""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.optimizer_state import load_optimizer_state, optimizer_state
from hf_recurrent.learning_rules.block_learning import BlockLearning, LearnedBlocks, diverged
from hf_recurrent.learning_rules.compiled_block import Block
from hf_recurrent.learning_rules.joint_optimizer import join_optimizers
from hf_recurrent.learning_rules.optimizers import apply_learning_rate_factors
from hf_recurrent.learning_rules.rules import NonFiniteLossError, build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, detach_state, upcast
from hf_recurrent.modeling.contexts.count_memory import READING, STATE_PART
from hf_recurrent.modeling.contexts.count_memory_layout import Rates
from hf_recurrent.modeling.contexts.counted_predictions import take_counts
from hf_recurrent.modeling.step.single_step import plain_forward
from hf_recurrent.online.settings import LearnerSettings

# Of a call of the kernel, in which a program cannot be interrupted: blocks, and multiplications by weights.
_MOST_BLOCKS, _MOST_PRODUCTS = 64, 1 << 27


@dataclass
class LearnerStream:
    """A stream and the bytes of it that wait for a full block; weights, optimizer and scores belong to the learner.

    Args:
        state: after the bytes that were learned from.
        carried: sensitivities, as the learning rule carries them.
        last: the last byte, whose successor is unknown, and True if it begins an episode; None between episodes.
        waiting: (byte, next byte, True if the first begins an episode) of an incomplete block.
    """

    state: RecurrentState
    carried: RecurrentState
    last: tuple[int, bool] | None = None
    waiting: list[tuple[int, int, bool]] = field(default_factory=list)

    def add(self, token: int, ends_episode: bool) -> None:
        """Add the next byte, the target of the last one."""
        last, self.last = self.last, None if ends_episode else (token, self.last is None)
        if last is not None:
            self.waiting.append((last[0], token, last[1]))

    def take(self, tokens: Iterable[int], end: int | None, most: int) -> list[int]:
        """Add bytes until `most` wait; `end` ends an episode. Returns those that were added."""
        taken = []
        for token in tokens:
            self.add(token, ends_episode=token == end)
            taken.append(token)
            if len(self.waiting) >= most:
                break
        return taken

    def blocks(self, count: int, size: int, device: torch.device) -> Block:
        """Input ids, labels and resets of the first waiting blocks, (count, size) each."""
        columns = zip(*self.waiting[: count * size], strict=True)
        return tuple(torch.tensor(column, device=device).view(count, size) for column in columns)

    def advance(self, size: int, state: RecurrentState) -> None:
        """Drop the first `size` waiting bytes, after which the state is `state`."""
        self.state = {name: aligned(tensor) for name, tensor in detach_state(state).items()}
        del self.waiting[:size]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy aligned like a new one: alignment decides how sums are rounded, and a resumed run has to
    round like an uninterrupted one."""
    is_aligned = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)


class BlockStep:
    """Predicts blocks and, if the settings say so, learns from them: `update_every` blocks make an optimizer step."""

    def __init__(self, model: PreTrainedModel, settings: LearnerSettings):
        self._model, self._settings, self.updates = model, settings, 0
        self._rule, self.optimizer, self.learning, self.parameters = None, None, None, {}
        self._num_targets = settings.stride * settings.update_every
        self._summed_blocks = self._summed_bytes = 0  # in the gradients since the last update
        if settings.learn:
            self._rule = build_learning_rule(settings.rule, model)
            self.parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
            self.optimizer = settings.build_optimizer(self.parameters.values())
            apply_learning_rate_factors(self.optimizer, model, self.parameters)
            self.optimizer = join_optimizers(self.optimizer, model, table_learning_rate=settings.table_learning_rate)
            self.optimizer.zero_grad()
            updates_each = settings.update_every == 1
            self.learning = BlockLearning(
                self._rule, self.optimizer, settings.stride, self._num_targets, updates_each=updates_each
            )

    @cached_property
    def blocks_at_once(self) -> int:
        """Blocks that may be given to [`learn_blocks`] together."""
        if self.learning is None or self._settings.update_every > 1:
            return 1
        products = self._settings.stride * sum(weight.numel() for weight in self.learning.parameters)
        return min(_MOST_BLOCKS, max(1, _MOST_PRODUCTS // max(1, products)))

    def learn_blocks(self, carried: RecurrentState, state: RecurrentState, blocks: Block) -> LearnedBlocks | None:
        """Predict blocks (N, stride) and learn from each; None where [`read`] and [`update`] have to be called."""
        rest, counts = take_counts(state, getattr(self._model, "count_memory", None))
        learned = self.learning.learn_blocks(carried, rest, blocks, self._settings.max_grad_norm)
        if learned is None:
            return None
        self.updates += learned.count
        if counts is None or not learned.count:
            return learned
        block = tuple(part[: learned.count].reshape(1, -1) for part in blocks)
        nats, counts = self._read_counts(counts, block, learned.logits)
        return learned._replace(nats=nats, state=learned.state | {STATE_PART: counts})

    def _read_counts(
        self, counts: torch.Tensor, block: Block, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nats (T,) of the mixture, and the new counts; `logits` (T, V) are those of the network before it learned."""
        input_ids, labels, resets = block
        rates = Rates(learns=True, inserts=True) if self._settings.learn else READING
        (nats,), _, counts = self._model.count_memory.read(
            input_ids, counts, logits.unsqueeze(0), resets, targets=labels, rates=rates
        )
        return nats, counts

    def init_carried(self) -> RecurrentState:
        """Tensors that the learning rule carries, at the beginning of a stream."""
        return {} if self._rule is None else self._rule.init_carried(1)

    def read(
        self, carried: RecurrentState, state: RecurrentState, block: Block
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Predict a block and add its gradient; returns nats (T,), float64, and the state after the block.

        With a count memory, the nats are the mixture's.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; gradients and `carried` are unchanged.
        """
        rest, counts = take_counts(state, getattr(self._model, "count_memory", None))
        if self.learning is None:
            logits, new_state = self._predict(rest, block)
        else:
            nats, new_state = self.learning.learn(carried, rest, block)
            logits = self.learning.logits
        if counts is not None:
            if logits is None:
                logits, _ = self._predict(rest, block)
            nats, counts = self._read_counts(counts, block, logits)
            new_state = new_state | {STATE_PART: counts}
        elif self.learning is None:
            nats = F.cross_entropy(logits, block[1][0], reduction="none")
        nats = nats.double().cpu()
        if not math.isfinite(nats.sum().item()):
            raise NonFiniteLossError("The loss is NaN or infinite; the model cannot predict this stream.")
        return nats, new_state

    @torch.no_grad()
    def _predict(self, state: RecurrentState, block: Block) -> tuple[torch.Tensor, RecurrentState]:
        """The network's logits (T, V) and the state after the block."""
        input_ids, _, resets = block
        resets = resets if bool(resets.any()) else None
        # The compiled step of `forward` would be compiled again after every update.
        with nullcontext() if self.learning is None else plain_forward():
            output = self._model(input_ids, reset_mask=resets, state=state, use_cache=True)
        return upcast(output.logits[0]), output.state

    def update(self, carried: RecurrentState, added: int = 0, *, now: bool = False) -> bool:
        """Update the weights when `update_every` blocks were read, or `now`; True if they were updated.

        `added` is the size of the block that was read; `carried` is zeroed if the gradient is NaN or infinite.

        Raises:
            NonFiniteLossError: the gradient is NaN or infinite; the weights are unchanged.
        """
        if self.learning is None:
            return False
        self._summed_blocks += bool(added)
        self._summed_bytes += added
        if self._summed_blocks < (1 if now else self._settings.update_every):
            return False
        factor = self._num_targets / self._summed_bytes  # more than 1 for fewer bytes at the end of a stream
        norm = self.learning.update(factor, self._settings.max_grad_norm)
        self._summed_blocks = self._summed_bytes = 0
        if not math.isfinite(norm):
            raise diverged(norm, carried)
        self.updates += 1
        return True

    def saved_values(self) -> dict[str, Any]:
        """Counts, gradients and optimizer, for [`restore`]."""
        if self.learning is not None:
            self.learning.write_steps()
            self.learning.write_gradients()
        gradients = {name: weight.grad for name, weight in self.parameters.items() if weight.grad is not None}
        return {
            "summed": (self._summed_blocks, self._summed_bytes),
            "gradients": {name: grad.to_dense() if grad.is_sparse else grad for name, grad in gradients.items()},
            "optimizer": None if self.optimizer is None else optimizer_state(self.optimizer),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the values of [`saved_values`], at the learning rate of the settings."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        load_optimizer_state(self.optimizer, saved["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._summed_blocks, self._summed_bytes = saved["summed"]
        for name, gradient in saved["gradients"].items():
            gradient = gradient.to(self.parameters[name])
            is_table = any(self.parameters[name] is table for table in self.learning.tables)
            self.parameters[name].grad = gradient.to_sparse(1) if is_table else gradient
