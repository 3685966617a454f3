"""Sensitivities of recurrent units: derivatives of the carried state with respect to every parameter.

If the channels of a unit recur independently, the sensitivity of the state to a map W is one number per weight and
stream, so the exact gradient through the whole past costs about as much as the parameters (Memora, section 2.3 and
appendix E; Zucchet et al. 2023, section 3). Over a block of T steps, sensitivities advance by

    S_T = (∂h_T/∂h_0) S_0 + Σ_t (∂h_T/∂p_t) x_tᵀ,    p_t = W x_t.

Both derivatives are gradients of the block's final state, which autograd computes from the graph of the unit's own
forward pass. This covers every unit, resets, padding, complex channels and non-linear steps.

The gradient of the loss is the gradient inside the block plus Σ_b (∂L/∂h_0) ∘ S_0. The second term is added
to the parameter's gradient during the backward pass, so that accumulation, DDP and clipping see the sum. The same pass
over the memory advances S_0 to S_T, because the cost is dominated by reading the sensitivities.

Shape letters: B streams or batch, T steps, I inputs of a linear map, S state width, G channel groups, C channels of a
group. S = C · G; `rows` is the number of outputs of a map in a group.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.traced_unit import TracedUnit, UnitRecorder, differentiable, find_traced_parameters
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, state_dtype
from hf_recurrent.modeling.units.recurrent_unit import RecurrentUnit

try:
    from hf_recurrent.kernels import sensitivities_cpu
except ImportError:
    sensitivities_cpu = None

# Number of elements that stay in the CPU cache from the first operation on them to the last.
_CPU_CHUNK_ELEMENTS = 1 << 17


class Derivative(NamedTuple):
    """∂h_T/∂p: (B, T, C, rows, G) with inputs (B, T, I) for a matrix, (B, C, rows, G) for a vector."""

    of_rows: torch.Tensor
    inputs: torch.Tensor | None


# (S_0, ∂h_T/∂h_0, ∂h_T/∂p, ∂L/∂h_0, gradient or None): S_0 becomes S_T and the gradient gets Σ_b (∂L/∂h_0) ∘ S_0.
Advance = Callable[[torch.Tensor, torch.Tensor, Derivative, torch.Tensor, torch.Tensor | None], None]


class SensitivityEngine:
    """Exact real-time recurrent learning of every recurrent unit of a model, at any stride.

    Example:
        ```python
        engine = SensitivityEngine(model)
        state, sensitivities = model.init_state(B), engine.init_sensitivities(B)
        for batch in blocks:  # T steps each
            with engine.trace(sensitivities):
                output = model(**batch, state=state, use_cache=True)
                output.loss.backward()
            state = detach_state(output.state)
        ```

    The gradient of a unit's parameters is exact within its layer: it equals backpropagation through the whole past of
    the streams if no recurrent layer is above. Everything before a unit (embedding, norm, convolution, lower
    layers) gets the gradient inside the block only. Sensitivities are exact for constant weights, and approximate
    while the weights are slowly updated.

    Sensitivities are a flat dictionary like the state, `parameter name → (B, C, rows, G, …)`, float32 (float64 in
    float64 models); `trace` updates them in place.

    Args:
        model: any model whose recurrent parts are [`RecurrentUnit`]s.

    Raises:
        ValueError: the model has no such unit, a unit mixes its channels, or it has a parameter that is neither a
            vector nor part of an `nn.Linear`.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.dtype = model, state_dtype(model.dtype)
        self.advance: Advance = advance_sensitivities
        units = [(name, module) for name, module in model.named_modules() if isinstance(module, RecurrentUnit)]
        if not units:
            raise ValueError(
                f"`model` is a {type(model).__name__} without element-wise recurrent units, which exact real-time "
                "recurrent learning needs; use backpropagation through time (`bptt`) or, for a `DenseUnit`, the "
                "approximation SnAp-1 (`snap1`)."
            )
        self.units = [find_traced_parameters(name, unit, self.dtype) for name, unit in units]

    def init_sensitivities(self, batch_size: int, device: torch.device | str | None = None) -> RecurrentState:
        """Zero sensitivities, for the start of an episode."""
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1.")
        options = {"dtype": self.dtype, "device": self.model.device if device is None else device}
        return {
            name: torch.zeros(traced.sensitivity_shape(parameter, batch_size), **options)
            for traced in self.units
            for name, parameter in traced.parameters().items()
        }

    @contextmanager
    def advancing_by(self, advance: Advance) -> Iterator[None]:
        """Context in which another function advances the sensitivities, such as one that records the pass."""
        before, self.advance = self.advance, advance
        try:
            yield
        finally:
            self.advance = before

    @contextmanager
    def trace(self, sensitivities: RecurrentState) -> Iterator[None]:
        """Context for the forward and, optionally, backward pass of one block.

        `backward` adds the gradient through the past to `.grad`; `sensitivities` end up as those after the block.

        Raises:
            ValueError: the sensitivities are of another model or number of streams, or a unit ran twice in the block,
                as with gradient checkpointing.
        """
        blocks = [_UnitBlock(traced, sensitivities, self.dtype, self.advance) for traced in self.units]
        try:
            with ExitStack() as stack:
                for block in blocks:
                    stack.enter_context(block.recording())
                    stack.enter_context(block.joining_gradients())
                yield
            for block in blocks:
                block.finish()
        finally:
            for block in blocks:
                block.release()


class _UnitBlock(UnitRecorder):
    """One unit in one block: derivatives of its final state, and the pass over its sensitivities."""

    def __init__(self, traced: TracedUnit, sensitivities: RecurrentState, dtype: torch.dtype, advance: Advance):
        super().__init__(traced, dtype)
        self.sensitivities, self.advance_sensitivities = sensitivities, advance
        self.parameters = traced.parameters()
        self.derivatives: dict[str, Derivative] = {}
        self.transition: torch.Tensor | None = None
        self.grad_state: torch.Tensor | None = None
        self.waiting: list[str] = []  # parameters whose sensitivities are not advanced yet

    @contextmanager
    def joining_gradients(self) -> Iterator[None]:
        """Context in which a backward pass adds the gradient through the past to every parameter's gradient."""
        handles = [parameter.register_hook(partial(self.join, name)) for name, parameter in self.parameters.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def enter(self, state: torch.Tensor) -> torch.Tensor:
        for name, parameter in self.parameters.items():
            shape = self.traced.sensitivity_shape(parameter, len(state))
            carried = self.sensitivities.get(name)
            if carried is None:
                raise ValueError(f"`sensitivities` has no `{name}`; it belongs to another model.")
            if carried.shape != shape:
                raise ValueError(
                    f"`sensitivities['{name}']` has shape {tuple(carried.shape)}; it must be {tuple(shape)} for "
                    f"{len(state)} streams of this model. The number of streams cannot change."
                )
        return differentiable(_CarriedState.apply(state, self, *self.parameters.values()))

    def leave(self) -> None:
        """Compute the derivatives of the final state, with one backward pass per channel of a group."""
        traced, groups = self.traced, self.traced.groups
        inputs, outputs = zip(*(self.projections[name] for name in traced.linears), strict=True)
        of = [self.state, *outputs, *self.vectors.values()]
        by_channel = []
        for channels in self.final_state.unflatten(-1, (-1, groups)).unbind(-2):
            by_channel.append(torch.autograd.grad(channels.sum(), of, retain_graph=True))
        # Each (B, …, C, rows, G): derivatives of the C channels of the final state.
        of_state, *gradients = (
            _stack([gradient.unflatten(-1, (-1, groups)) for gradient in same], -3)
            for same in zip(*by_channel, strict=True)
        )
        self.transition, self.waiting = of_state, list(self.parameters)
        for name, linear_input, gradient in zip(traced.linears, inputs, gradients[: len(inputs)], strict=True):
            self.derivatives[f"{traced.name}.{name}.weight"] = Derivative(gradient, linear_input.to(self.dtype))
            if traced.linears[name].bias is not None:
                self.derivatives[f"{traced.name}.{name}.bias"] = Derivative(gradient.sum(1), None)
        for name, gradient in zip(traced.vectors, gradients[len(inputs) :], strict=True):
            self.derivatives[f"{traced.name}.{name}"] = Derivative(gradient.squeeze(1), None)
        self._drop_graph()

    def join(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """Hook of a parameter: add the gradient through the past to the complete gradient inside the block."""
        if self.grad_state is None:
            return None  # the backward pass of another block
        if name not in self.waiting:
            raise ValueError(f"`{name}` got two backward passes in one block; only one is supported.")
        if gradient.dim() == 2 and gradient.dtype == self.dtype and gradient.is_contiguous():
            # In place: a matrix product is not shared, but a vector's gradient may be a view of another tensor.
            self.advance(name, gradient)
            return None
        return gradient + self._past(name, gradient)

    def _past(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The gradient through the past, with the shape and type of a tensor."""
        past = torch.zeros(like.shape, dtype=self.dtype, device=like.device)
        self.advance(name, past)
        return past.to(like.dtype)

    def advance(self, name: str, gradient: torch.Tensor | None) -> None:
        self.waiting.remove(name)
        self.advance_sensitivities(
            self.sensitivities[name], self.transition, self.derivatives[name], self.grad_state, gradient
        )

    def finish(self) -> None:
        """Advance the sensitivities of parameters whose hook did not fire."""
        with torch.no_grad():
            for name in list(self.waiting):
                if self.grad_state is None:
                    self.advance(name, None)
                    continue
                parameter = self.parameters[name]
                past = self._past(name, parameter)
                parameter.grad = past if parameter.grad is None else parameter.grad + past

    def release(self) -> None:
        """Drop what would keep the graph, and with it this block: a cycle that is never collected."""
        self._drop_graph()
        del self.advance_sensitivities  # a pass that records keeps tensors of the graph

    def _drop_graph(self) -> None:
        self.projections, self.vectors, self.state, self.final_state = {}, {}, None, None


def _stack(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """`torch.stack`, without a copy of a single tensor."""
    return tensors[0].unsqueeze(dim) if len(tensors) == 1 else torch.stack(tensors, dim)


class _CarriedState(torch.autograd.Function):
    """The state before a block as a function of the parameters, so that they wait for its gradient."""

    @staticmethod
    def forward(ctx, state, block, *parameters):
        ctx.block = block
        return state.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_state):
        block = ctx.block
        block.grad_state = grad_state.unflatten(-1, (-1, block.traced.groups))
        return (None,) * (2 + len(block.parameters))


def advance_sensitivities(
    carried: torch.Tensor,
    transition: torch.Tensor,
    derivative: Derivative,
    grad_state: torch.Tensor | None,
    gradient: torch.Tensor | None,
) -> None:
    """An [`Advance`]: `carried` is (B, C, rows, G) or (B, C, rows, G, I), `transition` (B, C, C, G), `grad_state`
    (B, C, G), and `gradient` has the shape of the parameter.
    """
    if gradient is not None:
        gradient = gradient.view(carried.shape[2:])
    if derivative.inputs is not None:
        _advance_matrix(carried, transition, derivative, grad_state, gradient)
        return
    if gradient is not None:
        gradient.add_(torch.einsum("bcg,bcrg->rg", grad_state, carried))
    carried.copy_(torch.einsum("bcdg,bdrg->bcrg", transition, carried) + derivative.of_rows)


def _advance_matrix(carried, transition, derivative, grad_state, gradient):
    """S (B, C, rows, G, I) ← J S + Σ_t E_t x_tᵀ in place; gradient (rows, G, I) += Σ_b grad_state ∘ S before it.

    The compiled kernel makes one pass over the memory. On a CPU, plain torch works on a few streams at a time, which
    stay in the cache.
    """
    if sensitivities_cpu is not None and sensitivities_cpu.can_advance(carried, derivative.inputs.shape[1]):
        sensitivities_cpu.advance(carried, transition, *derivative, grad_state, gradient)
        return
    streams = len(carried)
    if carried.device.type == "cpu":
        streams = max(1, _CPU_CHUNK_ELEMENTS // carried[0].numel())
    factors = transition[:, :, :, None, :, None]
    rows, inputs = derivative.of_rows.unsqueeze(-1), derivative.inputs[:, :, None, None, None]
    weights = [None] * len(carried) if gradient is None else grad_state.unsqueeze(-1).split(streams)
    parts = (tensor.split(streams) for tensor in (carried, factors, rows, inputs))
    for part, part_factors, part_rows, part_inputs, weight in zip(*parts, weights, strict=False):
        if gradient is not None:
            _add_gradient(gradient, weight, part)
        _apply_transition(part, part_factors)
        _add_products(part, part_rows, part_inputs)


def _add_gradient(gradient: torch.Tensor, weight: torch.Tensor, part: torch.Tensor) -> None:
    """gradient (rows, G, I) += Σ over B and C of weight (B, C, G, 1) · part (B, C, rows, G, I)."""
    if len(part) > 1:
        gradient.add_(torch.einsum("bcg,bcrgi->rgi", weight.squeeze(-1), part))
        return
    for channel in range(part.shape[1]):
        gradient.addcmul_(part[0, channel], weight[0, channel])


def _apply_transition(part: torch.Tensor, factors: torch.Tensor) -> None:
    """part (B, C, rows, G, I) ← factors (B, C, C, 1, G, 1) · part, in place."""
    channels = part.shape[1]
    if channels == 1:
        part.mul_(factors[:, 0])
        return
    before = part.clone()
    for channel in range(channels):
        torch.mul(before[:, 0], factors[:, channel, 0], out=part[:, channel])
        for other in range(1, channels):
            part[:, channel].addcmul_(before[:, other], factors[:, channel, other])


def _add_products(part: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor) -> None:
    """part (B, C, rows, G, I) += Σ_t rows (B, T, C, rows, G, 1) · inputs (B, T, 1, 1, 1, I)."""
    if rows.shape[1] == 1:
        part.addcmul_(rows[:, 0], inputs[:, 0])
        return
    part.flatten(1, 3).baddbmm_(rows.flatten(2).transpose(1, 2), inputs.flatten(2))
