"""Gradients of the blocks of one stream and updates of the weights, in compiled kernels where they can compute them.

Shape letters: T steps.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from hf_recurrent.learning_rules.compiled_block import Block, CompiledBlock
from hf_recurrent.learning_rules.compiled_program import Uncompilable, block_cpu
from hf_recurrent.learning_rules.joint_optimizer import JointOptimizer
from hf_recurrent.learning_rules.rowwise_adagrad import RowwiseAdagrad
from hf_recurrent.learning_rules.rules import LearningRule, NonFiniteLossError
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, upcast

logger = logging.get_logger(__name__)

# Name in the kernel, and names of the moments.
_KINDS = {
    torch.optim.AdamW: ("adamw", "exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: ("rmsprop", None, "square_avg"),
}
_ABSENT = ("amsgrad", "maximize", "weight_decay", "momentum", "centered")  # what the kernel does not compute
# A model that changes more often learns in plain torch.
_MOST_COMPILATIONS = 3


class GradientMemory:
    """The gradients of some parameters of one type, one after another in one tensor.

    Some may be outer products of two vectors, their `factors`, which are not written while `is_factored` is True.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    ):
        self.parameters = list(parameters.values())
        self.flat, self.views = _flat_views(parameters)
        self.factors, self.is_factored = factors or {}, False
        self.unfactored_views = {name: view for name, view in self.views.items() if name not in self.factors}
        self._other: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None

    @property
    def is_empty(self) -> bool:
        return all(parameter.grad is None for parameter in self.parameters)

    @property
    def is_attached(self) -> bool:
        """True if the gradients of all parameters lie here."""
        return all(p.grad is view for p, view in zip(self.parameters, self.views.values(), strict=True))

    def attach(self) -> None:
        """Make what lies here the gradients of the parameters."""
        for parameter, view in zip(self.parameters, self.views.values(), strict=True):
            parameter.grad = view

    def write_products(self) -> None:
        for name, factors in self.factors.items():
            torch.outer(*factors, out=self.views[name])
        self.is_factored = False

    def other_views(self) -> dict[str, torch.Tensor]:
        """Memory for gradients that [`add_other`] adds."""
        if self._other is None:
            self._other = _flat_views(self.views)
        return self._other[1]

    def add_other(self) -> None:
        """Move all gradients here, and add those in the memory of [`other_views`]."""
        for parameter, view in zip(self.parameters, self.views.values(), strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
        self.attach()
        self.flat.add_(self._other[0])


def _flat_views(like: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """New memory, and its parts with the shapes of some tensors."""
    sizes = [tensor.numel() for tensor in like.values()]
    flat = torch.empty(sum(sizes), dtype=next(iter(like.values())).dtype)
    pairs = zip(like.items(), flat.split(sizes), strict=True)
    return flat, {name: part.view(tensor.shape) for (name, tensor), part in pairs}


class CompiledUpdate:
    """Steps of AdamW or RMSprop without weight decay on the parameters of a memory.

    The optimizer's state is the same as after its own steps, up to rounding.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, memory: GradientMemory):
        self.optimizer, self.memory = optimizer, memory
        self._update: block_cpu.WeightUpdate | None = None
        self._bound: tuple | None = None  # what the update was made of
        self._steps = 0

    @staticmethod
    def is_supported(optimizer: torch.optim.Optimizer) -> bool:
        """True for optimizers and settings that the kernel computes."""
        return type(optimizer) in _KINDS and not any(
            group.get(name) for group in optimizer.param_groups for name in _ABSENT
        )

    def norm(self) -> float:
        self._bind()
        return self._update.norm(self.memory.is_factored)

    def step(self, scale: float) -> None:
        """One step with `scale` times the gradient."""
        self._bind()
        self._steps += 1
        self._update.step(self._steps, scale, self.memory.is_factored)
        torch.autograd.graph.increment_version(self.memory.parameters)

    def run(
        self,
        loop: "block_cpu.BlockLoop",
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        count: int,
        *,
        most_norm: float,
        tables: Sequence["block_cpu.TrainedTable"],
        lookups: torch.Tensor | None,
    ) -> "block_cpu.LoopEnd":
        """[`block_cpu.BlockLoop.run`] with a step after each block; gradients that can be products are not written."""
        self._bind()
        how = {"factored": bool(self.memory.factors), "tables": tables, "lookups": lookups}
        end = loop.run(inputs, outputs, count, self._update, self._steps + 1, most_norm, **how)
        self._steps += end.done
        torch.autograd.graph.increment_version([*self.memory.parameters, *(table.weights for table in tables)])
        return end

    def write_steps(self) -> None:
        """Bring the numbers of steps in the optimizer's state up to date."""
        if self._bound is not None and self._bound[0] is self.optimizer.state:
            for parameter in self.memory.parameters:
                self.optimizer.state[parameter]["step"].fill_(self._steps)

    def _bind(self) -> None:
        """Take the tensors and rates of the optimizer, if these are new."""
        bound = self.optimizer.state, [group["lr"] for group in self.optimizer.param_groups]
        if self._bound is not None and self._bound[0] is bound[0] and self._bound[1] == bound[1]:
            return
        if self._bound is not None:
            self.write_steps()
        kind, first, second = _KINDS[type(self.optimizer)]
        rates = {p: group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        trained, memory = [], self.memory
        for parameter, name in zip(memory.parameters, memory.views, strict=True):
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                for moment in filter(None, (first, second)):
                    state[moment] = torch.zeros_like(parameter)
            moments = state[first] if first else None, state[second]
            trained.append(block_cpu.Trained(parameter, *moments, rates[parameter], memory.factors.get(name)))
        group = self.optimizer.param_groups[0]
        betas = group["betas"] if "betas" in group else (0.0, group["alpha"])
        self._update = block_cpu.WeightUpdate(kind, self.memory.flat, trained, betas, group["eps"])
        self._steps = int(self.optimizer.state[self.memory.parameters[0]]["step"])
        self._bound = bound


class LearnedBlocks(NamedTuple):
    """Blocks that were learned from, one after another.

    Args:
        count: of the blocks.
        nats: (count · T,).
        logits: (count · T, V), of a model with a count memory.
        state: after them.
        error: why the next block was not learned from.
    """

    count: int
    nats: torch.Tensor
    logits: torch.Tensor | None
    state: RecurrentState
    error: NonFiniteLossError | None


def diverged(norm: float, carried: RecurrentState) -> NonFiniteLossError:
    """The error for a gradient whose norm is NaN or infinite; `carried` becomes zero."""
    for sensitivity in carried.values():  # they may have diverged
        sensitivity.zero_()
    return NonFiniteLossError(f"The norm of the gradient is {norm}: nothing was learned from it.")


class BlockLearning:
    """Learns from one block after another; gradients are in the parameters' `.grad` until an update.

    Args:
        stride: T of the blocks that are compiled; others run in plain torch.
        num_targets: divisor of a block's nats.
        updates_each: an update follows each block, so gradients of single steps need not be written.

    Attributes:
        problem: why blocks are not compiled; None if they are, or if there was no block yet.
        logits: (T, V), of the network for the block of the last [`learn`]; None without a count memory, which needs
            them, or if the block was not compiled.
    """

    def __init__(
        self, rule: LearningRule, optimizer: torch.optim.Optimizer, stride: int, num_targets: int, updates_each: bool
    ):
        self.rule, self.optimizer, self.stride, self.num_targets = rule, optimizer, stride, num_targets
        self._updates_each = updates_each
        parts = [*optimizer.parts.values()] if isinstance(optimizer, JointOptimizer) else [optimizer]
        self._of_tables = [part for part in parts if isinstance(part, RowwiseAdagrad)]
        (self._dense,) = (part for part in parts if part not in self._of_tables)
        self.tables, self.parameters = (
            [parameter for part in some for group in part.param_groups for parameter in group["params"]]
            for some in (self._of_tables, [self._dense])
        )
        self.problem: str | None = None
        self.logits: torch.Tensor | None = None
        self._compilations = 0
        self._is_checked = self._is_observed = False
        self._compiled: CompiledBlock | None = None
        self._memory: GradientMemory | None = None
        self._update: CompiledUpdate | None = None

    def require_compiled(self) -> None:
        """Compile blocks now, or raise an [`Uncompilable`] that says why they are learned in plain torch."""
        if self._compiled is None and self.problem is None:
            self._compile()
        if self.problem is not None or self._compiled.is_observed():
            raise Uncompilable(self.problem or "hooks, autocast, a dispatch mode or several threads are active")

    def begin(self) -> None:
        """Look at the model again before the next block: the caller may have changed it."""
        self._is_checked = False

    def learn(
        self, carried: RecurrentState, state: RecurrentState, block: Block
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Read one block and add its gradient to the parameters' gradients; returns nats (T,) and the state after it.

        `carried`, the tensors of the rule, is updated in place; `state` is before the block.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; gradients and `carried` are unchanged.
        """
        self.write_gradients()
        compiled = self._compiled_block(block)
        self.logits = None if compiled is None else compiled.logits
        if compiled is None:
            input_ids, labels, resets = block
            output = self.rule.learn(
                carried, state, input_ids, labels, resets if bool(resets.any()) else None, self.num_targets
            )
            nats = F.cross_entropy(upcast(output.logits.detach()[0]), labels[0], reduction="none")
            return nats, output.state
        memory = self._memory
        if memory.factors and self._update is not None and memory.is_empty:
            learned = compiled.learn(carried, state, block, memory.unfactored_views)
            memory.is_factored = True
        elif memory.is_empty:
            learned = compiled.learn(carried, state, block, memory.views)
            memory.attach()
        else:
            learned = compiled.learn(carried, state, block, memory.other_views())
            memory.add_other()
        return learned

    def learn_blocks(
        self, carried: RecurrentState, state: RecurrentState, blocks: Block, max_grad_norm: float
    ) -> LearnedBlocks | None:
        """Read blocks (N, T) of one stream, with an [`update`] after each, in one call of the compiled kernel.

        None where [`learn`] has to be called for each: blocks are not compiled, gradients wait for an update, or
        updates do not follow each block.
        """
        self.write_gradients()
        compiled = self._compiled_block(blocks)
        if compiled is None or self._update is None or not self._updates_each:
            return None
        memory = self._memory
        if not memory.is_empty or any(table.grad is not None for table in self.tables):
            return None
        run = partial(self._update.run, most_norm=max_grad_norm or float("inf"))
        end, state, nats, logits = compiled.learn_blocks(
            carried, state, blocks, memory.unfactored_views, self._adagrad(), run
        )
        error = None if end.is_finite else compiled.not_finite(nats[end.done])
        if end.norm is not None:
            error = diverged(end.norm, carried)
        logits = None if logits is None else logits[: end.done].flatten(0, 1)
        return LearnedBlocks(end.done, nats[: end.done].flatten(), logits, state, error)

    def _adagrad(self) -> dict[nn.Parameter, tuple[torch.Tensor, float, float]]:
        """For each trained table, the sums of its rows, and its learning rate and ε."""
        if self._of_tables:
            self.optimizer.bind_parts()
        return {
            table: (part.row_sums(table), group["lr"], group["eps"])
            for part in self._of_tables
            for group in part.param_groups
            for table in group["params"]
        }

    def write_gradients(self) -> None:
        """Write the gradients of the last block, if they are not in the parameters' `.grad`, before they are read."""
        if self._memory is not None and self._memory.is_factored:
            self._memory.write_products()
            self._memory.attach()

    def update(self, factor: float, max_grad_norm: float) -> float:
        """Change the weights, unless the norm of the gradient is NaN or infinite, and forget the gradient.

        The gradient is multiplied by `factor` and then clipped, unless `max_grad_norm` is 0; returns its norm before.
        """
        bound = max_grad_norm or float("inf")
        if self._of_tables:
            self.optimizer.bind_parts()
        is_factored = self._update is not None and self._memory.is_factored
        if self._update is not None and (is_factored or self._memory.is_attached):
            norm = factor * self._update.norm()
            if norm < float("inf"):
                self._update.step(factor * min(1.0, bound / (norm + 1e-6)))
            self._memory.is_factored = False
        else:
            self.write_gradients()
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            if factor != 1:
                for gradient in gradients:
                    gradient.mul_(factor)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, bound).item()
            if norm < float("inf"):
                self.write_steps()
                self._dense.step()
                self._update = None if self._memory is None else self._compiled_update()
        norm = self._update_tables(factor, norm)
        for parameter in self.tables if is_factored else (*self.parameters, *self.tables):
            parameter.grad = None
        return norm

    def _update_tables(self, factor: float, norm: float) -> float:
        """Change the rows that have a gradient, which is not clipped; returns NaN if it is not finite."""
        gradients = [table.grad for table in self.tables if table.grad is not None]
        if not all(bool(gradient.sum().isfinite()) for gradient in gradients):
            return float("nan")
        if norm < float("inf"):
            for gradient in gradients if factor != 1 else ():
                gradient.mul_(factor)
            for part in self._of_tables:
                part.step()
        return norm

    def use_plain_torch(self) -> None:
        """Compile no blocks from now on."""
        self.write_steps()
        self.write_gradients()
        self.problem, self._update = "plain torch was asked for", None

    def write_steps(self) -> None:
        """Bring the optimizer's state up to date before it is read."""
        if self._update is not None:
            self._update.write_steps()

    def _compiled_block(self, block: Block) -> CompiledBlock | None:
        if self.problem is not None or block[0].shape[1] != self.stride:
            return None
        if not self._is_checked:
            if self._compiled is None or not self._compiled.is_current():
                self._compile()
            self._is_observed = self._compiled is not None and self._compiled.is_observed()
            self._is_checked = True
        compiled = self._compiled
        if compiled is None or self._is_observed or not (compiled.resets or not bool(block[2].any())):
            return None
        return compiled

    def _compile(self) -> None:
        self.write_steps()
        self._compiled = self._memory = self._update = None
        try:
            if self._compilations == _MOST_COMPILATIONS:
                raise Uncompilable("the model changes again and again")
            self._compilations += 1
            new_block = partial(CompiledBlock, self.rule, self.stride, self.num_targets, factored=self._updates_each)
            try:
                self._compiled = new_block()
            except Uncompilable:
                self._compiled = new_block(resets=False)
        except Uncompilable as error:
            self.problem = str(error)
            logger.warning_once(
                f"{type(self.rule.model).__name__} learns in plain torch, several times slower than in the compiled "
                f"kernel: {self.problem}."
            )
            return
        parameters = {name: self._compiled.parameters[name] for name in self._compiled.gradients}
        self._memory = GradientMemory(parameters, self._compiled.factors)
        self._update = self._compiled_update()

    def _compiled_update(self) -> CompiledUpdate | None:
        return CompiledUpdate(self._dense, self._memory) if CompiledUpdate.is_supported(self._dense) else None
