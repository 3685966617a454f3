"""A whole layer on a CPU, forward and backward, as chains of passes of `training_cpu`: what the families share.

A family's layer is a [`LayerKind`]: `memora_layer_cpu`, `hawk_layer_cpu`.

Shape letters: B streams, T steps, M model width, S state width, K convolution taps; `inner` is the width of the MLP.
"""

from collections.abc import Callable, Sequence
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
from .training_cpu import _CHUNK, empty, instruction_level

_CALLS = 64  # sizes and options whose calls are remembered
_MOST_WEIGHTS = 3 << 20  # bytes, below AVX-512: all are read again for every 64 rows, which is slower with AVX2
_SUMS = {"rate", "norm", "mlp_norm", "convolution"}  # weights whose gradients are sums over rows

Addresses = dict[str, int]  # name → symbol
Maps = dict[str, tuple[int, int, int, int]]  # name of a matrix → gradient, outputs, input, inputs of its map


class Sizes(NamedTuple):
    """Sizes of a layer's call; `lags` is K, or 0 without a convolution."""

    rows: Rows
    model: int
    state: int
    inner: int
    lags: int
    dtype: torch.dtype


class Options(NamedTuple):
    """All that a layer's calls depend on besides addresses; `eps`: of its norms, as its kind has them."""

    sizes: Sizes
    eps: NamedTuple
    rounded: bool
    threads: int

    def chain(self, memory: int, descends: bool = False) -> Chain:
        given = {"threads": self.threads, "rounded": self.rounded, "descends": descends}
        return Chain(self.sizes.dtype, self.sizes.rows, memory, **given)


class LayerKind(NamedTuple):
    """The passes of a family's layer.

    Args:
        weights: type of its weights: vectors, and matrices (outputs, inputs). `rate` is of the decay, as in
            `training_cpu.gate_coefficients`.
        states: names of the states that go in.
        shapes: sizes → shapes of the weights, of the states, and of what comes out for each state.
        of_state: names of the arrays of width S, besides `states`, that are kept for the backward pass and have a
            gradient there.
        moments: other arrays that are kept.
        carried: names of kept arrays whose rows the pass over later rows reads, too.
        forward: writes the passes of the layer, from symbols of all tensors and of what is kept.
        backward: writes the passes back to the input of the second norm, then from there to the layer's input; each
            gets symbols of all tensors, of what is kept and of the scratch, and returns the maps of its matrices.
    """

    weights: type[NamedTuple]
    states: tuple[str, ...]
    shapes: Callable[[Sizes], tuple[NamedTuple, list, list]]
    of_state: tuple[str, ...]
    moments: tuple[tuple[str, int], ...]
    carried: tuple[str, ...]
    forward: Callable[[Chain, Options, Addresses, Addresses], None]
    backward: Sequence[Callable[[Chain, Options, Addresses, Addresses, Addresses], Maps]]

    def sizes(self, hidden: Tensor, weights: NamedTuple) -> Sizes:
        streams, steps, width = hidden.shape
        lags = len(weights.convolution) if "convolution" in weights._fields else 0
        return Sizes(Rows(streams, steps), width, len(weights.rate), len(weights.up), lags, hidden.dtype)

    @property
    def given(self) -> tuple[str, ...]:
        return "resets", "hidden", *self.states, *self.weights._fields


def supports(streams: int, steps: int, weight_bytes: int) -> bool:
    """True for blocks (B, T) whose results have the bits of single passes, and which are probably faster in one call.

    Each thread has several parts, and without AVX-512 the weights are few. 64 rows are then whole streams, or part of
    one, and the scan's sums are not wider than its elements.
    """
    fits = 0 < steps < _WIDE_STEPS and (steps % _CHUNK == 0 or _CHUNK % steps == 0)
    parts = streams * steps / max(steps, _CHUNK)
    is_fast = weight_bytes <= _MOST_WEIGHTS or instruction_level() > 1
    return fits and is_fast and parts >= (1 if num_threads() == 1 else 2 * num_threads())


class LayerResults(NamedTuple):
    """Results of [`layer`].

    Args:
        output: (B, T, M).
        last: for each state that went in, what comes out.
        kept: for [`layer_backward`], besides the inputs; None if nothing is.
    """

    output: Tensor
    last: tuple[Tensor, ...]
    kept: Tensor | None


def layer(
    kind: LayerKind,
    hidden: Tensor,
    states: Sequence[Tensor],
    reset_mask: Tensor | None,
    weights: NamedTuple,
    eps: NamedTuple,
    *,
    rounded: bool,
    keeps: bool,
) -> LayerResults:
    """Compute a layer.

    Args:
        hidden: (B, T, M), B and T as in [`supports`].
        states: before the first step.
        reset_mask: (B, T) bool.
        rounded: products as in `training_cpu.multiply`.
        keeps: whether a backward pass follows; without one, most activations do not leave the caches.
    """
    sizes, dtype = kind.sizes(hidden, weights), hidden.dtype
    output, kept = empty(hidden.shape, dtype), empty(torch.Size((_kept(kind, sizes, keeps).elements,)), dtype)
    last = tuple(hidden.new_empty(shape) for shape in _shapes(kind, sizes)[1])
    call = _forward(kind, Options(sizes, eps, rounded, min(free_threads(), MOST_THREADS)), keeps)
    memory = workspace(call.size, dtype)
    if not is_simulated():
        owners, given = _given(kind, sizes, hidden, states, reset_mask, weights)
        results = [each.data_ptr() for each in (kept, *last, output)]
        call.run(np.array([*given, memory, *results]))
        del owners
    return LayerResults(output, last, kept if keeps else None)


@lru_cache(_CALLS)
def _forward(kind: LayerKind, options: Options, keeps: bool) -> Template:
    at = symbols((*kind.given, "memory", "kept", *_prefixed("last_", kind.states), "output"))
    chain = options.chain(at["memory"])
    k = _kept(kind, options.sizes, keeps).pointers(at["kept"])
    k |= {name: chain.local(width) for name, width in _kept_widths(kind, options.sizes).items() if name not in k}
    kind.forward(chain, options, at, k)
    return chain.template()


class LayerGradients(NamedTuple):
    """Gradients of the inputs of [`layer`]; None for weights without a wanted gradient."""

    hidden: Tensor
    states: tuple[Tensor, ...]
    weights: NamedTuple


def layer_backward(
    kind: LayerKind,
    hidden: Tensor,
    states: Sequence[Tensor],
    reset_mask: Tensor | None,
    weights: NamedTuple,
    eps: NamedTuple,
    kept: Tensor,
    grad: Tensor,
    grad_last: Sequence[Tensor | None],
    wanted: Sequence[bool],
    *,
    rounded: bool,
) -> LayerGradients:
    """Gradients of inputs, states and the `wanted` weights.

    `grad` (B, T, M) and `grad_last` are the gradients of the output and of what came out for each state.
    """
    sizes, dtype = kind.sizes(hidden, weights), hidden.dtype
    grad_hidden, grad_states = empty(hidden.shape, dtype), tuple(hidden.new_empty(each.shape) for each in states)
    scratch, chunks = empty(torch.Size((_scratch(kind, sizes).elements,)), dtype), -(-sizes.rows.count // _CHUNK)
    sums = [
        hidden.new_empty(chunks, *weight.shape) if name in _SUMS else empty(weight.shape, dtype)
        for name, weight in zip(weights._fields, weights, strict=True)
    ]
    calls = _backward(kind, Options(sizes, eps, rounded, min(free_threads(), MOST_THREADS)), tuple(wanted))
    memory = workspace(max(call.size for call in calls), dtype)
    if not is_simulated():
        owners, given = _given(kind, sizes, hidden, states, reset_mask, weights)
        grad, grad_last = grad.contiguous(), [None if each is None else each.contiguous() for each in grad_last]
        grads = [
            address("kept", kept, dtype, _kept(kind, sizes, True).elements),
            address("grad", grad, dtype, hidden.numel()),
        ]
        for each, shape in zip(grad_last, _shapes(kind, sizes)[1], strict=True):
            grads.append(0 if each is None else address("grad_last", each, dtype, shape.numel()))
        results = [each.data_ptr() for each in (grad_hidden, *grad_states, scratch, *sums)]
        addresses = np.array([*given, memory, *grads, *results])
        for call in calls:
            call.run(addresses)
        del owners
    found = (each.sum(0) if name in _SUMS else each for name, each in zip(weights._fields, sums, strict=True))
    chosen = (each if want else None for each, want in zip(found, wanted, strict=True))
    return LayerGradients(grad_hidden, grad_states, kind.weights(*chosen))


@lru_cache(_CALLS)
def _backward(kind: LayerKind, options: Options, wanted: Sequence[bool]) -> list[Template]:
    """Passes and products for the weights; other gradients of weights are sums over the rows of each chunk."""
    names = kind.weights._fields
    given = *kind.given, "memory", "kept", "grad_output", *_prefixed("grad_last_", kind.states)
    at = symbols((*given, "grad_input", *_prefixed("grad_", kind.states), "scratch", *_prefixed("grad_", names)))
    k = _kept(kind, options.sizes, True).pointers(at["kept"])
    s = _scratch(kind, options.sizes).pointers(at["scratch"])
    calls = []
    for passes in kind.backward:
        chain = options.chain(at["memory"], descends=True)
        maps = passes(chain, options, at, k, s)
        chosen = [
            (*maps[name], at[f"grad_{name}"])
            for name, is_wanted in zip(names, wanted, strict=True)
            if name in maps and is_wanted
        ]
        rows, how = options.sizes.rows.count, {"threads": options.threads, "rounded": options.rounded}
        calls += [chain.template(), *weight_gradients(options.sizes.dtype, chosen, rows, **how)]
    return calls


def _prefixed(prefix: str, names: Sequence[str]) -> list[str]:
    return [prefix + name for name in names]


# ---- The MLP: W_down · gate( W_g norm(x), W_u norm(x) ) + x ----


def mlp(chain: Chain, options: Options, at: Addresses, k: Addresses, normed: int, gate: Callable[..., None]) -> None:
    """The passes from the input of the second norm to the layer's output.

    Args:
        normed: memory for rows of width M.
        gate: writes the pass between the maps: (gate, value, to).
    """
    model, inner = options.sizes.model, options.sizes.inner
    gated = chain.local(inner)
    chain.rms_norm(options.eps.mlp_norm, model, k["hidden"], at["mlp_norm"], normed, k["mlp_scales"])
    chain.map(normed, at["mlp_gate"], inner, model, k["mlp_gate"])
    chain.map(normed, at["up"], inner, model, k["up"])
    gate(k["mlp_gate"], k["up"], gated)
    chain.map(gated, at["down"], model, inner, at["output"], plus=k["hidden"])


def mlp_backward(
    chain: Chain, options: Options, at: Addresses, k: Addresses, s: Addresses, gate_backward: Callable[..., None]
) -> Maps:
    """The passes back; `gate_backward`: (gate, value, grad, gradients of gate and value, output once more)."""
    model, inner = options.sizes.model, options.sizes.inner
    normed, gated = chain.local(model), chain.local(inner)
    chain.reads(inner, k["mlp_gate"], k["up"])
    chain.reads(model, at["grad_output"], k["hidden"])
    chain.map_backward(at["grad_output"], at["down"], model, inner, gated)
    gate_backward(k["mlp_gate"], k["up"], gated, s["mlp_gate"], s["up"], s["mlp_gated"])
    chain.map_backward(s["mlp_gate"], at["mlp_gate"], inner, model, normed)
    chain.map_backward(s["up"], at["up"], inner, model, normed, add=True)
    chain.rms_norm_backward(
        *(options.eps.mlp_norm, model, k["hidden"], at["mlp_norm"], k["mlp_scales"], normed),
        *(s["hidden"], at["grad_mlp_norm"], at["grad_output"], s["mlp_normed"]),
    )
    return {
        "mlp_gate": (s["mlp_gate"], inner, s["mlp_normed"], model),
        "up": (s["up"], inner, s["mlp_normed"], model),
        "down": (at["grad_output"], model, s["mlp_gated"], inner),
    }


# ---- Memory and addresses ----


def _kept_widths(kind: LayerKind, sizes: Sizes) -> dict[str, int]:
    """Arrays that the backward pass reads."""
    widths = {"hidden": sizes.model} | dict.fromkeys((*kind.of_state, "states"), sizes.state)
    widths |= dict.fromkeys(("mlp_gate", "up"), sizes.inner)
    return widths | {"scales": 1, "mlp_scales": 1, **dict(kind.moments)}


@cache
def _kept(kind: LayerKind, sizes: Sizes, keeps: bool) -> Layout:
    """These arrays; without a backward pass, those that later rows read."""
    widths = {name: width for name, width in _kept_widths(kind, sizes).items() if keeps or name in kind.carried}
    return Layout(widths, sizes.rows.count, sizes.dtype.itemsize)


@cache
def _scratch(kind: LayerKind, sizes: Sizes) -> Layout:
    """Sources of gradients of weights: gradients of the arrays with these names, and inputs of maps, once more."""
    of_mlp = dict.fromkeys(("mlp_gate", "up", "mlp_gated"), sizes.inner) | {"mlp_normed": sizes.model}
    of_block = dict.fromkeys((*kind.of_state, "gated"), sizes.state) | {"normed": sizes.model}
    mlp_layout, block = (
        Layout({"hidden": sizes.model} | widths, sizes.rows.count, sizes.dtype.itemsize)
        for widths in (of_mlp, of_block)
    )
    # The MLP's arrays have been read when the block's are written.
    block.offsets |= mlp_layout.offsets
    block.elements = max(block.elements, mlp_layout.elements)
    return block


def _given(
    kind: LayerKind,
    sizes: Sizes,
    hidden: Tensor,
    states: Sequence[Tensor],
    reset_mask: Tensor | None,
    weights: NamedTuple,
) -> tuple[list[Tensor | None], list[int]]:
    """Contiguous inputs, which the caller keeps alive, and the addresses of [`LayerKind.given`].

    Raises:
        UnreadableTensor: they do not fit together.
    """
    resets, inputs = 0, [hidden.contiguous(), *(each.contiguous() for each in states)]
    if reset_mask is not None:
        check_shapes({"reset_mask": (reset_mask, hidden.shape[:2])})
        reset_mask = reset_mask.contiguous()
        resets = address("reset_mask", reset_mask, torch.bool, reset_mask.numel())
    found = contiguous_addresses(kind.given[1:], (*inputs, *weights), _shapes(kind, sizes)[0], sizes.dtype)
    return [*inputs, reset_mask], [resets, *found]


def shared_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that all families have, by name."""
    model, state, inner = sizes.model, sizes.state, sizes.inner
    shapes = {"rate": (state,), "norm": (model,), "mlp_norm": (model,), "out": (model, state)}
    return shapes | {"mlp_gate": (inner, model), "up": (inner, model), "down": (model, inner)}


@cache
def _shapes(kind: LayerKind, sizes: Sizes) -> tuple[list[torch.Size], list[torch.Size]]:
    """The shapes of a layer's input, states and weights; and of what comes out for each state."""
    weights, states, last = kind.shapes(sizes)
    return [*map(torch.Size, ((*sizes.rows, sizes.model), *states, *weights))], last
