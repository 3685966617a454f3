"""A layer of Memora on a CPU, forward and backward, each as one call: a chain of the passes of `training_cpu`.

A thread takes the rows of a stream, 64 at a time, through all passes of the layer, so that what lies between them
stays in the inner caches. Every row has the bits that it has in calls of the single passes, and so have sums over
rows.

Shape letters: B streams, T steps, M model width, S state width; `inner` is the width of the MLP.
"""

import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .addresses import address, check_shapes
from .linear_scan_cpu import _WIDE_STEPS
from .output_memory import is_simulated
from .thread_count import free_threads, num_threads
from .training_cpu import _CHUNK, _PANEL, _functions, _library, empty

_LINE = 64  # bytes to which parts of a workspace are aligned
_HEADER, _PRODUCT = 14, 17  # words of the structs chain and product in training_cpu.c
_MOST_THREADS = 63  # a bit for each
_PASSES = {
    name: number
    for number, name in enumerate(
        (
            *("product", "rms_norm", "rms_norm_backward", "gated_norm", "gated_norm_backward"),
            *("gated_recurrence", "gated_recurrence_backward"),
        )
    )
}
_CHAINS = {}
for _dtype, _suffix in {torch.float32: "float32", torch.float64: "float64"}.items():
    _CHAINS[_dtype] = getattr(_library, f"hf_chain_{_suffix}")
    _CHAINS[_dtype].argtypes, _CHAINS[_dtype].restype = _functions["products", _dtype].argtypes, None


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
    kept = empty(torch.Size((sizes.kept().total,)), dtype)
    into_state, into_inner = (sizes.model, sizes.state), (sizes.model, sizes.inner)
    maps = [*[into_state] * 4, into_state[::-1], *[into_inner] * 2, into_inner[::-1]]
    chain = _Chain(dtype, sizes, maps=maps, rounded=rounded)
    if not is_simulated():
        hidden, state = hidden.contiguous(), state.contiguous()
        reset_mask = None if reset_mask is None else reset_mask.contiguous()
        given, k = _given(sizes, hidden, state, reset_mask, weights), sizes.kept().pointers(kept)
        _add_layer(chain, sizes, given, eps, k, last.data_ptr(), output.data_ptr())
        chain.run()
    return output, last, kept


def _add_layer(
    chain: "_Chain", sizes: "_Sizes", given: "_Given", eps: Epsilons, k: dict[str, int], last: int, output: int
) -> None:
    """The passes of [`layer`] from and to addresses; `k` of the arrays that are kept."""
    w, model, state, inner = given.weights, sizes.model, sizes.state, sizes.inner
    normed, gated, mlp_gated = chain.local(model), chain.local(state), chain.local(inner)
    chain.reads(model, given.hidden)
    chain.rms_norm(eps.norm, given.hidden, w.norm, normed, k["scales"])
    for name, weight in _inward(w):
        chain.map(normed, weight, state, model, k[name])
    chain.recurrence(k, w.rate, given.state, given.resets, last)
    chain.gated_norm(eps.gated, state, k["gate"], k["states"], gated, k["moments"])
    chain.map(gated, w.out, model, state, k["hidden"], plus=given.hidden)
    chain.rms_norm(eps.mlp_norm, k["hidden"], w.mlp_norm, normed, k["mlp_scales"])
    chain.map(normed, w.mlp_gate, inner, model, k["mlp_gate"])
    chain.map(normed, w.up, inner, model, k["up"])
    chain.gated_norm(eps.mlp_gated, inner, k["mlp_gate"], k["up"], mlp_gated, k["mlp_moments"])
    chain.map(mlp_gated, w.down, model, inner, output, plus=k["hidden"])


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
    grad_hidden, grad_state = (
        empty(hidden.shape, dtype),
        torch.empty_like(state, memory_format=torch.contiguous_format),
    )
    scratch = empty(torch.Size((sizes.scratch().total,)), dtype)
    chunks = -(-sizes.rows // _CHUNK)
    sums = LayerWeights(
        *(hidden.new_empty(chunks, len(w)) if w.dim() == 1 else empty(w.shape, dtype) for w in weights)
    )
    options = {"rounded": rounded, "descends": True}
    maps_of_mlp = [(sizes.model, sizes.inner), *[(sizes.inner, sizes.model)] * 2]
    maps_of_block = [(sizes.model, sizes.state), *[(sizes.state, sizes.model)] * 4]
    mlp = _Chain(dtype, sizes, maps=maps_of_mlp, **options)
    if not is_simulated():
        hidden, state, grad = hidden.contiguous(), state.contiguous(), grad.contiguous()
        reset_mask = None if reset_mask is None else reset_mask.contiguous()
        grad_last = None if grad_last is None else grad_last.contiguous()
        given = _given(sizes, hidden, state, reset_mask, weights)
        address("kept", kept, dtype, sizes.kept().total)
        k, s = sizes.kept().pointers(kept), sizes.scratch().pointers(scratch)
        s |= {"output": address("grad", grad, dtype, hidden.numel())}
        s |= {"last": 0 if grad_last is None else address("grad_last", grad_last, dtype, state.numel())}
        s |= {"layer": grad_hidden.data_ptr(), "state": grad_state.data_ptr()}
        to = LayerWeights(*(each.data_ptr() for each in sums))
        _add_mlp_backward(mlp, sizes, given, eps, k, s, to)
        mlp.run()
        _weight_gradients(_mlp_maps(sizes, k, s), sizes.rows, dtype, to, wanted, rounded)
        block = _Chain(dtype, sizes, maps=maps_of_block, **options)
        _add_block_backward(block, sizes, given, eps, k, s, to)
        block.run()
        _weight_gradients(_block_maps(sizes, k, s), sizes.rows, dtype, to, wanted, rounded)
    found = (each.sum(0) if w.dim() == 1 else each for each, w in zip(sums, weights, strict=True))
    chosen = (each if want else None for each, want in zip(found, wanted, strict=True))
    return LayerGradients(grad_hidden, grad_state, LayerWeights(*chosen))


def _add_mlp_backward(
    chain: "_Chain", sizes: "_Sizes", given: "_Given", eps: Epsilons, k, s, to: LayerWeights
) -> None:
    """The passes back to the input of the second norm.

    Args:
        k: addresses of the arrays that were kept, by name.
        s: of the gradients of arrays, of the layer's output, last state, input ("layer") and state.
        to: of the gradients of weights; of vectors, the sums over the rows of each chunk.
    """
    w, model, inner = given.weights, sizes.model, sizes.inner
    normed, gated = chain.local(model), chain.local(inner)
    chain.reads(inner, k["mlp_gate"], k["up"])
    chain.reads(model, s["output"], k["hidden"])
    chain.map_backward(s["output"], w.down, model, inner, gated)
    chain.gated_norm_backward(
        eps.mlp_gated, inner, k["mlp_gate"], k["up"], k["mlp_moments"], gated, s["mlp_gate"], s["up"], s["mlp_gated"]
    )
    chain.map_backward(s["mlp_gate"], w.mlp_gate, inner, model, normed)
    chain.map_backward(s["up"], w.up, inner, model, normed, add=True)
    chain.rms_norm_backward(
        *(eps.mlp_norm, k["hidden"], w.mlp_norm, k["mlp_scales"], normed),
        *(s["hidden"], to.mlp_norm, s["output"], s["mlp_normed"]),
    )


def _add_block_backward(
    chain: "_Chain", sizes: "_Sizes", given: "_Given", eps: Epsilons, k, s, to: LayerWeights
) -> None:
    """The passes from there to the layer's input; arguments as in [`_add_mlp_backward`]."""
    w, model, state = given.weights, sizes.model, sizes.state
    normed, gated, states = chain.local(model), chain.local(state), chain.local(state)
    chain.reads(state, k["gate"], k["states"], k["recurrence_gate"], k["input_gate"], k["inputs"])
    chain.reads(model, s["hidden"], given.hidden)
    chain.map_backward(s["hidden"], w.out, model, state, gated)
    chain.gated_norm_backward(
        eps.gated, state, k["gate"], k["states"], k["moments"], gated, s["gate"], states, s["gated"]
    )
    chain.recurrence_backward(
        k, s, w.rate, given.state, given.resets, grad_states=states, log_decays=gated, grad_rate=to.rate
    )
    for number, (name, weight) in enumerate(_inward(w)):
        chain.map_backward(s[name], weight, state, model, normed, add=number > 0)
    chain.rms_norm_backward(
        eps.norm, given.hidden, w.norm, k["scales"], normed, s["layer"], to.norm, s["hidden"], s["normed"]
    )


_Maps = dict[str, tuple[int, int, int, int]]  # name of a matrix → gradient, outputs, input, inputs of its map


def _mlp_maps(sizes: "_Sizes", k: dict[str, int], s: dict[str, int]) -> _Maps:
    model, inner = sizes.model, sizes.inner
    return {
        "mlp_gate": (s["mlp_gate"], inner, s["mlp_normed"], model),
        "up": (s["up"], inner, s["mlp_normed"], model),
        "down": (s["output"], model, s["mlp_gated"], inner),
    }


def _block_maps(sizes: "_Sizes", k: dict[str, int], s: dict[str, int]) -> _Maps:
    model, state = sizes.model, sizes.state
    return {
        "recurrence_gate": (s["recurrence_gate"], state, s["normed"], model),
        "input_gate": (s["input_gate"], state, s["normed"], model),
        "input_projection": (s["inputs"], state, s["normed"], model),
        "gate": (s["gate"], state, s["normed"], model),
        "out": (s["hidden"], model, s["gated"], state),
    }


def _weight_gradients(
    maps: _Maps, rows: int, dtype: torch.dtype, to: LayerWeights, wanted: Sequence[bool], rounded: bool
) -> None:
    """Gradients of the wanted matrices, gradᵀ · input, to their addresses."""
    words, before = [], 0
    for name, result, is_wanted in zip(LayerWeights._fields, to, wanted, strict=True):
        if name in maps and is_wanted:
            grad, outputs, inputs, width = maps[name]
            shares, before = inputs == before, inputs
            words += (outputs, rows, width, grad, 1, outputs, inputs, width, 1, result, width)
            words += (0, 0, 0, 0, shares, 0)
    if words:
        _functions["products", dtype](_packed([free_threads(), len(words) // _PRODUCT, rounded, *words]))


# ---- Sizes and memory ----


class _Layout:
    """Offsets of arrays in one tensor; each begins at a line of the cache, if the tensor does."""

    def __init__(self, widths: dict[str, int], rows: int, item_size: int):
        self.offsets, at = {}, 0
        for name, width in widths.items():
            self.offsets[name] = at * item_size
            at += -(-rows * width * item_size // _LINE) * _LINE // item_size
        self.total = at

    def pointers(self, tensor: Tensor) -> dict[str, int]:
        begin = tensor.data_ptr()
        return {name: begin + offset for name, offset in self.offsets.items()}


class _Sizes(NamedTuple):
    streams: int
    steps: int
    model: int
    state: int
    inner: int
    item_size: int

    @classmethod
    def of(cls, hidden: Tensor, weights: LayerWeights) -> "_Sizes":
        streams, steps, width = hidden.shape
        return cls(streams, steps, width, len(weights.rate), len(weights.up), hidden.dtype.itemsize)

    @property
    def rows(self) -> int:
        return self.streams * self.steps

    def kept(self) -> _Layout:
        """Arrays that the backward pass reads."""
        return _kept(self)

    def scratch(self) -> _Layout:
        """What gradients of weights are computed from: gradients of the arrays with these names, and, computed again,
        inputs of their maps.
        """
        return _scratch(self)


@cache
def _kept(sizes: _Sizes) -> _Layout:
    widths = {"hidden": sizes.model}
    widths |= dict.fromkeys(("recurrence_gate", "input_gate", "inputs", "gate", "states"), sizes.state)
    widths |= dict.fromkeys(("mlp_gate", "up"), sizes.inner)
    widths |= {"scales": 1, "mlp_scales": 1, "moments": 6, "mlp_moments": 6}
    return _Layout(widths, sizes.rows, sizes.item_size)


@cache
def _scratch(sizes: _Sizes) -> _Layout:
    model, state, inner = sizes.model, sizes.state, sizes.inner
    of_mlp = dict.fromkeys(("mlp_gate", "up", "mlp_gated"), inner) | {"mlp_normed": model}
    of_block = dict.fromkeys(("recurrence_gate", "input_gate", "inputs", "gate", "gated"), state) | {"normed": model}
    layouts = [_Layout({"hidden": model} | widths, sizes.rows, sizes.item_size) for widths in (of_mlp, of_block)]
    # What belongs to the MLP has been read when that of the block is written.
    layouts[0].offsets |= layouts[1].offsets
    layouts[0].total = max(layout.total for layout in layouts)
    return layouts[0]


class _Given(NamedTuple):
    """Addresses of a layer's inputs."""

    hidden: int
    state: int
    resets: int
    weights: LayerWeights


def _given(sizes: _Sizes, hidden: Tensor, state: Tensor, reset_mask: Tensor | None, weights: LayerWeights) -> _Given:
    """Addresses of contiguous tensors; raises UnreadableTensor where they do not fit together."""
    shapes, dtype = _shapes(sizes), hidden.dtype
    if any(weight.shape != shape for weight, shape in zip(weights, shapes, strict=True)):
        check_shapes({name: pair for name, *pair in zip(weights._fields, weights, shapes, strict=True)})
    check_shapes({"state": (state, (sizes.streams, sizes.state)), "reset_mask": (reset_mask, hidden.shape[:2])})
    return _Given(
        address("hidden", hidden, dtype, hidden.numel()),
        address("state", state, dtype, state.numel()),
        0 if reset_mask is None else address("reset_mask", reset_mask, torch.bool, reset_mask.numel()),
        LayerWeights(*(address("weight", weight, dtype, weight.numel()) for weight in weights)),
    )


@cache
def _shapes(sizes: _Sizes) -> LayerWeights:
    """The shapes of a layer's weights."""
    model, state, inner = sizes.model, sizes.state, sizes.inner
    inward, shapes = (state, model), {"rate": (state,), "norm": (model,), "mlp_norm": (model,), "out": (model, state)}
    shapes |= dict.fromkeys(("recurrence_gate", "input_gate", "input_projection", "gate"), inward)
    return LayerWeights(**shapes, mlp_gate=(inner, model), up=(inner, model), down=(model, inner))


# ---- Chains of passes, as words of the structs in training_cpu.c ----


def _packed(words: Sequence[int]) -> bytes:
    return struct.pack(f"={len(words)}q", *words)


@cache
def _bits(number: float) -> int:
    """A double as an integer of the same bits."""
    return struct.unpack("=q", struct.pack("=d", number))[0]


_own = threading.local()


def _workspace(name: str, elements: int, dtype: torch.dtype) -> int:
    """The address of memory of this thread, until it asks for `name` again."""
    memory = getattr(_own, name, None)
    if is_simulated() or memory is None or memory.nbytes < elements * dtype.itemsize:
        memory = empty(torch.Size((elements,)), dtype)
    if is_simulated():
        return 0
    setattr(_own, name, memory)
    return memory.data_ptr()


class _Chain:
    """Passes that run one after another on each tile of rows; a thread makes and runs one at a time.

    Args:
        maps: inputs and outputs of its products.
        rounded: as in [`layer`].
        descends: the last rows come first.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        sizes: _Sizes,
        *,
        maps: Sequence[tuple[int, int]],
        rounded: bool,
        descends: bool = False,
    ):
        self._dtype, self._sizes, self._rounded, self._descends = dtype, sizes, rounded, descends
        self._stages: list[tuple[int, Sequence[int]]] = []  # number of the pass, and its struct
        elements = sum(inputs * -(-outputs // _PANEL) * _PANEL for inputs, outputs in maps)
        self._panel_at = _workspace("panels", elements, dtype)
        self._local_bytes = 0
        self._local_widths: dict[int, int] = {}
        self._given: list[int] = []

    def _product(self, depth, width, a, b, b_depth, b_column, to, add, plus) -> None:
        panels = self._panel_at
        self._panel_at += -(-width // _PANEL) * _PANEL * depth * self._dtype.itemsize
        of_a, of_b = (a, depth, 1), (b, b_depth, b_column)
        words = (self._sizes.rows, depth, width, *of_a, *of_b, to, width, add, panels, 1, 0, 0, plus)
        self._pass("product", words)

    def map(self, x: int, weight: int, outputs: int, inputs: int, to: int, plus: int = 0) -> None:
        """`to` = x · weightᵀ, plus a matrix, for a weight (outputs, inputs)."""
        self._product(inputs, outputs, x, weight, 1, inputs, to, 0, plus)

    def map_backward(self, grad: int, weight: int, outputs: int, inputs: int, to: int, add: bool = False) -> None:
        """`to` = grad · weight, or with `add` +=."""
        self._product(outputs, inputs, grad, weight, inputs, 1, to, add, 0)

    def _pass(self, name: str, words: Sequence[int]) -> None:
        self._stages.append((_PASSES[name], words))

    def rms_norm(self, eps: float, x: int, weight: int, to: int, scales: int) -> None:
        self._pass("rms_norm", (1, self._sizes.rows, self._sizes.model, _bits(eps), x, weight, to, scales, 0, 0, 0, 0))

    def rms_norm_backward(self, eps, x, weight, scales, grad, to, grad_weight, plus, normed) -> None:
        """`to` is the gradient of x, plus a matrix; `normed` is the output once more."""
        sizes = 1, self._sizes.rows, self._sizes.model
        self._pass("rms_norm_backward", (*sizes, _bits(eps), x, weight, to, scales, grad, grad_weight, plus, normed))

    def gated_norm(self, eps: float, width: int, gate: int, value: int, to: int, moments: int) -> None:
        sizes = 1, self._sizes.rows, width
        self._pass("gated_norm", (*sizes, _bits(eps), gate, value, to, moments, 0, 0, 0))

    def gated_norm_backward(self, eps, width, gate, value, moments, grad, grad_gate, grad_value, to) -> None:
        """`to` is the output once more."""
        sizes = 1, self._sizes.rows, width
        self._pass("gated_norm_backward", (*sizes, _bits(eps), gate, value, to, moments, grad, grad_gate, grad_value))

    def recurrence(self, kept: dict[str, int], rate: int, initial: int, resets: int, last: int) -> None:
        words = self._recurrence_words(kept, rate, initial, resets, last)
        self._pass("gated_recurrence", (*words, *[0] * 8))

    def recurrence_backward(self, kept, grads, rate, initial, resets, *, grad_states, log_decays, grad_rate) -> None:
        """`log_decays` is memory for as many numbers as there are states."""
        words = self._recurrence_words(kept, rate, initial, resets, 0)
        words += (grad_states, grads["last"], grads["state"])
        words += (*(grads[name] for name in ("recurrence_gate", "input_gate", "inputs")), log_decays, grad_rate)
        self._pass("gated_recurrence_backward", words)

    def _recurrence_words(self, kept, rate, initial, resets, last) -> tuple[int, ...]:
        sizes = self._sizes.rows, self._sizes.state, self._sizes.steps
        gates = kept["recurrence_gate"], rate, kept["input_gate"], kept["inputs"]
        return (*sizes, *gates, initial, resets, kept["states"], last)

    def reads(self, width: int, *begins: int) -> None:
        """Matrices of `width` columns that the passes find in memory: products ask for the rows of the next tile."""
        for begin in begins:
            self._given += (begin, width * self._dtype.itemsize)

    def local(self, width: int) -> int:
        """In place of an address: memory of each thread for the rows of a tile."""
        found = -1 - self._local_bytes
        self._local_widths[found] = width
        self._local_bytes += -(-_CHUNK * width * self._dtype.itemsize // _LINE) * _LINE
        return found

    def run(self) -> None:
        """Compute; the tensors of all addresses must be alive."""
        product = _PASSES["product"]
        products = [words for number, words in self._stages if number == product]
        others = [words for number, words in self._stages if number != product]
        at = _HEADER + 2 * len(self._stages) + 3
        starts = {product: at, None: at + _PRODUCT * len(products)}
        stages = []
        for number, words in self._stages:
            kind = product if number == product else None
            stages += (number, 8 * starts[kind])
            starts[kind] += len(words)
        body = [*stages, 1, len(products), self._rounded]
        for each in (*products, *others):
            body += each
        locals_at, item_size, pointers = _HEADER + len(body), self._dtype.itemsize, []
        for place, word in enumerate(body, _HEADER):
            if word < 0:
                pointers += (place, self._local_widths[word] * item_size, -1 - word)
        threads, given_at = min(free_threads(), _MOST_THREADS), locals_at + len(pointers)
        words = given_at + len(self._given)
        thread_bytes = -(-(8 * words + self._local_bytes) // _LINE) * _LINE
        memory = _workspace("rows", threads * thread_bytes // item_size, self._dtype)
        header = [
            threads, self._sizes.rows, max(self._sizes.steps, _CHUNK), self._descends, self._rounded,
            8 * (at - 3), 8 * locals_at, len(pointers) // 3, words, 8 * given_at, len(self._given) // 2,
            memory, thread_bytes, len(self._stages),
        ]  # fmt: skip
        _CHAINS[self._dtype](_packed([*header, *body, *pointers, *self._given]))
