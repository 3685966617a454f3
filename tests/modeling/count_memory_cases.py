"""Memories, blocks and states for tests of the count memory's kernel and of its reference."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import large_history  # noqa: F401 (the reference then reads large memories too)
import numpy as np

from hf_recurrent.modeling.contexts.count_memory_layout import (
    REAL_STEP,
    RESET_STEP,
    SAMPLED_STEP,
    Block,
    MemoryShape,
    Rates,
)

SLOTS, TEXT = 1 << 7, 1 << 11  # so few that slots are replaced and the text wraps around
KINDS = ("code", "random", "runs")
STEPS = 24


def bytes_of(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Bytes (count,) uint8: lines of code with repeats, random ones, runs of a few, or brackets."""
    random = np.random.default_rng(seed)
    if kind == "random":
        return random.integers(0, 256, count, np.uint8)
    if kind == "brackets":
        return random.choice(np.frombuffer(b"[{(<]})>[[(((a9 Z\n\xc3", np.uint8), count)
    if kind == "runs":
        return np.repeat(random.choice(np.array([0, 10, 32, 97, 200], np.uint8), count), random.integers(1, 9, count))[
            :count
        ]
    names = ("stream", "block", "row_of_weights", "x", "größe", "STEP2")
    lines = []
    while sum(map(len, lines)) < count:
        a, b = random.choice(names, 2)
        line = random.choice((f"def {a}({b}):", f"    {a} = {b}.read({b}, {a})", f"\t\treturn {a}[{b}] + 1", ""))
        lines += [f"{line}\n".encode()] * random.integers(1, 3)
    return np.frombuffer(b"".join(lines), np.uint8)[:count].copy()


def new_arrays(memory: type, shape: MemoryShape, documents: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a memory that has counted some documents.

    Args:
        memory: class of the memory, `Memory` of the kernel or the reference.
    """
    arrays = {name: np.zeros(size, dtype) for name, (size, dtype) in shape.buffers().items()}
    memory(arrays, shape).begin()
    for number in range(documents):
        memory(arrays, shape).insert(bytes_of("code", 400, seed + number), 0)
    return arrays


def new_states(shape: MemoryShape, streams: int) -> np.ndarray:
    return np.zeros((streams, shape.stream.itemsize), np.uint8)


def hostile_states(shape: MemoryShape, streams: int, seed: int = 0) -> np.ndarray:
    """Random bytes, some of them with numbers that are infinite or NaN, or with small integers."""
    random = np.random.default_rng(seed)
    states = random.integers(0, 256, (streams, shape.stream.itemsize), np.uint8)
    for row in range(0, streams, 2):
        fields = states[row].view(shape.stream)[0]
        fields["position"] = random.integers(0, 1 << 17)
        fields["long_match"], fields["long_length"] = random.integers(0, 2000, 2)
        for name in ("network", "final_rows", "rows"):
            fields[name] = random.normal(size=fields[name].shape) * 5
            flat = fields[name].reshape(-1)
            flat[1::7], flat[3::11], flat[5::13] = np.nan, np.inf, -1e38
        fields["network"][0] = 1
    return states


def new_block(
    streams: int,
    steps: int = STEPS,
    *,
    kind: str = "code",
    network: int = 0,
    targets: bool = False,
    first: int | None = None,
    pending: int = 0,
    resets: float = 0.05,
    padding: float = 0.15,
    sampled: float = 0.15,
    odd: bool = True,
    seed: int = 0,
) -> Block:
    """A block of bytes that follow each other.

    Args:
        network: width of the network's logits; 0 for none.
        first: the first step of which all log probabilities are wanted; None for no step.
        pending: bytes of documents that are kept until they end; 0 for none.
        resets, padding, sampled: share of steps where a document begins, of padding, and of samples of the model.
        odd: some of the targets are no next bytes, and some logits are infinite or NaN.
    """
    random = np.random.default_rng(seed)
    tokens = np.stack([bytes_of(kind, steps, 100 + seed + row) for row in range(streams)])
    flags = np.where(random.random(tokens.shape) < padding, 0, REAL_STEP).astype(np.uint8)
    flags += RESET_STEP * (random.random(tokens.shape) < resets).astype(np.uint8)
    flags += SAMPLED_STEP * (random.random(tokens.shape) < sampled).astype(np.uint8)
    logits = (random.normal(size=(streams, steps, network)) * 3).astype(np.float32) if network else None
    following = np.full(tokens.shape, -1, np.int32)
    for row in range(streams):
        real = np.flatnonzero(flags[row] & REAL_STEP)
        following[row, real[:-1]] = tokens[row, real[1:]]
    if odd:
        replaced = random.random(tokens.shape)
        for place, value in enumerate((-1, -100, 300, 7)):
            following[(replaced > place * 0.03) & (replaced < (place + 1) * 0.03)] = value
        for row, value in enumerate((np.nan, np.inf, -np.inf, 1e30)):
            if network:
                logits[:, row::9, row::3] = value
    return Block(
        tokens,
        flags,
        targets=following if targets else None,
        network=logits,
        nats=np.zeros(tokens.shape, np.float32),
        probabilities=np.zeros((*tokens.shape, 8), np.uint16),
        logits=None if first is None else np.zeros((streams, steps - first, 256), np.float32),
        first=first or 0,
        pending=np.zeros((streams, pending), np.uint8) if pending else None,
        pending_used=np.zeros(streams, np.int64) if pending else None,
    )


@dataclass
class Outcome:
    """Everything that reading changes, by name."""

    arrays: dict[str, np.ndarray]
    states: np.ndarray
    block: Block

    def named(self, shape: MemoryShape) -> dict[str, np.ndarray]:
        fields = self.states.reshape(-1).view(shape.stream)
        named = {f"arrays.{name}": array for name, array in self.arrays.items()}
        named |= {f"state.{name}": fields[name] for name in shape.stream.names}
        results = ("nats", "probabilities", "logits", "pending", "pending_used")
        return named | {
            f"block.{name}": getattr(self.block, name) for name in results if getattr(self.block, name) is not None
        }


def copied(block: Block) -> Block:
    return Block(*(value.copy() if isinstance(value, np.ndarray) else value for value in block))


def outcome_of(
    memory: type,
    arrays: Mapping[str, np.ndarray],
    shape: MemoryShape,
    states: np.ndarray,
    rates: Rates,
    block: Block,
) -> Outcome:
    """Read copies."""
    outcome = Outcome({name: array.copy() for name, array in arrays.items()}, states.copy(), copied(block))
    memory(outcome.arrays, shape).read(outcome.states, rates, outcome.block)
    return outcome


def differences(a: Outcome, b: Outcome, shape: MemoryShape) -> list[str]:
    """Names of all that differs in a bit. A NaN equals every NaN."""
    a_named, b_named = a.named(shape), b.named(shape)
    return [name for name in a_named if not _equal(a_named[name], b_named[name])]


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.kind == "f":
        a, b = (np.where(np.isnan(array), np.float32(np.nan), array) for array in (a, b))
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def kind_of(shape: MemoryShape) -> str:
    """The kernel that reads memories of a shape."""
    return "large_" if shape.large else "small_" if shape.small else ""


def use_library(monkeypatch, kernel: ModuleType, path: str, kind: str) -> None:
    """Another build of the kernel, with the types of the functions as in the module."""
    library = ctypes.CDLL(path)
    library.hf_count_memory_version()  # makes the tables
    for name in ("begin", "read", "insert", "begin_coder", "finish_coder", "code"):
        function = getattr(library, f"hf_count_memory_{name}")
        function.argtypes, function.restype = getattr(kernel._library, function.__name__).argtypes, None
    if kind:
        monkeypatch.setattr(kernel, f"{kind}library", lambda: library)
    else:
        monkeypatch.setattr(kernel, "_library", library)
