"""The count memory in numpy: the same bits as the kernel, from every compiler; and what holds for both."""

import functools
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from count_memory_cases import (
    KINDS,
    SLOTS,
    STEPS,
    TEXT,
    Outcome,
    bytes_of,
    copied,
    differences,
    hostile_states,
    kind_of,
    new_arrays,
    new_block,
    new_states,
    outcome_of,
    use_library,
)

from hf_recurrent.modeling.contexts import count_memory_mixing as mixing
from hf_recurrent.modeling.contexts.count_memory_layout import (
    DOCUMENTS,
    LEARNED,
    REAL_STEP,
    RESET_STEP,
    TEXT_USED,
    Block,
    MemoryShape,
    Rates,
)
from hf_recurrent.modeling.contexts.count_memory_reference import CountMemoryReference

try:
    from hf_recurrent.kernels import count_memory_cpu as kernel
    from hf_recurrent.kernels.count_memory_cpu import Memory
except ImportError:
    kernel = Memory = None

needs_kernel = pytest.mark.skipif(kernel is None, reason="the kernel was not built")
SHAPE = MemoryShape(SLOTS, TEXT, 512, 64)
LARGE, SMALL = SHAPE._replace(rows=16, large=True), SHAPE._replace(small=True)
LEARNING = Rates(first_weights=0.02, refinement=30, learns=True)
WINDOWS = [(0, 0), (0, 64), (512, 0), (512, 64), (4096, 64), (1 << 17, 16)]


@functools.cache
def trained(shape=SHAPE):
    """The arrays of a memory that has learned from a few documents."""
    used = Memory or CountMemoryReference
    arrays = new_arrays(used, shape)
    for seed in range(1 if kernel is None else 20):
        block = new_block(1, 300 if kernel else 40, targets=True, pending=256, odd=False, seed=seed)
        used(arrays, shape).read(new_states(shape, 1), LEARNING, block)
    return arrays


def check(arrays, shape, states, rates, block, rounds=1):
    """Kernel and reference change everything alike, each round from the state that the last one left."""
    for _ in range(rounds):
        found = outcome_of(CountMemoryReference, arrays, shape, states, rates, block)
        expected = outcome_of(Memory, arrays, shape, states, rates, block)
        assert differences(found, expected, shape) == []
        arrays, states = expected.arrays, expected.states
        block = block._replace(pending=expected.block.pending, pending_used=expected.block.pending_used)
    return expected


@needs_kernel
def test_layout_and_first_values():
    for shape in (
        SHAPE,
        SHAPE._replace(large=True),
        SMALL,
        MemoryShape(16, 64, 1 << 17, 1),
        MemoryShape(1 << 9, 1 << 12, 0, 0),
    ):
        found = {name: np.zeros(size, dtype) for name, (size, dtype) in shape.buffers().items()}
        expected = {name: array.copy() for name, array in found.items()}
        CountMemoryReference(found, shape).begin()
        Memory(expected, shape).begin()
        assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []
        sizes = np.zeros(10, np.int64)
        memory = Memory(found, shape)
        memory._library.hf_count_memory_sizes(memory._pointer, kernel.ctypes.c_void_p(sizes.ctypes.data))
        assert sizes[0] == shape.contexts and sizes[4] == len(shape.set_sizes)
        assert sizes[9] == shape.stream.itemsize and sizes[2:4].tolist() == [*found["weights"].shape]


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_counted_alike(kind):
    """Slots and text are full many times over, also where the positions of the text begin anew."""
    shape = MemoryShape(16, 256, 0, 0)
    found, expected = (new_arrays(Memory, shape, 0) for _ in range(2))
    for used in (0, (1 << 32) - 100):
        for arrays, memory in ((found, CountMemoryReference), (expected, Memory)):
            arrays["counters"][TEXT_USED] += used
            memory(arrays, shape).insert(bytes_of(kind, 400), 65)
            memory(arrays, shape).insert(bytes_of(kind, 3, 1))
        assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []


@needs_kernel
@pytest.mark.parametrize("network", [0, 8, 256])
@pytest.mark.parametrize("first", [None, 0, STEPS // 2])
@pytest.mark.parametrize("targets", [False, True])
def test_frozen_reading(network, first, targets):
    block = new_block(2, network=network, targets=targets, first=first)
    check(trained(), SHAPE, new_states(SHAPE, 2), Rates(), block)


@needs_kernel
@pytest.mark.parametrize(("window", "rows"), WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_rows(window, rows, kind):
    """Also where positions of 16 bits begin anew."""
    shape = SHAPE._replace(window=window, rows=rows)
    states = new_states(shape, 2)
    states.view(shape.stream)["position"][1] = (1 << 16) - 30
    check(trained(), shape, states, Rates(), new_block(2, kind=kind, targets=True, resets=0, seed=3))


@needs_kernel
def test_wide_links_far_from_the_start():
    shape = SHAPE._replace(window=1 << 17)
    states = new_states(shape, 1)
    Memory(trained(), shape).read(states, Rates(), new_block(1, 70_000, resets=0, padding=0))
    check(trained(), shape, states, Rates(), new_block(1, targets=True, resets=0, seed=3))


@pytest.mark.sampled(4)
@needs_kernel
@pytest.mark.parametrize("kind", [*KINDS, "brackets"])
@pytest.mark.parametrize("rates", [Rates(), LEARNING, Rates(inserts=True, learns=True)])
@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
def test_large_and_small_memories(shape, kind, rates):
    """Other contexts, cells and sets, also from random states and arrays, and with the most open brackets."""
    pending = 16 * (rates == LEARNING)
    block = new_block(2, 40, kind=kind, network=256, targets=True, pending=pending, first=38)
    check(trained(shape), shape, new_states(shape, 2), rates, block, rounds=2)
    states = hostile_states(shape, 2)
    if shape.large:
        states.view(shape.stream)["depth"][0] = (1 << 32) - 1
    check(trained(shape), shape, states, rates, block)
    random = np.random.default_rng(0)
    arrays = {
        name: np.frombuffer(random.bytes(array.nbytes), array.dtype).reshape(array.shape)
        for name, array in trained(shape).items()
    }
    check(arrays, shape, states, rates, block)


@needs_kernel
@pytest.mark.parametrize("network", [0, 8, 256])
@pytest.mark.parametrize("pending", [0, 7, 64])
def test_learning(network, pending):
    """Documents end inside the block, and some are longer than the bytes that are kept."""
    block = new_block(2, network=network, targets=True, pending=pending, resets=0.15, first=STEPS - 2)
    learned = check(trained(), SHAPE, new_states(SHAPE, 2), LEARNING, block, rounds=2)
    counters = learned.arrays["counters"] - trained()["counters"]
    assert counters[LEARNED] > STEPS and (counters[DOCUMENTS] > 8) == (counters[TEXT_USED] > 50) == bool(pending)


@needs_kernel
@pytest.mark.parametrize("learns", [False, True])
def test_live_inserts(learns):
    rates = Rates(inserts=True, learns=learns, least_cell=1000)
    check(trained(), SHAPE, new_states(SHAPE, 2), rates, new_block(2, targets=True, network=256))


@needs_kernel
@pytest.mark.parametrize("rates", [Rates(), LEARNING], ids=["frozen", "learning"])
@pytest.mark.parametrize("window", [0, 512, 1 << 17])
def test_hostile_states(rates, window):
    """Random bytes, NaN and infinite numbers."""
    shape = SHAPE._replace(window=window, rows=16)
    for network, seed in itertools.product((0, 256), range(2)):
        states = hostile_states(shape, 2, seed)
        block = new_block(2, 12, network=network, targets=True, first=6, pending=8 * rates.learns, seed=seed)
        expected = check(trained(), shape, states, rates, block)
        assert np.isfinite(expected.block.nats).all() and np.isfinite(expected.block.logits).all()
        sums = np.exp(expected.block.logits.astype(np.float64)).sum(-1)[:, -2:]
        assert ((np.abs(sums - 1) < 1e-6) | (sums == 256)).all()  # 256 zeros where there was padding


@needs_kernel
def test_random_arrays():
    """Arrays of a damaged checkpoint: some results, and no other memory is read or written."""
    random = np.random.default_rng(0)
    arrays = {
        name: np.frombuffer(random.bytes(array.nbytes), array.dtype).reshape(array.shape)
        for name, array in trained().items()
    }
    for rates in (Rates(), LEARNING, Rates(inserts=True)):
        check(arrays, SHAPE, new_states(SHAPE, 2), rates, new_block(2, 12, targets=True, first=6))


# ---- builds --------------------------------------------------------------------------------------------------------

BUILDS = [
    "gcc -O0",
    *(
        pytest.param(command, marks=pytest.mark.long)
        for command in (
            "gcc -O1", "gcc -O2 -DBASE_ONLY", "gcc -O3 -march=native", "clang -O1", "clang -O3 -march=native",
        )
    ),
]  # fmt: skip


@functools.cache
def recorded(shape):
    """Blocks and their outcomes in the kernel that is installed."""
    cases = []
    for (rates, pending), network in itertools.product(
        ((Rates(), 0), (LEARNING, 64), (Rates(inserts=True), 0)), (0, 8, 256)
    ):
        block = new_block(2, 300, network=network, targets=True, first=250, pending=pending)
        cases.append((rates, block, outcome_of(Memory, trained(shape), shape, new_states(shape, 2), rates, block)))
    return cases


all_kinds = pytest.mark.parametrize("shape", [SHAPE, LARGE, SMALL], ids=["usual", "large", "small"])


@pytest.mark.long
@needs_kernel
@all_kinds
@pytest.mark.parametrize("build", BUILDS)
def test_every_compiler_gives_the_same_bits(build, shape, tmp_path, monkeypatch):
    """With `BASE_ONLY`, without the versions for instruction sets."""
    program, *options = build.split()
    if (compiler := shutil.which(program)) is None:
        pytest.skip(f"{program} is not installed")
    for source in Path(kernel.__file__).parent.glob("count_memory*.[ch]"):
        text = source.read_text(encoding="utf-8")
        if "-DBASE_ONLY" in options:
            text = text.replace("#if defined(__x86_64__)", "#if 0 && defined(__x86_64__)")
        (tmp_path / source.name).write_text(text, encoding="utf-8")
    library = tmp_path / "built.so"
    command = [compiler, "-std=c11", "-ffp-contract=off", "-shared", "-fPIC", *options]
    subprocess.run(
        [*command, tmp_path / f"count_memory_{kind_of(shape)}cpu.c", "-o", library], check=True, capture_output=True
    )
    expected = recorded(shape)
    use_library(monkeypatch, kernel, str(library), kind_of(shape))
    for rates, block, outcome in expected:
        found = outcome_of(Memory, trained(shape), shape, new_states(shape, 2), rates, block)
        assert differences(found, outcome, shape) == []
    found, expected = (
        {name: np.zeros(size, dtype) for name, (size, dtype) in shape.buffers().items()} for _ in range(2)
    )
    Memory(found, shape).begin()
    CountMemoryReference(expected, shape).begin()
    assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []


def parts_of(outcome, shape, rates):
    """What `read_one_block.c` reads and writes."""
    block, sizes = outcome.block, (shape.slots, shape.text, outcome.arrays["index"].shape[1])
    width = 0 if block.network is None else block.network.shape[2]
    kept = 0 if block.pending is None else block.pending.shape[1]
    parts = [
        np.array([*(size.bit_length() - 1 for size in sizes), shape.match_bits, shape.window, shape.rows]),
        *(outcome.arrays[name] for name in kernel._ARRAYS),
        outcome.states,
        np.frombuffer(kernel._Rates(*rates[:6], rates.learns + 2 * rates.inserts), np.uint8),
        np.array([*block.tokens.shape, width, block.first, kept]),
        *(getattr(block, name) for name in kernel._BLOCK_ARRAYS),
    ]
    lengths = [np.int64(-1 if part is None else part.nbytes).tobytes() for part in parts]
    return b"".join(
        length + (b"" if part is None else part.tobytes()) for length, part in zip(lengths, parts, strict=True)
    )


@needs_kernel
@pytest.mark.long
@all_kinds
@pytest.mark.parametrize("options", ["-O0", "-O3"])
def test_arm_gives_the_same_bits(options, shape, tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if not (compiler and emulator):
        pytest.skip("aarch64-linux-gnu-gcc or qemu-aarch64 is not installed")
    program = tmp_path / "read_one_block"
    command = [compiler, "-std=c11", "-ffp-contract=off", "-static", options, "-I", Path(kernel.__file__).parent]
    command += ["-DLARGE"] * shape.large + ["-DSMALL"] * shape.small
    subprocess.run([*command, Path(__file__).with_name("read_one_block.c"), "-o", program], check=True)
    for rates, block, expected in recorded(shape):
        start = Outcome(trained(shape), new_states(shape, 2), block)
        given = parts_of(start, shape, rates)
        found = subprocess.run([emulator, program], input=given, capture_output=True, check=True)
        assert found.stdout == parts_of(expected, shape, rates)


# ---- what holds for the kernel and for the reference ---------------------------------------------------------------

memories = pytest.mark.parametrize(
    "memory",
    [pytest.param(Memory, marks=needs_kernel, id="kernel"), pytest.param(CountMemoryReference, id="reference")],
)


def part(block, start, end, pending):
    """Steps [start, end) of a block, with the pending bytes of another."""
    cut = {
        name: None if getattr(block, name) is None else getattr(block, name)[:, start:end].copy()
        for name in ("tokens", "flags", "targets", "network", "nats", "probabilities")
    }
    logits = None if block.logits is None else np.zeros((*cut["tokens"].shape, 256), np.float32)
    return Block(**cut, logits=logits, pending=pending.pending, pending_used=pending.pending_used)


@memories
@pytest.mark.parametrize("network", [0, 8, 256])
@pytest.mark.parametrize("rates", [Rates(), LEARNING, Rates(inserts=True)], ids=["frozen", "learning", "inserts"])
def test_whole_equals_chunks_and_single_bytes(memory, network, rates):
    steps = 15 if memory is CountMemoryReference else 400
    whole = new_block(1, steps, network=network, targets=True, first=0, pending=16 * rates.learns, seed=2)
    expected = outcome_of(memory, trained(), SHAPE, new_states(SHAPE, 1), rates, whole)
    for size in (1, 7):
        outcome = outcome_of(
            memory, trained(), SHAPE, new_states(SHAPE, 1), rates, whole._replace(flags=0 * whole.flags)
        )
        running, blocks = copied(whole), []
        for start in range(0, steps, size):
            blocks.append(part(whole, start, start + size, running))
            memory(outcome.arrays, SHAPE).read(outcome.states, rates, blocks[-1])
        joined = {
            name: np.concatenate([getattr(block, name) for block in blocks], axis=1)
            for name in ("nats", "probabilities", "logits")
        }
        outcome.block = running._replace(**joined)
        assert differences(outcome, expected, SHAPE) == []


@memories
@pytest.mark.parametrize("network", [0, 256])
def test_chunks_of_targets_only(memory, network):
    """Without all log probabilities, only the nodes on the way to a target are computed."""
    steps = 15 if memory is CountMemoryReference else 400
    whole = new_block(1, steps, network=network, targets=True, seed=4)
    expected = outcome_of(memory, trained(), SHAPE, new_states(SHAPE, 1), Rates(), whole)
    states, blocks = new_states(SHAPE, 1), []
    for start in range(0, steps, 3):
        blocks.append(part(whole, start, start + 3, whole))
        memory(trained(), SHAPE).read(states, Rates(), blocks[-1])
    assert np.concatenate([block.nats for block in blocks], 1).tobytes() == expected.block.nats.tobytes()
    assert states.tobytes() == expected.states.tobytes()


@memories
@pytest.mark.parametrize("network", [0, 256])
def test_probabilities_sum_to_one_and_agree_with_the_costs(memory, network):
    block = new_block(2, network=network, targets=True, first=0, padding=0, odd=False)
    found = outcome_of(memory, trained(), SHAPE, new_states(SHAPE, 2), Rates(), block).block
    np.testing.assert_allclose(np.exp(found.logits.astype(np.float64)).sum(-1), 1, atol=1e-6, rtol=0)
    has_target = found.targets >= 0
    costs = -np.take_along_axis(found.logits, np.maximum(found.targets, 0)[..., None], 2)[..., 0]
    np.testing.assert_allclose(found.nats[has_target], costs[has_target], rtol=1e-5, atol=1e-6)
    products = (found.probabilities / 65536).prod(-1)
    np.testing.assert_allclose(np.exp(-found.nats[has_target]), products[has_target], rtol=1e-5)


@memories
def test_zeros_are_the_start_of_a_document(memory):
    block = new_block(1, 12, targets=True, resets=0, padding=0, first=6)
    expected = outcome_of(memory, trained(), SHAPE, new_states(SHAPE, 1), Rates(), block)
    block.flags[0, 0] = REAL_STEP + RESET_STEP
    found = outcome_of(memory, trained(), SHAPE, hostile_states(SHAPE, 1), Rates(), block)
    assert differences(found, expected, SHAPE) == []


@memories
def test_padding_changes_nothing(memory):
    padded = new_block(1, 12, targets=True, padding=0.5, seed=1)
    kept = np.flatnonzero(padded.flags[0] & REAL_STEP)
    found = outcome_of(memory, trained(), SHAPE, new_states(SHAPE, 1), Rates(), padded)
    alone = Block(**{name: getattr(padded, name)[:, kept].copy() for name in ("tokens", "flags", "targets", "nats")})
    expected = outcome_of(memory, trained(), SHAPE, new_states(SHAPE, 1), Rates(), alone)
    assert 0 < len(kept) < 12 and found.states.tobytes() == expected.states.tobytes()
    assert found.block.nats[0, kept].tobytes() == expected.block.nats.tobytes()
    assert not found.block.nats[padded.flags & REAL_STEP == 0].any()


@memories
def test_a_repeat_costs_little(memory):
    """Of the window, and of the text of the long-term memory."""
    line = np.frombuffer(b"def read_block(stream, rows): pass\n", np.uint8)
    for shape, repeats in ((SHAPE, 3), (SHAPE._replace(window=0), 1)):
        arrays = new_arrays(memory, shape, 0)
        if repeats == 1:
            memory(arrays, shape).insert(np.tile(line, 3))
        tokens = np.tile(line, repeats + 1)[None]
        block = Block(
            tokens[:, :-1].copy(),
            np.full(tokens[:, 1:].shape, REAL_STEP, np.uint8),
            targets=tokens[:, 1:].astype(np.int32),
            nats=np.zeros(tokens[:, 1:].shape, np.float32),
        )
        nats = outcome_of(memory, arrays, shape, new_states(shape, 1), Rates(), block).block.nats[0]
        assert (
            nats[-20:].mean()
            < 1
            < 4
            < outcome_of(memory, new_arrays(memory, shape, 0), shape, new_states(shape, 1), Rates(), block)
            .block.nats[0, :20]
            .mean()
        )


# ---- parts of the reference ----------------------------------------------------------------------------------------


def test_exponentials_and_logarithms():
    x = np.linspace(-45, 0, 10001, dtype=np.float32)
    np.testing.assert_allclose(mixing.exp_negative(x), np.exp(np.maximum(x, -40).astype(np.float64)), rtol=2e-6)
    y = np.exp(np.linspace(-40, 40, 10001)).astype(np.float32)
    np.testing.assert_allclose(mixing.log_positive(y), np.log(y.astype(np.float64)), rtol=2e-7, atol=2e-7)


def test_squashing_and_stretching_are_inverse():
    logits = np.arange(-3071, 3072)
    np.testing.assert_allclose(
        mixing.SQUASHED[3072 + logits], np.clip(65536 / (1 + np.exp(-logits / 256)), 1, 65535), atol=0.51
    )
    p = np.arange(3, 4093)
    np.testing.assert_allclose(
        1 / (1 + np.exp(-mixing.STRETCHED[p].astype(np.float64))), (p + 0.5) / 4096, atol=1.1e-3
    )
    assert (np.abs(mixing.STRETCHED) <= 2047 / 256).all()


def test_the_network_alone_is_a_distribution_of_bytes():
    """The logits of the nodes are those of the halves of the distribution."""
    logits = np.random.default_rng(0).normal(size=256).astype(np.float32) * 2
    nodes = mixing.network_nodes(logits)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    for node in (1, 2, 3, 77, 255):
        depth = node.bit_length() - 1
        below = [range(child << (7 - depth), (child + 1) << (7 - depth)) for child in (2 * node, 2 * node + 1)]
        zero, one = (p[[byte - 256 for byte in half]].sum() for half in below)
        assert nodes[node] == pytest.approx(np.log(one / zero), abs=1e-5)
