"""Coding by counts: the range coder, the kernel's encoder and decoder, and archives that travel."""

import functools
import itertools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from count_memory_cases import KINDS, bytes_of, new_arrays, new_states, use_library
from reference_coder import ReferenceDecoder, ReferenceEncoder

from hf_recurrent.compression import byte_coding
from hf_recurrent.compression.byte_coding import ByteCoding, Counts, empty_counts, memory_layout
from hf_recurrent.modeling.contexts import count_memory_layout
from hf_recurrent.modeling.contexts import count_memory_mixing as mixing
from hf_recurrent.modeling.contexts.count_memory_layout import REAL_STEP, Block, MemoryShape, Rates
from hf_recurrent.modeling.contexts.count_memory_reference import CountMemoryReference

kernel = pytest.importorskip("hf_recurrent.kernels.count_memory_cpu")
SHAPE = MemoryShape(1 << 7, 1 << 11, 512, 16)
both_kinds = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
LEARNING = Rates(weights=0.006, first_weights=0.04, refinement=15, learns=True, inserts=True)
RANDOM = np.random.default_rng(0)


def network_of(steps: int, streams: int = 1, scale: float = 3) -> np.ndarray:
    return (np.random.default_rng(1).normal(size=(steps, streams, 256)) * scale).astype(np.float32)


def new_memory(memory=kernel.Memory, documents: int = 3, shape: MemoryShape = SHAPE):
    return memory(new_arrays(kernel.Memory, shape, documents), shape)


def encoded(symbols: np.ndarray, *arguments) -> bytes:
    coder = kernel.Coder(room=17 * symbols.size + 8)
    coder.code(symbols, *arguments)
    return coder.finish()


def decoded(code: bytes, shape: tuple[int, int], *arguments) -> np.ndarray:
    found = np.zeros(shape, np.uint8)
    kernel.Coder(code).code(found, *arguments)
    return found


# ---- the range coder -----------------------------------------------------------------------------------------------


def ones_of(network: np.ndarray, byte: int) -> np.ndarray:
    """65536 times the probabilities of a one on the way to a byte, by the network alone."""
    x = mixing.network_nodes(network)[mixing.nodes_on_the_way(byte)]
    e = mixing.exp_negative(-np.abs(x))
    p = np.where(x < 0, e, np.float32(1)) / (np.float32(1) + e)
    return np.clip((p * np.float32(65536)).astype(np.int64), 1, 65535)


@pytest.mark.parametrize("scale", [0.1, 3, 40])
def test_the_coder_is_that_of_the_reference(scale):
    """By the network alone, also where it is sure and wrong."""
    data, network = bytes_of("code", 150)[:, None].copy(), network_of(150, scale=scale)
    encoder = ReferenceEncoder()
    for logits, byte in zip(network[:, 0], data[:, 0].tolist(), strict=True):
        for bit, one in zip(mixing.bits_of(byte), ones_of(logits, byte), strict=True):
            encoder.encode(int(bit), int(one))
    code = encoded(data, network)
    assert code == encoder.finish()
    assert np.array_equal(decoded(code, data.shape, network), data)


@pytest.mark.parametrize("seed", range(20))
def test_carries(seed):
    """Ones that are almost sure, and zeros that come all the same, add to codes that are full of ones."""
    random = np.random.default_rng(seed)
    ones = random.choice(np.array([1, 2, 32768, 65534, 65535]), 4000)
    bits = (random.random(4000) < np.where(random.random(4000) < 0.9, ones / 65536, 0.5)).astype(int)
    encoder = ReferenceEncoder()
    for bit, one in zip(bits.tolist(), ones.tolist(), strict=True):
        encoder.encode(bit, one)
    code = encoder.finish()
    decoder = ReferenceDecoder(code)
    assert [decoder.decode(one) for one in ones.tolist()] == bits.tolist()
    cost = -np.log2(np.where(bits, ones, 65536 - ones) / 65536).sum() / 8
    assert len(code) <= cost * 1.0001 + 4


# ---- counts --------------------------------------------------------------------------------------------------------


def read_by(memory_class: type, shape: MemoryShape, data: np.ndarray, network: np.ndarray | None, rates: Rates):
    """Probabilities of the bits of all bytes but the first, by reading."""
    block = Block(
        tokens=data[None, :-1].copy(),
        flags=np.full((1, len(data) - 1), REAL_STEP, np.uint8),
        targets=data[None, 1:].astype(np.int32),
        network=None if network is None else network[None, 1:, 0].copy(),
        probabilities=np.zeros((1, len(data) - 1, 8), np.uint16),
    )
    new_memory(memory_class, shape=shape).read(new_states(shape, 1), rates, block)
    return block.probabilities[0]


@both_kinds
@pytest.mark.parametrize("memory_class", [kernel.Memory, CountMemoryReference])
@pytest.mark.parametrize(("rates", "has_network"), [(LEARNING, False), (LEARNING, True), (Rates(), False)])
def test_coding_is_reading(memory_class, rates, has_network, large):
    """The probabilities are a memory's that reads the same bytes; the code is the reference's."""
    shape, steps = SHAPE._replace(large=large), 60 if memory_class is CountMemoryReference else 500
    data, network = bytes_of("code", steps), network_of(steps) if has_network else None
    coder, memory, states = kernel.Coder(room=17 * steps), new_memory(shape=shape), new_states(shape, 1)
    coder.code(data[:1, None].copy(), None if network is None else network[:1], memory, states, rates)
    encoder = ReferenceEncoder()
    encoder.low, encoder.range = coder._struct.low, coder._struct.range
    encoder.code = bytearray(coder._bytes[: coder.size])
    found = read_by(memory_class, shape, data, network, rates)
    for byte, probabilities in zip(data[1:].tolist(), found, strict=True):
        for bit, p in zip(mixing.bits_of(byte), probabilities.tolist(), strict=True):
            encoder.encode(int(bit), p if bit else 65536 - p)
    coder.code(data[1:, None].copy(), None if network is None else network[1:], memory, states, rates)
    assert coder.finish() == encoder.finish()


@pytest.mark.sampled(3)
@both_kinds
@pytest.mark.parametrize("kind", [*KINDS, "brackets"])
@pytest.mark.parametrize(("window", "rows", "streams"), [(0, 0, 1), (512, 16, 3), (1 << 17, 0, 2)])
@pytest.mark.parametrize("has_network", [False, True])
def test_every_byte_comes_back(kind, window, rows, streams, has_network, large):
    """Encoder and decoder leave the same memory and states; the cuts change nothing, not even the size."""
    shape, steps = SHAPE._replace(window=window, rows=rows, large=large), 400
    data = np.ascontiguousarray(bytes_of(kind, steps * streams).reshape(streams, steps).T)
    network = network_of(steps, streams, 1) if has_network else None
    left, codes = [], []
    for cuts in ((0, steps), (0, 1, 77, steps), (0, 200, steps)):
        memory, states = new_memory(shape=shape), new_states(shape, streams)
        coder = kernel.Coder(codes[0]) if len(codes) == 2 else kernel.Coder(room=17 * data.size)
        found = np.zeros_like(data) if len(codes) == 2 else data.copy()
        for start, end in itertools.pairwise(cuts):
            part = np.ascontiguousarray(found[start:end])
            coder.code(part, None if network is None else network[start:end].copy(), memory, states, LEARNING)
            found[start:end] = part
        assert np.array_equal(found, data)
        codes.append(codes[0] if len(codes) == 2 else coder.finish())
        states.view(shape.stream)["network"] = 0  # an encoder needs the nodes on the way to its byte only
        left.append([states.tobytes(), *(array.tobytes() for array in memory._arrays.values())])
    assert codes[0] == codes[1] and left[0] == left[1] == left[2]


def test_a_repetition_costs_nearly_nothing():
    once = RANDOM.integers(0, 256, 600, np.uint8)
    sizes = []
    for data in (once, np.tile(once, 2)):
        counts = empty_counts(1200)
        coder = kernel.Coder(room=20_000)
        coding = ByteCoding(1, None, counts)
        for start in range(0, len(data), 512):
            coding.code(coder, data[start : start + 512, None].copy())
        sizes.append(len(coder.finish()))
    assert sizes[0] > 580 and sizes[1] - sizes[0] < 50


def test_streams_share_what_they_learn():
    once = RANDOM.integers(0, 256, 600, np.uint8)
    late = np.zeros(600, np.uint8)
    data = np.stack([np.concatenate([once, late]), np.concatenate([late, once])], 1)
    coder, coding = kernel.Coder(room=40_000), ByteCoding(2, None, empty_counts(2400))
    coding.code(coder, data[:600].copy())
    before = coder.size
    coding.code(coder, data[600:].copy())
    assert before > 580 and coder.size - before < 100


def test_a_good_network_is_trusted_and_a_bad_one_is_not():
    data = RANDOM.integers(0, 256, (3000, 1), np.uint8)
    data[RANDOM.random(3000) < 0.9] = 65
    good, bad = np.zeros((3000, 1, 256), np.float32), np.zeros((3000, 1, 256), np.float32)
    good[:, :, 65] = np.log(0.9 / (0.1 / 255))
    bad[:, :, 66] = 14
    entropy = -3000 / 8 * (0.9 * np.log2(0.9) + 0.1 * np.log2(0.1 / 255))
    for network, bound in ((good, 1.15), (bad, 1.35)):
        counts = empty_counts(3000)
        memory, states = kernel.Memory(counts.arrays, counts.shape), new_states(counts.shape, 1)
        assert len(encoded(data, network, memory, states, LEARNING)) < bound * entropy


def test_sizes_follow_the_data_and_are_bounded():
    shapes = [empty_counts(size).shape for size in (0, 1, 1000, 10**6)]
    assert shapes[0] == shapes[1] and shapes[2].slots <= shapes[3].slots
    most = empty_counts(1 << 40).shape
    total = sum(np.prod(size) * dtype.itemsize for size, dtype in most.buffers().values()) + most.stream.itemsize
    assert total < 560 << 20


def test_the_layout_that_is_read_alone_is_the_layout():
    program = "\n".join(
        [
            "import sys",
            "from hf_recurrent.compression.byte_coding import memory_layout",
            "layout = memory_layout()",
            "assert 'torch' not in sys.modules and 'hf_recurrent.modeling' not in sys.modules",
            "print(layout.MemoryShape(64, 256, 512, 0).stream.itemsize, layout.Rates())",
        ]
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found == f"{MemoryShape(64, 256, 512, 0).stream.itemsize} {Rates()}\n"
    assert memory_layout() is count_memory_layout


def test_the_large_kernel_is_loaded_on_first_use():
    program = (
        "from hf_recurrent.compression.byte_coding import empty_counts, memory_layout\n"
        "from hf_recurrent.kernels import count_memory_cpu as kernel\n"
        "shape = memory_layout().MemoryShape(64, 256, 512, 0)\n"
        "arrays = {name: kernel.np.zeros(size, dtype) for name, (size, dtype) in shape.buffers().items()}\n"
        "kernel.Memory(arrays, shape).begin()\n"
        "assert kernel.large_library.cache_info().currsize == 0\n"
        "empty_counts(10)\n"
        "assert kernel.large_library.cache_info().currsize == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_compression_needs_both_kernels(monkeypatch):
    def missing():
        raise ImportError("the kernel was not built")

    monkeypatch.setattr(kernel, "large_library", missing)
    with pytest.raises(ImportError, match="compression needs the compiled kernel of the count memory: the kernel was"):
        byte_coding.require_kernel.__wrapped__()


def test_counts_alone_import_no_torch(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_bytes(b"abc" * 1000)
    program = (
        "import sys; from hf_recurrent.cli.main import main; name = sys.argv[1]\n"
        "main(['compress', name, '--quiet'])\n"
        "main(['decompress', name + '.hfr', '--output', name + '.copy', '--quiet'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    for name in ("empty", "text"):
        subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], check=True)
        assert (tmp_path / f"{name}.copy").read_bytes() == (tmp_path / name).read_bytes()


# ---- builds --------------------------------------------------------------------------------------------------------

COMMAND = ["-std=c11", "-ffp-contract=off"]
BUILDS = [
    "gcc -O0",
    *(
        pytest.param(command, marks=pytest.mark.long)
        for command in ("gcc -O1", "gcc -O3 -march=native", "clang -O0", "clang -O3 -march=native")
    ),
]


def fresh(large: bool) -> Counts:
    """The memory that the kernel begins with."""
    shape = empty_counts(3000, large).shape
    return Counts(shape, new_arrays(kernel.Memory, shape, 0))


@functools.cache
def recorded(large: bool) -> tuple[np.ndarray, np.ndarray, bytes, bytes]:
    """Data, a network's logits, and their codes without and with it, by the kernel that is installed."""
    data, network = bytes_of("code", 3000)[:, None].copy(), network_of(3000, scale=1)
    codes = []
    for logits in (None, network):
        counts = fresh(large)
        memory, states = kernel.Memory(counts.arrays, counts.shape), new_states(counts.shape, 1)
        codes.append(encoded(data, logits, memory, states, LEARNING))
    return data, network, *codes


@both_kinds
@pytest.mark.parametrize("build", BUILDS)
def test_every_build_decodes_the_code_of_another(build, large, tmp_path, monkeypatch):
    program, *options = build.split()
    if (compiler := shutil.which(program)) is None:
        pytest.skip(f"{program} is not installed")
    data, network, *codes = recorded(large)
    source = Path(kernel.__file__).with_name(f"count_memory_{'large_' * large}cpu.c")
    library = tmp_path / "built.so"
    command = [compiler, *COMMAND, "-shared", "-fPIC", *options, source, "-o", library]
    subprocess.run(command, check=True, capture_output=True)
    use_library(monkeypatch, kernel, str(library), "large_" * large)
    for logits, code in zip((None, network), codes, strict=True):
        counts = fresh(large)
        memory, states = kernel.Memory(counts.arrays, counts.shape), new_states(counts.shape, 1)
        assert np.array_equal(decoded(code, data.shape, logits, memory, states, LEARNING), data)


DECODER = """
#include "count_memory_cpu.c"
#include <stdio.h>
#include <stdlib.h>
/* Six sizes, the bytes of eight arrays and of the state, the number of symbols, and the file of the code. */
int main(int count, char **words)
{
    struct memory m;
    int64_t numbers[16];
    void **const arrays = (void **)&m.slots, *state;
    for (int i = 0; i < 16; i++) numbers[i] = atoll(words[1 + i]);
    hf_count_memory_version();
    memcpy(&m, numbers, 6 * sizeof *numbers);
    for (int i = 0; i < 8; i++) arrays[i] = calloc((size_t)numbers[6 + i], 1);
    state = calloc((size_t)numbers[14], 1);
    hf_count_memory_begin(&m);
    static uint8_t code[1 << 20];
    FILE *const file = fopen(words[17], "rb");
    struct coder coder = {0, 0, 0, (int64_t)fread(code, 1, sizeof code, file), code};
    begin_coder(&coder, 1);
    struct rates rates = {0.006f, 0.04f, 0.0005f, 0.01f, 98, 15, LEARNS | INSERTS};
    uint8_t *const bytes = calloc((size_t)numbers[15], 1);
    struct coding job = {1, numbers[15], 1, bytes, 0, &coder};
    hf_count_memory_code(&m, state, &rates, &job);
    return fwrite(bytes, 1, (size_t)numbers[15], stdout) != (size_t)numbers[15] || count != 18;
}
"""


@pytest.mark.long
@both_kinds
@pytest.mark.parametrize("options", ["-O0", "-O3"])
def test_another_processor_decodes_the_code(options, large, tmp_path):
    """64-bit ARM, emulated."""
    tools = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if None in tools or platform.machine() == "aarch64":
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64 on another processor")
    data, _, code, _ = recorded(large)
    (tmp_path / "decoder.c").write_text(DECODER)
    (tmp_path / "code").write_bytes(code)
    folder, program = Path(kernel.__file__).parent, tmp_path / "decoder"
    command = [tools[0], *COMMAND, options, "-static", f"-I{folder}", tmp_path / "decoder.c", "-o", program]
    command += ["-DLARGE"] * large
    subprocess.run(command, check=True, capture_output=True)
    counts = fresh(large)
    shape = counts.shape
    sizes = [size.bit_length() - 1 for size in (shape.slots, shape.text, counts.arrays["index"].shape[1])]
    sizes += [shape.match_bits, shape.window, shape.rows]
    sizes += [counts.arrays[name].nbytes for name in kernel._ARRAYS]
    sizes += [shape.stream.itemsize, len(data)]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [tools[1], program, *map(str, sizes), tmp_path / "code"], capture_output=True, check=True, env=environment
    )
    assert done.stdout == data.tobytes()
