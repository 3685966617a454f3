"""Learning from a stream of measurements: predict every vector, score the prediction and learn from it.

Shape letters: I values of a vector, S state width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.optimizers import apply_learning_rate_factors
from hf_recurrent.learning_rules.rules import NonFiniteLossError, build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, detach_state, upcast
from hf_recurrent.modeling.lru.configuration_lru import LruConfig
from hf_recurrent.modeling.lru.modeling_lru import LruForSequenceClassification
from hf_recurrent.online.settings import LearnerSettings

LARGEST_VALUE = 1e15  # its square is finite in float32
SMALLEST_ERROR = 1e-8  # mean square of scaled errors, added before a division


class VectorLearner:
    """Reads a series of vectors, possibly endless: each is predicted from all before, scored and learned from.

    Values are scaled by their running mean and deviation. The model reads a scaled vector and predicts the difference
    to the next one. It learns by exact real-time recurrent learning from half the mean squared error, one vector at a
    time, in constant memory. This is the reference of the learner in C, which `export --format c --learn` writes.

    With `learn(values, target)` it predicts another vector instead, of any size, from this one and all before: a
    regression. Targets have scales of their own.

    Example:
        ```python
        learner = VectorLearner.new(num_inputs=3)
        for vector in measurements:
            score = learner.learn(vector)  # 1 is usual; large values are anomalies
        print(learner.predict())  # the next vector
        ```

    Args:
        model: an `LruForSequenceClassification` with `input_size` I and O labels, on the CPU; O is I unless targets
            are given.
        optimizer: "adamw" or "rmsprop", see [`LearnerSettings`].
        learning_rate: constant.
        max_grad_norm: gradients are clipped to this norm; 0 for no clipping.
        window: vectors that the running means look back on.
        targets: a target is given with every vector.

    Attributes:
        updates: optimizer steps.
        vectors_read: vectors read.
        state, carried: of the network, and its sensitivities.
        mean, variance: of the vectors, (I,).
        target_mean, target_variance: of the targets, (O,).
        errors: running mean squares of the scaled errors, (O,).
        last: the last vector, (I,); None at the beginning of a series.

    Raises:
        ValueError: the model does not read vectors or does not predict one, or a setting is not allowed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        optimizer: str = "adamw",
        learning_rate: float = 1e-3,
        max_grad_norm: float = 1.0,
        window: int = 1000,
        targets: bool = False,
    ):
        check_vector_model(model, targets)
        self.settings = LearnerSettings(
            optimizer=optimizer, learning_rate=learning_rate, max_grad_norm=max_grad_norm, window=window
        )
        self.model = model.eval()
        self.rule = build_learning_rule("rtrl", model)
        self.parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.optimizer = self.settings.build_optimizer(self.parameters.values())
        apply_learning_rate_factors(self.optimizer, model, self.parameters)
        size = model.config.input_size
        self.mean, self.variance = (torch.zeros(size, dtype=model.dtype) for _ in range(2))
        self.has_targets, outputs = targets, model.config.num_labels
        self.target_mean, self.target_variance = (torch.zeros(outputs, dtype=model.dtype) for _ in range(2))
        self.errors = torch.ones(outputs, dtype=model.dtype)
        self.updates = self.vectors_read = 0
        self.reset()

    @classmethod
    def new(
        cls,
        num_inputs: int,
        *,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        num_targets: int | None = None,
        **settings: Any,
    ) -> "VectorLearner":
        """A learner with a small new model, of one layer of width 10 with 10 numbers of state.

        Args:
            num_inputs: I.
            seed: of the weights.
            config: fields of [`LruConfig`], in place of ours.
            num_targets: O, values of the targets of a regression; None to predict the next vector.
            settings: arguments of [`VectorLearner`].

        Raises:
            ValueError: the configuration or a setting is not allowed.
        """
        if num_targets is not None and num_targets < 1:
            raise ValueError(f"`num_targets` is {num_targets}; it must be at least 1.")
        fields = {"hidden_size": 10, "state_size": 10, "num_hidden_layers": 1}
        fields |= {"r_min": 0.5, "r_max": 0.999, "max_phase": math.pi / 4, "pooling": "last"}
        fields |= dict(config or {}) | {"input_size": num_inputs, "num_labels": num_targets or num_inputs}
        config = LruConfig(**fields, problem_type="regression")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LruForSequenceClassification(config)
        with torch.no_grad():  # begins with the prediction that nothing changes, or with the mean of the targets
            model.score.weight.zero_()
            model.score.bias.zero_()
        return cls(model, targets=num_targets is not None, **settings)

    def learn(
        self, values: Sequence[float] | torch.Tensor, target: Sequence[float] | torch.Tensor | None = None
    ) -> float:
        """Read the next vector and learn from it.

        Args:
            values: (I,), finite.
            target: (O,), finite, of a learner with targets.

        Returns:
            The mean over the values of the squared error of their prediction, divided by its usual value; 0 for the
            first vector of a series, unless targets are given.

        Raises:
            ValueError: the vector has another size, or a value is not finite or larger than 10¹⁵; nothing changes.
            NonFiniteLossError: the loss or its gradient is NaN or infinite; weights, scales and state are unchanged.
        """
        if self.has_targets and target is None:
            raise ValueError("`target` is missing; a learner with targets needs one for every vector.")
        if target is not None and not self.has_targets:
            raise ValueError("`target` is given, but the learner predicts the next vector; build it with targets.")
        values, score = self._checked(values), 0.0
        scales = self._scales_after(values)
        if self.has_targets:
            target = self._checked(target, "target")
            target_scales = self._scales_after(target, self.target_mean, self.target_variance)
            score = self._learn_scaled(_scaled(values, *scales), _scaled(target, *target_scales))
            self.target_mean, self.target_variance = target_scales
        elif self.last is not None:
            score = self._learn_scaled(_scaled(self.last, *scales), _scaled(values, *scales))
        (self.mean, self.variance), self.last = scales, values
        self.vectors_read += 1
        return score

    def _learn_scaled(self, current: torch.Tensor, following: torch.Tensor) -> float:
        """Learn from one scaled vector and its successor; returns the error over the usual one."""
        error, self.state = self._block(current, following)
        self.updates += 1
        square = error * error
        score = (square / (self.errors + SMALLEST_ERROR)).mean().item()
        self.errors += max(1 / (self.updates + 1), 1 / self.settings.window) * (square - self.errors)
        return score

    @torch.no_grad()
    def predict(self, values: Sequence[float] | torch.Tensor | None = None) -> torch.Tensor:
        """The next vector, (I,); of a learner with targets, the target (O,) of a vector that it has not read.

        Args:
            values: (I,), for a learner with targets.

        Raises:
            ValueError: nothing was read since the beginning of the series, or `values` are missing or not allowed.
        """
        if self.has_targets != (values is not None):
            needed = "must be given for a learner" if self.has_targets else "are for learners"
            raise ValueError(f"`values` {needed} with targets.")
        if values is not None:
            values = self._checked(values)
            current = _scaled(values, *self._scales_after(values))
            found, _ = predict_scaled(self.model, current, self.state, is_change=False)
            return self.target_mean + _deviation(self.target_variance) * found
        if self.last is None:
            raise ValueError("Nothing was read since the beginning of the series; call `learn` first.")
        following, _ = predict_scaled(self.model, _scaled(self.last, self.mean, self.variance), self.state)
        return self.mean + _deviation(self.variance) * following

    def reset(self) -> None:
        """Begin a new series: state and sensitivities are zero, all that was learned stays."""
        self.state, self.carried = self.model.model.init_state(1), self.rule.init_carried(1)
        self.last: torch.Tensor | None = None

    def _checked(self, values: Sequence[float] | torch.Tensor, name: str = "values") -> torch.Tensor:
        values = torch.as_tensor(values, dtype=self.model.dtype).clone()
        like = self.target_mean if name == "target" else self.mean
        if values.shape != like.shape:
            raise ValueError(f"`{name}` has shape {tuple(values.shape)}; it must be {tuple(like.shape)}.")
        if not bool((values.abs() <= LARGEST_VALUE).all()):
            raise ValueError(f"`{name}` is {values.tolist()}; values must be finite and at most {LARGEST_VALUE:g}.")
        return values

    def _scales_after(
        self, values: torch.Tensor, mean: torch.Tensor | None = None, variance: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Running mean and variance, by default of the vectors, with these values too."""
        mean, variance = (self.mean, self.variance) if mean is None else (mean, variance)
        rate, change = max(1 / (self.vectors_read + 1), 1 / self.settings.window), values - mean
        return mean + rate * change, (1 - rate) * (variance + rate * change * change)

    def _block(self, current: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, RecurrentState]:
        """Learn from them; returns the error (I,) and the state."""
        with torch.enable_grad(), self.rule.block(self.carried):
            found, state = predict_scaled(self.model, current, self.state, is_change=not self.has_targets)
            error = found - following
            loss = half_mean_square(error)
            if not bool(loss.isfinite()):
                raise NonFiniteLossError(f"The loss is {loss.item()}: nothing was learned from this vector.")
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm or math.inf)
        is_finite = bool(norm.isfinite())
        if is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if not is_finite:
            for sensitivity in self.carried.values():  # they may have diverged
                sensitivity.zero_()
            raise NonFiniteLossError(f"The norm of the gradient is {norm.item()}: nothing was learned from it.")
        return error.detach(), detach_state(state)


def _deviation(variance: torch.Tensor) -> torch.Tensor:
    """Its square root; 1 for a value that never changed."""
    return torch.where(variance > 0, variance.sqrt(), 1.0)


def _scaled(values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return (values - mean) / _deviation(variance)


def predict_scaled(
    model: PreTrainedModel, values: torch.Tensor, state: RecurrentState, is_change: bool = True
) -> tuple[torch.Tensor, RecurrentState]:
    """The next scaled vector (I,) from the present one, and the state after it; without `is_change`, a target (O,)."""
    output = model.model(input_values=values.view(1, 1, -1), state=state, use_cache=True)
    found = model.score(upcast(output.last_hidden_state)[0, 0].to(model.score.weight.dtype))
    return values + found if is_change else found, output.state


def half_mean_square(error: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return (error * error).sum() * (0.5 / error.numel())


def check_vector_model(model: PreTrainedModel, targets: bool = False) -> None:
    """Raise a ValueError for a model that a [`VectorLearner`] cannot use."""
    size = getattr(model.config, "input_size", None)
    if size is None or not hasattr(model, "score"):
        raise ValueError(
            f"`model` is a {type(model).__name__} that reads no vectors; it must be a model for sequence "
            "classification with `input_size` in its configuration."
        )
    if model.config.num_labels != size and not targets:
        raise ValueError(f"`model` gives {model.config.num_labels} values; it must give `input_size`, {size}.")
    if model.device.type != "cpu":
        raise ValueError(f"`model` is on {model.device}; it must be on the CPU.")
