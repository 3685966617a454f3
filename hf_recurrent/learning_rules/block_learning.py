"""Gradients of the blocks of one stream and updates of the weights, in compiled kernels where they can compute them.

Shape letters: T steps.
"""

import torch
import torch.nn.functional as F
from transformers.utils import logging

from hf_recurrent.learning_rules.compiled_block import Block, CompiledBlock
from hf_recurrent.learning_rules.compiled_program import Uncompilable
from hf_recurrent.learning_rules.compiled_update import CompiledUpdate, GradientMemory
from hf_recurrent.learning_rules.joint_optimizer import JointOptimizer
from hf_recurrent.learning_rules.rowwise_adagrad import RowwiseAdagrad
from hf_recurrent.learning_rules.rules import LearningRule
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, upcast

logger = logging.get_logger(__name__)

# A model that changes more often learns in plain torch.
_MOST_COMPILATIONS = 3


class BlockLearning:
    """Learns from one block after another; gradients are in the parameters' `.grad` until an update.

    Args:
        rule: the learning rule.
        optimizer: of the trained parameters.
        stride: T of the blocks that are compiled; others run in plain torch.
        num_targets: divisor of a block's nats.

    Attributes:
        problem: why blocks are not compiled; None if they are, or if there was no block yet.
    """

    def __init__(self, rule: LearningRule, optimizer: torch.optim.Optimizer, stride: int, num_targets: int):
        self.rule, self.optimizer, self.stride, self.num_targets = rule, optimizer, stride, num_targets
        parts = [*optimizer.parts.values()] if isinstance(optimizer, JointOptimizer) else [optimizer]
        self._of_tables = [part for part in parts if isinstance(part, RowwiseAdagrad)]
        (self._dense,) = (part for part in parts if part not in self._of_tables)
        self.tables, self.parameters = (
            [parameter for part in some for group in part.param_groups for parameter in group["params"]]
            for some in (self._of_tables, [self._dense])
        )
        self.problem: str | None = None
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
            raise Uncompilable(self.problem or "somebody watches the model")

    def begin(self) -> None:
        """Look at the model again before the next block: the caller may have changed it."""
        self._is_checked = False

    def learn(
        self, carried: RecurrentState, state: RecurrentState, block: Block
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Read one block and add its gradient to the parameters' gradients.

        `carried`, the tensors of the rule, is updated in place; `state` is before the block.

        Returns:
            Nats (T,) and the state after the block.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; gradients and `carried` are unchanged.
        """
        compiled = self._compiled_block(block)
        if compiled is None:
            input_ids, labels, resets = block
            output = self.rule.learn(
                carried, state, input_ids, labels, resets if bool(resets.any()) else None, self.num_targets
            )
            nats = F.cross_entropy(upcast(output.logits.detach()[0]), labels[0], reduction="none")
            return nats, output.state
        memory = self._memory
        if memory.is_empty:
            learned = compiled.learn(carried, state, block, memory.views)
            memory.attach()
        else:
            learned = compiled.learn(carried, state, block, memory.other_views())
            memory.gather()
            memory.add_other()
        return learned

    def update(self, factor: float, max_grad_norm: float) -> float:
        """Change the weights, unless the norm of the gradient is NaN or infinite, and forget the gradient.

        Args:
            factor: of the gradient, before it is clipped.
            max_grad_norm: 0 for no clipping.

        Returns:
            The norm of the gradient, before it is clipped.
        """
        bound = max_grad_norm or float("inf")
        if self._of_tables:
            self.optimizer.bind_parts()
        if self._update is not None and self._memory.is_attached:
            norm = factor * self._update.norm()
            if norm < float("inf"):
                self._update.step(factor * min(1.0, bound / (norm + 1e-6)))
        else:
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
        for parameter in (*self.parameters, *self.tables):
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
        self.problem, self._update = "plain torch was asked for", None

    def write_steps(self) -> None:
        """Bring the optimizer's state up to date, before somebody reads it."""
        if self._update is not None:
            self._update.write_steps()

    def _compiled_block(self, block: Block) -> CompiledBlock | None:
        """The program for a block, if there is one."""
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
            try:
                self._compiled = CompiledBlock(self.rule, self.stride, self.num_targets)
            except Uncompilable:
                self._compiled = CompiledBlock(self.rule, self.stride, self.num_targets, resets=False)
        except Uncompilable as error:
            self.problem = str(error)
            logger.warning_once(
                f"{type(self.rule.model).__name__} learns in plain torch, several times slower than in the compiled "
                f"kernel: {self.problem}."
            )
            return
        parameters = {name: self._compiled.parameters[name] for name in self._compiled.gradients}
        self._memory = GradientMemory(parameters)
        self._update = self._compiled_update()

    def _compiled_update(self) -> CompiledUpdate | None:
        return CompiledUpdate(self._dense, self._memory) if CompiledUpdate.is_supported(self._dense) else None
