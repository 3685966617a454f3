"""A layer of Memora on a CPU, forward and backward, as chains of the passes of `training_cpu`.

Shape letters: B streams, T steps, M model width, S state width; `inner` is the width of the MLP.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .addresses import address, check_shapes, contiguous_addresses
from .chains import MOST_THREADS, Chain, Layout, Rows, Template, symbols, weight_gradients, workspace
from .linear_scan_cpu import _WIDE_STEPS
from .output_memory import is_simulated
from .thread_count import free_threads, num_threads
from .training_cpu import _CHUNK, empty

_CALLS = 64  # sizes and options whose calls are remembered


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
    sizes, dtype = _Sizes.of(hidden, weights), hidden.dtype
    output, last = empty(hidden.shape, dtype), torch.empty_like(state, memory_format=torch.contiguous_format)
    kept = empty(torch.Size((_kept(sizes).elements,)), dtype)
    call = _forward(_Options(sizes, eps, rounded, min(free_threads(), MOST_THREADS)))
    memory = workspace(call.size, dtype)
    if not is_simulated():
        hidden, state, reset_mask, given = _given(sizes, hidden, state, reset_mask, weights)
        call.run(np.array([*given, memory, kept.data_ptr(), last.data_ptr(), output.data_ptr()]))
    return output, last, kept


@lru_cache(_CALLS)
def _forward(options: "_Options") -> Template:
    at = symbols((*_GIVEN, "memory", "kept", "last", "output"))
    sizes, eps, w, k = options.sizes, options.eps, _weights(at), _kept(options.sizes).pointers(at["kept"])
    chain, model, state, inner = options.chain(at["memory"]), sizes.model, sizes.state, sizes.inner
    normed, gated, mlp_gated = chain.local(model), chain.local(state), chain.local(inner)
    chain.reads(model, at["hidden"])
    chain.rms_norm(eps.norm, model, at["hidden"], w.norm, normed, k["scales"])
    for name, weight in _inward(w):
        chain.map(normed, weight, state, model, k[name])
    chain.recurrence(state, k, w.rate, at["state"], at["resets"], at["last"])
    chain.gated_norm(eps.gated, state, k["gate"], k["states"], gated, k["moments"])
    chain.map(gated, w.out, model, state, k["hidden"], plus=at["hidden"])
    chain.rms_norm(eps.mlp_norm, model, k["hidden"], w.mlp_norm, normed, k["mlp_scales"])
    chain.map(normed, w.mlp_gate, inner, model, k["mlp_gate"])
    chain.map(normed, w.up, inner, model, k["up"])
    chain.gated_norm(eps.mlp_gated, inner, k["mlp_gate"], k["up"], mlp_gated, k["mlp_moments"])
    chain.map(mlp_gated, w.down, model, inner, at["output"], plus=k["hidden"])
    return chain.template()


def _weights(at: dict[str, int], prefix: str = "") -> LayerWeights:
    """Symbols of the weights, or with the prefix `grad_` of their gradients."""
    return LayerWeights(*(at[prefix + name] for name in LayerWeights._fields))


def _inward(weights: LayerWeights) -> list[tuple[str, int]]:
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
    sizes, dtype = _Sizes.of(hidden, weights), hidden.dtype
    grad_hidden = empty(hidden.shape, dtype)
    grad_state = torch.empty_like(state, memory_format=torch.contiguous_format)
    scratch = empty(torch.Size((_scratch(sizes).elements,)), dtype)
    chunks = -(-sizes.rows.count // _CHUNK)
    sums = LayerWeights(
        *(hidden.new_empty(chunks, len(w)) if w.dim() == 1 else empty(w.shape, dtype) for w in weights)
    )
    calls = _backward(_Options(sizes, eps, rounded, min(free_threads(), MOST_THREADS)), tuple(wanted))
    memory = workspace(max(call.size for call in calls), dtype)
    if not is_simulated():
        hidden, state, reset_mask, given = _given(sizes, hidden, state, reset_mask, weights)
        grad, grad_last = grad.contiguous(), None if grad_last is None else grad_last.contiguous()
        grads = (
            address("kept", kept, dtype, _kept(sizes).elements),
            address("grad", grad, dtype, hidden.numel()),
            0 if grad_last is None else address("grad_last", grad_last, dtype, state.numel()),
        )
        results = [each.data_ptr() for each in (grad_hidden, grad_state, scratch, *sums)]
        addresses = np.array([*given, memory, *grads, *results])
        for call in calls:
            call.run(addresses)
    found = (each.sum(0) if w.dim() == 1 else each for each, w in zip(sums, weights, strict=True))
    chosen = (each if want else None for each, want in zip(found, wanted, strict=True))
    return LayerGradients(grad_hidden, grad_state, LayerWeights(*chosen))


@lru_cache(_CALLS)
def _backward(options: "_Options", wanted: Sequence[bool]) -> list[Template]:
    """Passes and products for the weights; the gradients of vectors are sums over the rows of each chunk."""
    names = ("memory", "kept", "grad_output", "grad_last", "grad_input", "grad_state", "scratch")
    at = symbols((*_GIVEN, *names, *(f"grad_{name}" for name in LayerWeights._fields)))
    k, s = _kept(options.sizes).pointers(at["kept"]), _scratch(options.sizes).pointers(at["scratch"])
    to, calls = _weights(at, "grad_"), []
    for passes in (_mlp_backward, _block_backward):
        chain = options.chain(at["memory"], descends=True)
        maps = passes(chain, options, at, k, s, to)
        chosen = [
            (*maps[name], result)
            for name, result, is_wanted in zip(LayerWeights._fields, to, wanted, strict=True)
            if name in maps and is_wanted
        ]
        rows, given = options.sizes.rows.count, {"threads": options.threads, "rounded": options.rounded}
        calls += [chain.template(), *weight_gradients(options.sizes.dtype, chosen, rows, **given)]
    return calls


_At = dict[str, int]  # name → symbol
_Maps = dict[str, tuple[int, int, int, int]]  # name of a matrix → gradient, outputs, input, inputs of its map


def _mlp_backward(chain: Chain, options: "_Options", at: _At, k: _At, s: _At, to: LayerWeights) -> _Maps:
    """The passes back to the input of the second norm; returns the maps for the gradients of weights.

    Args:
        k: what was kept.
        s: gradients of it, and inputs of maps.
        to: gradients of weights.
    """
    eps, w, model, inner = options.eps, _weights(at), options.sizes.model, options.sizes.inner
    normed, gated = chain.local(model), chain.local(inner)
    chain.reads(inner, k["mlp_gate"], k["up"])
    chain.reads(model, at["grad_output"], k["hidden"])
    chain.map_backward(at["grad_output"], w.down, model, inner, gated)
    chain.gated_norm_backward(
        eps.mlp_gated, inner, k["mlp_gate"], k["up"], k["mlp_moments"], gated, s["mlp_gate"], s["up"], s["mlp_gated"]
    )
    chain.map_backward(s["mlp_gate"], w.mlp_gate, inner, model, normed)
    chain.map_backward(s["up"], w.up, inner, model, normed, add=True)
    chain.rms_norm_backward(
        *(eps.mlp_norm, model, k["hidden"], w.mlp_norm, k["mlp_scales"], normed),
        *(s["hidden"], to.mlp_norm, at["grad_output"], s["mlp_normed"]),
    )
    return {
        "mlp_gate": (s["mlp_gate"], inner, s["mlp_normed"], model),
        "up": (s["up"], inner, s["mlp_normed"], model),
        "down": (at["grad_output"], model, s["mlp_gated"], inner),
    }


def _block_backward(chain: Chain, options: "_Options", at: _At, k: _At, s: _At, to: LayerWeights) -> _Maps:
    """The same from there to the layer's input."""
    eps, w, model, state = options.eps, _weights(at), options.sizes.model, options.sizes.state
    normed, gated, states = chain.local(model), chain.local(state), chain.local(state)
    chain.reads(state, k["gate"], k["states"], k["recurrence_gate"], k["input_gate"], k["inputs"])
    chain.reads(model, s["hidden"], at["hidden"])
    chain.map_backward(s["hidden"], w.out, model, state, gated)
    chain.gated_norm_backward(
        eps.gated, state, k["gate"], k["states"], k["moments"], gated, s["gate"], states, s["gated"]
    )
    grads = s | {"last": at["grad_last"], "state": at["grad_state"]}
    chain.recurrence_backward(
        *(state, k, grads, w.rate, at["state"], at["resets"]),
        **{"grad_states": states, "log_decays": gated, "grad_rate": to.rate},
    )
    for number, (name, weight) in enumerate(_inward(w)):
        chain.map_backward(s[name], weight, state, model, normed, add=number > 0)
    chain.rms_norm_backward(
        *(eps.norm, model, at["hidden"], w.norm, k["scales"], normed),
        *(at["grad_input"], to.norm, s["hidden"], s["normed"]),
    )
    return {
        "recurrence_gate": (s["recurrence_gate"], state, s["normed"], model),
        "input_gate": (s["input_gate"], state, s["normed"], model),
        "input_projection": (s["inputs"], state, s["normed"], model),
        "gate": (s["gate"], state, s["normed"], model),
        "out": (s["hidden"], model, s["gated"], state),
    }


# ---- Sizes and memory ----


class _Sizes(NamedTuple):
    rows: Rows
    model: int
    state: int
    inner: int
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, weights: LayerWeights) -> "_Sizes":
        streams, steps, width = hidden.shape
        return cls(Rows(streams, steps), width, len(weights.rate), len(weights.up), hidden.dtype)


class _Options(NamedTuple):
    """All that a layer's calls depend on besides addresses."""

    sizes: _Sizes
    eps: Epsilons
    rounded: bool
    threads: int

    def chain(self, memory: int, descends: bool = False) -> Chain:
        given = {"threads": self.threads, "rounded": self.rounded, "descends": descends}
        return Chain(self.sizes.dtype, self.sizes.rows, memory, **given)


@cache
def _kept(sizes: _Sizes) -> Layout:
    """Arrays that the backward pass reads."""
    widths = {"hidden": sizes.model}
    widths |= dict.fromkeys(("recurrence_gate", "input_gate", "inputs", "gate", "states"), sizes.state)
    widths |= dict.fromkeys(("mlp_gate", "up"), sizes.inner)
    widths |= {"scales": 1, "mlp_scales": 1, "moments": 6, "mlp_moments": 6}
    return Layout(widths, sizes.rows.count, sizes.dtype.itemsize)


@cache
def _scratch(sizes: _Sizes) -> Layout:
    """Sources of gradients of weights: gradients of the arrays with these names, and inputs of maps, once more."""
    model, state, inner = sizes.model, sizes.state, sizes.inner
    of_mlp = dict.fromkeys(("mlp_gate", "up", "mlp_gated"), inner) | {"mlp_normed": model}
    of_block = dict.fromkeys(("recurrence_gate", "input_gate", "inputs", "gate", "gated"), state) | {"normed": model}
    layouts = [
        Layout({"hidden": model} | widths, sizes.rows.count, sizes.dtype.itemsize) for widths in (of_mlp, of_block)
    ]
    # What belongs to the MLP has been read when that of the block is written.
    layouts[0].offsets |= layouts[1].offsets
    layouts[0].elements = max(layout.elements for layout in layouts)
    return layouts[0]


_GIVEN = ("resets", "hidden", "state", *LayerWeights._fields)


def _given(
    sizes: _Sizes, hidden: Tensor, state: Tensor, reset_mask: Tensor | None, weights: LayerWeights
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """The inputs contiguous, and the addresses of [`_GIVEN`].

    Raises:
        UnreadableTensor: they do not fit together.
    """
    hidden, state, resets = hidden.contiguous(), state.contiguous(), 0
    if reset_mask is not None:
        check_shapes({"reset_mask": (reset_mask, hidden.shape[:2])})
        reset_mask = reset_mask.contiguous()
        resets = address("reset_mask", reset_mask, torch.bool, reset_mask.numel())
    found = contiguous_addresses(_GIVEN[1:], (hidden, state, *weights), _shapes(sizes), sizes.dtype)
    return hidden, state, reset_mask, [resets, *found]


@cache
def _shapes(sizes: _Sizes) -> list[torch.Size]:
    """The shapes of a layer's input, state and weights."""
    model, state, inner = sizes.model, sizes.state, sizes.inner
    inward, shapes = (state, model), {"rate": (state,), "norm": (model,), "mlp_norm": (model,), "out": (model, state)}
    shapes |= dict.fromkeys(("recurrence_gate", "input_gate", "input_projection", "gate"), inward)
    weights = LayerWeights(**shapes, mlp_gate=(inner, model), up=(inner, model), down=(model, inner))
    return [*map(torch.Size, ((*sizes.rows, model), (sizes.rows.streams, state), *weights))]
