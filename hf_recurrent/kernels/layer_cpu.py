"""A layer of Memora on a CPU, forward and backward, each as one call: a chain of the passes of `training_cpu`.

A thread takes the rows of a stream, 64 at a time, through all passes of the layer, so that what lies between them
stays in the inner caches. Every row has the bits that it has in calls of the single passes, and so have sums over
rows.

Shape letters: B streams, T steps, M model width, S state width; `inner` is the width of the MLP.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .addresses import address, check_shapes, contiguous_addresses
from .layer_chain import Chain, Pointer, Template, aligned, weight_gradients
from .linear_scan_cpu import _WIDE_STEPS
from .output_memory import is_simulated
from .thread_count import free_threads, num_threads
from .training_cpu import _CHUNK, empty


class LayerWeights(NamedTuple):
    """Weights of a layer: vectors (S,) and (M,), and matrices (outputs, inputs).

    Args:
        rate: of the decay, as in `gate_coefficients`.
    """

    rate: Tensor
    norm: Tensor
    recurrence_gate: Tensor
    input_gate: Tensor
    input_projection: Tensor
    gate: Tensor
    out: Tensor
    mlp_norm: Tensor
    mlp_gate: Tensor
    up: Tensor
    down: Tensor


class Epsilons(NamedTuple):
    """Of the layer's norms: two RMSNorms and two gated norms."""

    norm: float
    gated: float
    mlp_norm: float
    mlp_gated: float


def supports(streams: int, steps: int) -> bool:
    """True for blocks (B, T) whose results have the bits of single passes, and of which each thread has several parts.

    64 rows are then whole streams, or part of one, and the scan's sums are not wider than its elements.
    """
    fits = 0 < steps < _WIDE_STEPS and (steps % _CHUNK == 0 or _CHUNK % steps == 0)
    parts = streams * steps / max(steps, _CHUNK)
    return fits and parts >= (1 if num_threads() == 1 else 2 * num_threads())


def layer(
    hidden: Tensor, state: Tensor, reset_mask: Tensor | None, weights: LayerWeights, eps: Epsilons, *, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output (B, T, M), the state (B, S) after it, and what [`layer_backward`] needs besides its inputs.

    Args:
        hidden: (B, T, M), B and T as in [`supports`].
        state: (B, S) before the first step.
        reset_mask: (B, T) bool.
        rounded: products as in `training_cpu.multiply`.
    """
    sizes = _Sizes.of(hidden, weights)
    prepared = _forward(sizes, eps, rounded, free_threads())
    output, last = empty(hidden.shape, sizes.dtype), torch.empty_like(state, memory_format=torch.contiguous_format)
    kept, workspace = empty(_kept(sizes).shape, sizes.dtype), empty(prepared.workspace, sizes.dtype)
    if not is_simulated():
        hidden, state = hidden.contiguous(), state.contiguous()
        reset_mask, resets = _resets(reset_mask, hidden.shape[:2])
        given = contiguous_addresses(prepared.names, (hidden, state, *weights), sizes.dtype, prepared.shapes)
        results = output.data_ptr(), last.data_ptr(), kept.data_ptr(), workspace.data_ptr()
        prepared.template.run((resets, *results, *given))
    return output, last, kept


class _Prepared(NamedTuple):
    """What calls with the same sizes and options have in common.

    Args:
        template: the addresses of its tensors are in the order of [`_FORWARD`] or [`_BACKWARD`].
        workspace: a vector's shape.
        names: of the tensors that are given, in this order.
        shapes: of these tensors.
    """

    template: Template
    workspace: torch.Size
    names: Sequence[str]
    shapes: Sequence[torch.Size]


_FORWARD = ("resets", "output", "last", "kept", "workspace", "hidden", "state", *LayerWeights._fields)


@lru_cache(64)
def _forward(sizes: "_Sizes", eps: Epsilons, rounded: bool, threads: int) -> _Prepared:
    pointers = {name: Pointer(number) for number, name in enumerate(_FORWARD)}
    chain = sizes.chain(pointers["workspace"], threads=threads, rounded=rounded)
    given, kept = _Given.of(pointers), _kept(sizes).pointers(pointers["kept"])
    _add_layer(chain, sizes, given, eps, kept, pointers["last"], pointers["output"])
    call, workspace = chain.call()
    shapes = (*sizes.inputs(), *_shapes(sizes))
    return _Prepared(Template([call]), sizes.elements(workspace), _FORWARD[-len(shapes) :], shapes)


def _resets(reset_mask: Tensor | None, shape: torch.Size) -> tuple[Tensor | None, int]:
    """The contiguous mask, which has to be alive in the call, and its address; 0 without one."""
    if reset_mask is None:
        return None, 0
    check_shapes({"reset_mask": (reset_mask, shape)})
    reset_mask = reset_mask.contiguous()
    return reset_mask, address("reset_mask", reset_mask, torch.bool, shape.numel())


def _add_layer(
    chain: Chain, sizes: "_Sizes", given: "_Given", eps: Epsilons, k: "_Pointers", last: Pointer, output: Pointer
) -> None:
    """The passes of [`layer`] from and to addresses; `k` of the arrays that are kept."""
    w = given.weights
    chain.rms_norm(eps.norm, given.hidden, w.norm, k["normed"], k["scales"])
    for name, weight in _inward(w):
        chain.map(k["normed"], weight, sizes.state, sizes.model, k[name])
    chain.recurrence(k, w.rate, given.state, given.resets, last)
    chain.gated_norm(eps.gated, sizes.state, k["gate"], k["states"], k["gated"], k["moments"])
    chain.map(k["gated"], w.out, sizes.model, sizes.state, k["hidden"], plus=given.hidden)
    chain.rms_norm(eps.mlp_norm, k["hidden"], w.mlp_norm, k["mlp_normed"], k["mlp_scales"])
    chain.map(k["mlp_normed"], w.mlp_gate, sizes.inner, sizes.model, k["mlp_gate"])
    chain.map(k["mlp_normed"], w.up, sizes.inner, sizes.model, k["up"])
    chain.gated_norm(eps.mlp_gated, sizes.inner, k["mlp_gate"], k["up"], k["mlp_gated"], k["mlp_moments"])
    chain.map(k["mlp_gated"], w.down, sizes.model, sizes.inner, output, plus=k["hidden"])


def _inward(weights: LayerWeights) -> list[tuple[str, Pointer]]:
    """Name of the result, and weight, of the maps of the first norm, in the order in which their gradients add up."""
    names = "recurrence_gate", "input_gate", "inputs", "gate"
    return [*zip(names, weights[2:6], strict=True)]


class LayerGradients(NamedTuple):
    """Gradients of the inputs of [`layer`]; those of weights that were not wanted are None."""

    hidden: Tensor
    state: Tensor
    weights: LayerWeights


def layer_backward(
    hidden: Tensor,
    state: Tensor,
    reset_mask: Tensor | None,
    weights: LayerWeights,
    eps: Epsilons,
    kept: Tensor,
    grad: Tensor,
    grad_last: Tensor | None,
    wanted: Sequence[bool],
    *,
    rounded: bool,
) -> LayerGradients:
    """Gradients from those of the output (B, T, M) and of the last state (B, S); `wanted` says of which weights."""
    sizes, has_last = _Sizes.of(hidden, weights), grad_last is not None
    prepared, dtype = _backward(sizes, eps, rounded, free_threads(), has_last, tuple(wanted)), sizes.dtype
    grad_hidden, grad_state = (
        empty(hidden.shape, dtype),
        torch.empty_like(state, memory_format=torch.contiguous_format),
    )
    scratch, workspace = empty(_scratch(sizes).shape, dtype), empty(prepared.workspace, dtype)
    sums = [empty(shape, dtype) for shape in _shapes_of_sums(sizes)]
    if not is_simulated():
        hidden, state, grad = hidden.contiguous(), state.contiguous(), grad.contiguous()
        reset_mask, resets = _resets(reset_mask, hidden.shape[:2])
        last = (grad_last.contiguous(),) if has_last else ()
        tensors = hidden, state, *weights, kept, grad, *last
        given = contiguous_addresses(prepared.names, tensors, dtype, prepared.shapes)
        results = [each.data_ptr() for each in (grad_hidden, grad_state, scratch, workspace, *sums)]
        prepared.template.run((resets, *results, *given, *([] if has_last else [0])))
    found = (
        None if not want else each.sum(0) if name in _VECTORS else each
        for name, each, want in zip(LayerWeights._fields, sums, wanted, strict=True)
    )
    return LayerGradients(grad_hidden, grad_state, LayerWeights(*found))


_VECTORS = {"rate", "norm", "mlp_norm"}
_GIVEN_BACKWARD = ("hidden", "state", *LayerWeights._fields, "kept", "grad", "grad_last")
_BACKWARD = (
    *("resets", "grad_hidden", "grad_state", "scratch", "workspace"),
    *(f"grad_{name}" for name in LayerWeights._fields),
    *_GIVEN_BACKWARD,
)


@lru_cache(64)
def _backward(
    sizes: "_Sizes", eps: Epsilons, rounded: bool, threads: int, has_last: bool, wanted: tuple[bool, ...]
) -> _Prepared:
    pointers = {name: Pointer(number) for number, name in enumerate(_BACKWARD)}
    options = {"threads": threads, "rounded": rounded}
    mlp, block = (sizes.chain(pointers["workspace"], descends=True, **options) for _ in range(2))
    given = _Given.of(pointers)
    k, s = _kept(sizes).pointers(pointers["kept"]), _scratch(sizes).pointers(pointers["scratch"])
    s |= {"output": pointers["grad"], "last": pointers["grad_last"] if has_last else 0}
    s |= {"layer": pointers["grad_hidden"], "state": pointers["grad_state"]}
    to = LayerWeights(*(pointers[f"grad_{name}"] for name in LayerWeights._fields))
    _add_mlp_backward(mlp, sizes, given, eps, k, s, to)
    _add_block_backward(block, sizes, given, eps, k, s, to)
    calls, workspaces = [], []
    for chain, maps in ((mlp, _mlp_maps(sizes, k, s)), (block, _block_maps(sizes, k, s))):
        call, workspace = chain.call()
        workspaces.append(workspace)
        chosen = [
            (*maps[name], result)
            for name, result, is_wanted in zip(LayerWeights._fields, to, wanted, strict=True)
            if name in maps and is_wanted
        ]
        calls += [call, *weight_gradients(chosen, sizes.rows, sizes.dtype, **options)]
    hidden, state = sizes.inputs()
    shapes = (hidden, state, *_shapes(sizes), _kept(sizes).shape, hidden, *([state] if has_last else []))
    return _Prepared(Template(calls), sizes.elements(max(workspaces)), _GIVEN_BACKWARD[: len(shapes)], shapes)


def _add_mlp_backward(
    chain: Chain, sizes: "_Sizes", given: "_Given", eps: Epsilons, k: "_Pointers", s: "_Pointers", to: LayerWeights
) -> None:
    """The passes back to the input of the second norm.

    Args:
        k: pointers to the arrays that were kept, by name.
        s: to the gradients of arrays, of the layer's output, last state, input ("layer") and state.
        to: to the gradients of weights; of vectors, the sums over the rows of each chunk.
    """
    w, model, inner = given.weights, sizes.model, sizes.inner
    normed, gated = chain.local(model), chain.local(inner)
    chain.map_backward(s["output"], w.down, model, inner, gated)
    chain.gated_norm_backward(
        eps.mlp_gated, inner, k["mlp_gate"], k["up"], k["mlp_moments"], gated, s["mlp_gate"], s["up"]
    )
    chain.map_backward(s["mlp_gate"], w.mlp_gate, inner, model, normed)
    chain.map_backward(s["up"], w.up, inner, model, normed, add=True)
    chain.rms_norm_backward(
        eps.mlp_norm, k["hidden"], w.mlp_norm, k["mlp_scales"], normed, s["hidden"], to.mlp_norm, s["output"]
    )


def _add_block_backward(
    chain: Chain, sizes: "_Sizes", given: "_Given", eps: Epsilons, k: "_Pointers", s: "_Pointers", to: LayerWeights
) -> None:
    """The passes from there to the layer's input; arguments as in [`_add_mlp_backward`]."""
    w, model, state = given.weights, sizes.model, sizes.state
    normed, gated, states = chain.local(model), chain.local(state), chain.local(state)
    chain.map_backward(s["hidden"], w.out, model, state, gated)
    chain.gated_norm_backward(eps.gated, state, k["gate"], k["states"], k["moments"], gated, s["gate"], states)
    chain.recurrence_backward(
        k, s, w.rate, given.state, given.resets, grad_states=states, log_decays=gated, grad_rate=to.rate
    )
    for number, (name, weight) in enumerate(_inward(w)):
        chain.map_backward(s[name], weight, state, model, normed, add=number > 0)
    chain.rms_norm_backward(eps.norm, given.hidden, w.norm, k["scales"], normed, s["layer"], to.norm, s["hidden"])


_Maps = dict[str, tuple[Pointer, int, Pointer, int]]  # name of a matrix → gradient, outputs, input, inputs of its map


def _mlp_maps(sizes: "_Sizes", k: "_Pointers", s: "_Pointers") -> _Maps:
    model, inner = sizes.model, sizes.inner
    return {
        "mlp_gate": (s["mlp_gate"], inner, k["mlp_normed"], model),
        "up": (s["up"], inner, k["mlp_normed"], model),
        "down": (s["output"], model, k["mlp_gated"], inner),
    }


def _block_maps(sizes: "_Sizes", k: "_Pointers", s: "_Pointers") -> _Maps:
    model, state = sizes.model, sizes.state
    return {
        "recurrence_gate": (s["recurrence_gate"], state, k["normed"], model),
        "input_gate": (s["input_gate"], state, k["normed"], model),
        "input_projection": (s["inputs"], state, k["normed"], model),
        "gate": (s["gate"], state, k["normed"], model),
        "out": (s["hidden"], model, k["gated"], state),
    }


# ---- Sizes and memory ----

_Pointers = dict[str, Pointer]


class _Layout:
    """Offsets of arrays in one tensor; each begins at a line of the cache, if the tensor does."""

    def __init__(self, widths: dict[str, int], rows: int, item_size: int):
        self.offsets, at = {}, 0
        for name, width in widths.items():
            self.offsets[name] = at
            at += aligned(rows * width * item_size)
        self.shape = torch.Size((at // item_size,))

    def pointers(self, tensor: Pointer) -> _Pointers:
        return {name: Pointer(tensor.base, offset) for name, offset in self.offsets.items()}


class _Sizes(NamedTuple):
    streams: int
    steps: int
    model: int
    state: int
    inner: int
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, weights: LayerWeights) -> "_Sizes":
        return cls(*hidden.shape, len(weights.rate), len(weights.up), hidden.dtype)

    @property
    def rows(self) -> int:
        return self.streams * self.steps

    def inputs(self) -> tuple[torch.Size, torch.Size]:
        """The shapes of a layer's hidden states and state."""
        return torch.Size((self.streams, self.steps, self.model)), torch.Size((self.streams, self.state))

    def elements(self, size: int) -> torch.Size:
        """The shape of a vector of that many bytes."""
        return torch.Size((size // self.dtype.itemsize,))

    def chain(self, workspace: Pointer, **options) -> Chain:
        return Chain(self.dtype, (self.rows, self.steps, self.model, self.state), workspace, **options)


@cache
def _kept(sizes: _Sizes) -> _Layout:
    """Arrays that the backward pass reads."""
    widths = dict.fromkeys(("normed", "hidden", "mlp_normed"), sizes.model)
    widths |= dict.fromkeys(("recurrence_gate", "input_gate", "inputs", "gate", "states", "gated"), sizes.state)
    widths |= dict.fromkeys(("mlp_gate", "up", "mlp_gated"), sizes.inner)
    widths |= {"scales": 1, "mlp_scales": 1, "moments": 6, "mlp_moments": 6}
    return _Layout(widths, sizes.rows, sizes.dtype.itemsize)


@cache
def _scratch(sizes: _Sizes) -> _Layout:
    """Gradients, of the arrays with these names, that those of weights are computed from."""
    layouts = [
        _Layout({"hidden": sizes.model} | dict.fromkeys(names, width), sizes.rows, sizes.dtype.itemsize)
        for names, width in (
            (("mlp_gate", "up"), sizes.inner),
            (("recurrence_gate", "input_gate", "inputs", "gate"), sizes.state),
        )
    ]
    # The MLP's gradients have been read when those of the block are written.
    layouts[0].offsets |= layouts[1].offsets
    layouts[0].shape = max(layout.shape for layout in layouts)
    return layouts[0]


class _Given(NamedTuple):
    """A layer's inputs."""

    hidden: Pointer
    state: Pointer
    resets: Pointer
    weights: LayerWeights

    @classmethod
    def of(cls, pointers: _Pointers) -> "_Given":
        weights = LayerWeights(*(pointers[name] for name in LayerWeights._fields))
        return cls(pointers["hidden"], pointers["state"], pointers["resets"], weights)


@cache
def _shapes(sizes: _Sizes) -> LayerWeights:
    """The shapes of a layer's weights."""
    model, state, inner = sizes.model, sizes.state, sizes.inner
    inward, shapes = (state, model), {"rate": (state,), "norm": (model,), "mlp_norm": (model,), "out": (model, state)}
    shapes |= dict.fromkeys(("recurrence_gate", "input_gate", "input_projection", "gate"), inward)
    shapes |= {"mlp_gate": (inner, model), "up": (inner, model), "down": (model, inner)}
    return LayerWeights(**{name: torch.Size(shape) for name, shape in shapes.items()})


@cache
def _shapes_of_sums(sizes: _Sizes) -> LayerWeights:
    """Those of their gradients; a vector has a row for each chunk of rows."""
    chunks = -(-sizes.rows // _CHUNK)
    return LayerWeights(*(torch.Size((chunks, *shape)) if len(shape) == 1 else shape for shape in _shapes(sizes)))
