"""Sensitivities of recurrent units: how the carried state depends on every parameter, for all of the past.

For a unit whose channels recur independently, the sensitivity of a map W to the state is one number for every weight
and stream, so that the exact gradient of the past costs what the parameters cost (Memora, section 2.3 and appendix E;
Zucchet et al. 2023, section 3). Nothing here knows any unit: over a block of T steps

    S_T = (∂h_T/∂h_0) S_0 + Σ_t (∂h_T/∂p_t) x_tᵀ,    p_t = W x_t,

and both derivatives are the gradient of the block's last state, which automatic differentiation takes from the graph
that the unit's own forward pass has built. Resets, padding, complex channels and non-linear steps are all in there.

The gradient of the loss is what backpropagation inside the block gives plus Σ_b (∂L/∂h_0) ∘ S_0. The latter is added
during the backward pass, when both ∂L/∂h_0 and the parameter's own gradient are there, so that whatever works on
gradients (accumulation, processes that average them, clipping) finds the whole. What is read of S_0 is advanced to
S_T in the same pass, because sensitivities are large and reading them is what costs.

Shape letters: B streams or batch, T steps, M inputs of a map, S state width, G groups of channels, K channels of a
group (S = K · G), P rows of a map in a group.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.traced_unit import TracedUnit, UnitRecorder, differentiable, find_traced_parameters
from hf_recurrent.modeling.recurrent_state import RecurrentState, state_dtype
from hf_recurrent.modeling.recurrent_unit import RecurrentUnit

try:
    from hf_recurrent.kernels import sensitivities_cpu
except ImportError:
    sensitivities_cpu = None

# Sensitivities of so many numbers stay in the cache from the first operation on them to the last.
_CPU_CHUNK_ELEMENTS = 1 << 17


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

    The gradient of every parameter of a unit is then exact as far as the unit's own layer goes: it is that of
    backpropagation through the whole past of the streams if nothing recurrent stands above. What lies before a unit
    (the embedding, a norm, a convolution, the layers below) gets the gradient inside the block only. Sensitivities are
    exact while the weights stand still; learning changes them slowly.

    Sensitivities are a flat dictionary like the state, `parameter name → (B, K, P, G, …)`, float32 (float64 in float64
    models); `trace` advances them in place.

    Args:
        model: any model whose recurrence stands in [`RecurrentUnit`]s.

    Raises:
        ValueError: the model has no such unit, a unit mixes its channels, or it has parameters that are neither
            vectors nor those of an `nn.Linear`.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.dtype = state_dtype(model.dtype)
        units = [(name, module) for name, module in model.named_modules() if isinstance(module, RecurrentUnit)]
        if not units:
            raise ValueError(
                f"`model` is a {type(model).__name__} without element-wise recurrent units, so exact real-time "
                "recurrent learning cannot be done; use backpropagation through time (`bptt`) or, for a `DenseUnit`, "
                "the approximation SnAp-1 (`snap1`)."
            )
        self.units = [find_traced_parameters(name, unit, self.dtype) for name, unit in units]

    def shapes(self, batch_size: int) -> dict[str, torch.Size]:
        """Name and shape of every sensitivity."""
        return {
            name: traced.sensitivity_shape(parameter, batch_size)
            for traced in self.units
            for name, parameter in traced.parameters().items()
        }

    def init_sensitivities(self, batch_size: int, device: torch.device | str | None = None) -> RecurrentState:
        """Zeros: what every episode starts from."""
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1.")
        options = {"dtype": self.dtype, "device": self.model.device if device is None else device}
        return {name: torch.zeros(shape, **options) for name, shape in self.shapes(batch_size).items()}

    @contextmanager
    def trace(self, sensitivities: RecurrentState) -> Iterator[None]:
        """Read one block inside: forward and, if anything is to be learned, backward.

        `backward` adds the gradient of the past to `.grad`; at the end the sensitivities are those after the block.

        Raises:
            ValueError: the sensitivities are of another model or number of streams than the block, or a unit ran twice
                in the block, as with gradient checkpointing.
        """
        blocks = [_UnitBlock(traced, sensitivities, self.dtype) for traced in self.units]
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block.recording())
                stack.enter_context(block.joining_gradients())
            yield
        for block in blocks:
            block.finish()


class _UnitBlock(UnitRecorder):
    """One unit's part in one block: derivatives of its last state, and the pass over its sensitivities."""

    def __init__(self, traced: TracedUnit, sensitivities: RecurrentState, dtype: torch.dtype):
        super().__init__(traced, dtype)
        self.sensitivities = sensitivities
        self.parameters = traced.parameters()
        self.derivatives: dict[str, _Derivative] = {}
        self.transition: torch.Tensor | None = None
        self.grad_state: torch.Tensor | None = None
        self.waiting: list[str] = []  # parameters whose sensitivities are still those before the block

    @contextmanager
    def joining_gradients(self) -> Iterator[None]:
        """While it lasts, a backward pass gives every parameter the gradient of the past too."""
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
                raise ValueError(f"`sensitivities` has no `{name}`; they are those of another model.")
            if carried.shape != shape:
                raise ValueError(
                    f"`sensitivities['{name}']` has shape {tuple(carried.shape)}, but {len(state)} streams of this "
                    f"model need {tuple(shape)}; streams and their sensitivities are carried together, so their "
                    "number cannot change."
                )
        return differentiable(_CarriedState.apply(state, self, *self.parameters.values()))

    def leave(self) -> None:
        """Derivatives of the last state, one backward pass of the step for each channel of a group."""
        traced, groups = self.traced, self.traced.groups
        inputs, outputs = zip(*(self.projections[name] for name in traced.linears), strict=True)
        of = [self.state, *outputs, *self.vectors.values()]
        by_channel = []
        for channels in self.final_state.unflatten(-1, (-1, groups)).unbind(-2):
            by_channel.append(torch.autograd.grad(channels.sum(), of, retain_graph=True))
        # (B, …, K, P, G) each: the channels of the last state that a row drives.
        of_state, *gradients = (
            torch.stack([gradient.unflatten(-1, (-1, groups)) for gradient in same], -3)
            for same in zip(*by_channel, strict=True)
        )
        self.transition, self.waiting = of_state, list(self.parameters)
        for name, linear_input, gradient in zip(traced.linears, inputs, gradients[: len(inputs)], strict=True):
            self.derivatives[f"{traced.name}.{name}.weight"] = _Derivative(gradient, linear_input.to(self.dtype))
            self.derivatives[f"{traced.name}.{name}.bias"] = _Derivative(gradient.sum(1), None)
        for name, gradient in zip(traced.vectors, gradients[len(inputs) :], strict=True):
            self.derivatives[f"{traced.name}.{name}"] = _Derivative(gradient.squeeze(1), None)
        # The graph knows this block, which must not keep the graph.
        self.projections, self.vectors, self.state, self.final_state = {}, {}, None, None

    def join(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """A parameter's gradient inside the block is complete: add that of the past."""
        if self.grad_state is None:
            return None  # not from this block
        if name not in self.waiting:
            raise ValueError(f"The sensitivities of `{name}` saw two backward passes in one block.")
        if gradient.dim() == 2 and gradient.dtype == self.dtype and gradient.is_contiguous():
            # A product that is nobody else's; a vector's gradient may be a view of what others still need.
            self.advance(name, gradient)
            return None
        past = torch.zeros(gradient.shape, dtype=self.dtype, device=gradient.device)
        self.advance(name, past)
        return gradient + past.to(gradient.dtype)

    def advance(self, name: str, gradient: torch.Tensor | None) -> None:
        """Bring one parameter's sensitivities behind the block, and add Σ_b (∂L/∂h_0) ∘ S_0 to `gradient`."""
        self.waiting.remove(name)
        carried, derivative = self.sensitivities[name], self.derivatives[name]
        if gradient is not None:
            gradient = gradient.view(carried.shape[2:])
        function = _advance_vector if derivative.inputs is None else _advance_matrix
        function(carried, self.transition, derivative, self.grad_state, gradient)

    def finish(self) -> None:
        """Advance what no backward pass has advanced, for want of one or of a gradient inside the block."""
        with torch.no_grad():
            for name in list(self.waiting):
                if self.grad_state is None:
                    self.advance(name, None)
                    continue
                parameter = self.parameters[name]
                past = torch.zeros(parameter.shape, dtype=self.dtype, device=parameter.device)
                self.advance(name, past)
                past = past.to(parameter.dtype)
                parameter.grad = past if parameter.grad is None else parameter.grad + past


class _Derivative(NamedTuple):
    """∂h_T/∂p: (B, T, K, P, G) with the inputs (B, T, M) of a matrix, (B, K, P, G) of a vector."""

    of_rows: torch.Tensor
    inputs: torch.Tensor | None


class _CarriedState(torch.autograd.Function):
    """The state that a block starts from, as a function of the parameters that made it."""

    @staticmethod
    def forward(ctx, state, block, *parameters):
        ctx.block = block
        return state.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_state):
        block = ctx.block
        block.grad_state = grad_state.unflatten(-1, (-1, block.traced.groups))
        # Nothing to add here, but every parameter's gradient has waited for this.
        return (None,) * (2 + len(block.parameters))


def _advance_vector(carried, transition, derivative, grad_state, gradient):
    """S (B, K, P, G) ← J S + E in place; gradient (P, G) += Σ_b grad_state ∘ S of before."""
    if gradient is not None:
        gradient.add_(torch.einsum("bkg,bkpg->pg", grad_state, carried))
    carried.copy_(torch.einsum("bkjg,bjpg->bkpg", transition, carried) + derivative.of_rows)


def _advance_matrix(carried, transition, derivative, grad_state, gradient):
    """S (B, K, P, G, M) ← J S + Σ_t E_t x_tᵀ in place; gradient (P, G, M) += Σ_b grad_state ∘ S of before.

    The compiled kernel goes over them once. Plain torch takes a few streams at a time on a CPU, so that they are in
    the cache from the first operation to the last.
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
    """gradient (P, G, M) += Σ_bk weight (B, K, G, 1) · part (B, K, P, G, M)."""
    if len(part) > 1:
        gradient.add_(torch.einsum("bkg,bkpgm->pgm", weight.squeeze(-1), part))
        return
    for channel in range(part.shape[1]):
        gradient.addcmul_(part[0, channel], weight[0, channel])


def _apply_transition(part: torch.Tensor, factors: torch.Tensor) -> None:
    """part (B, K, P, G, M) ← factors (B, K, K, 1, G, 1) · part, in place."""
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
    """part (B, K, P, G, M) += Σ_t rows (B, T, K, P, G, 1) · inputs (B, T, 1, 1, 1, M)."""
    if rows.shape[1] == 1:
        part.addcmul_(rows[:, 0], inputs[:, 0])
        return
    part.flatten(1, 3).baddbmm_(rows.flatten(2).transpose(1, 2), inputs.flatten(2))
