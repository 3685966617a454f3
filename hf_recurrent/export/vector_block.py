"""One step of a `VectorLearner`, forward and backward pass, as a recorded graph."""

from contextlib import nullcontext

import torch

from hf_recurrent.export.c_learner_plan import LearnerPlan, learner_setting
from hf_recurrent.kernels.block_trace import BlockTrace
from hf_recurrent.kernels.step_graph import Value
from hf_recurrent.learning_rules.optimizers import without_gradients
from hf_recurrent.online.vector_learner import VectorLearner, half_mean_square, predict_scaled


class VectorBlock:
    """The step of a learner on one scaled vector and its successor.

    Attributes:
        rule: the learning rule.
        parameters: name → weight.
        gradients: name → shape of those that are trained.
        tables: none.
    """

    def __init__(self, learner: VectorLearner):
        self.model, self.rule, self.has_targets = learner.model, learner.rule, learner.has_targets
        self.parameters = dict(self.model.named_parameters())
        self.tables: dict[str, torch.nn.Module] = {}
        self.gradients = {name: weight.shape for name, weight in learner.parameters.items()}

    def record(self, learns: bool = True) -> tuple[BlockTrace, dict[str, Value]]:
        """The recorded step: inputs `input`, `target`, `state NAME` and `carried NAME`.

        Results are `following`, the next scaled vector or the scaled target, and `state NAME`; if it learns, `error`
        and `gradient NAME`.

        Raises:
            UnsupportedOp: the model has an operator without a rule.
        """
        size, dtype = self.model.config.input_size, self.model.dtype
        carried, state = self.rule.init_carried(1), self.model.model.init_state(1)
        current = torch.zeros(size, dtype=dtype)
        following = torch.zeros(self.model.config.num_labels, dtype=dtype)
        inputs = {"input": current, "target": following}
        inputs |= {f"state {name}": tensor for name, tensor in state.items()}
        inputs |= {f"carried {name}": tensor for name, tensor in carried.items()}
        trace = BlockTrace(dtype, inputs, self.parameters)
        recorded = self.rule.engine.advancing_by(trace.advance_sensitivities)
        with without_gradients(self.parameters.values()), recorded, trace:
            with torch.enable_grad(), self.rule.block(carried) if learns else nullcontext():
                found, state = predict_scaled(self.model, current, state, is_change=not self.has_targets)
                results = {"following": found}
                if learns:
                    results["error"] = found - following
                    loss = half_mean_square(results["error"])
                    trace.require_finite(loss)
                    loss.backward()
            gradients = {name: weight.grad for name, weight in self.parameters.items() if weight.grad is not None}
            results |= {f"state {name}": tensor for name, tensor in state.items()}
            results |= {f"gradient {name}": tensor for name, tensor in gradients.items()}
        return trace, {name: trace.value_of(tensor) for name, tensor in results.items()}


def vector_plan(learner: VectorLearner, numbers: str) -> tuple[VectorBlock, LearnerPlan]:
    """The step of a learner, and the layout of the learner in C."""
    config, block = learner.model.config, VectorBlock(learner)
    scales = dict.fromkeys(("mean", "variance", "last"), config.input_size) | {"errors": config.num_labels}
    if learner.has_targets:
        scales |= dict.fromkeys(("target_mean", "target_variance"), config.num_labels)
    setting, state = learner_setting(learner, numbers), learner.model.model.init_state(1)
    return block, LearnerPlan(block, setting, state, scales)
