"""Compression: what comes back is what went in, or nothing does."""

import copy
import errno
import io
import itertools
import math
import os
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hf_recurrent import __version__, config_from_preset
from hf_recurrent.compression import agreement, files, predictors
from hf_recurrent.compression.adaptive_predictor import AdaptivePredictor, AdaptiveSettings
from hf_recurrent.compression.archive import ArchiveError, read_header, write_header
from hf_recurrent.compression.byte_coding import counts_version
from hf_recurrent.compression.coding import Parts
from hf_recurrent.compression.files import compress, compress_file, decompress, decompress_file, decompress_to
from hf_recurrent.compression.predictors import FrozenPredictor
from hf_recurrent.learning_rules import compiled_program

SIZES = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
TEXT = b"".join(b"%d bottles of beer on the wall\n" % number for number in range(40))
RELEASE_AND_KERNEL = __version__.encode(), agreement.kernel_name().encode()
LEARNING = AdaptiveSettings(stride=16, learning_rate=1e-2)


def version_of(packed: bytes) -> int:
    """Of the count memory."""
    return read_header(io.BytesIO(packed), len(packed)).counts


def new_model(preset="memora-tiny", **fields):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_from_preset(preset, **SIZES | fields)).eval()


@pytest.fixture(scope="module")
def model():
    """A model that has learned something."""
    model = new_model()
    compress(TEXT, model, adaptive=LEARNING)
    return model


def cross_entropy(model, data: bytes) -> float:
    """Bits, by one call of `forward`; the first byte has 8."""
    ids = torch.tensor([list(data)])
    with torch.no_grad():
        log_probabilities = model(ids[:, :-1]).logits.double().log_softmax(-1)
    return 8 - float(log_probabilities.gather(-1, ids[:, 1:, None]).sum()) / math.log(2)


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=60), st.integers(1, 9))
def test_any_bytes_come_back(data, streams):
    model = new_model()
    assert decompress(compress(data, model, streams=streams), model) == data


@pytest.mark.parametrize("preset", ["hawk-tiny", "lru-tiny"])
def test_other_families(preset):
    model = AutoModelForCausalLM.from_config(config_from_preset(preset)).eval()
    assert decompress(compress(TEXT[:100], model, streams=2), model) == TEXT[:100]


def test_the_size_is_the_cross_entropy(model):
    size, bits = 8 * len(compress(TEXT, model, mixes=False)), cross_entropy(model, TEXT)
    assert bits < 5 * len(TEXT)  # so that nothing is stored as it is
    assert bits * 0.9999 <= size <= bits * 1.002 + 8 * (52 + len(agreement.kernel_name()))


def test_bytes_that_the_model_does_not_expect_are_stored():
    model = new_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(30)  # sure of itself, and wrong
    data = np.random.default_rng(0).bytes(2000)
    assert cross_entropy(model, data) > 3 * 8 * len(data)
    packed = compress(data, model, mixes=False)
    assert len(packed) < len(data) + 100 and decompress(packed, model) == data


def test_learning_while_coding():
    learned = compress(TEXT, new_model(), adaptive=LEARNING)
    assert len(learned) < 0.6 * len(TEXT)
    assert decompress(learned, new_model()) == TEXT


@pytest.mark.parametrize("change", [{"rule": "rtrl"}, {"compiled": False}, {"stride": 1}])
def test_other_ways_of_learning(change):
    adaptive = replace(LEARNING, **change)
    assert decompress(compress(TEXT[:100], new_model(), adaptive=adaptive), new_model()) == TEXT[:100]


def learning_of(packed: bytes) -> dict:
    return read_header(io.BytesIO(packed), len(packed)).settings["adaptive"]


def test_a_model_that_the_kernel_cannot_compute_learns_in_plain_torch():
    def mgrade():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1}
        return AutoModelForCausalLM.from_config(config_from_preset("mgrade-tiny", **sizes))

    packed = compress(TEXT[:100], mgrade(), adaptive=LEARNING)
    assert learning_of(packed)["compiled"] is False
    assert decompress(packed, mgrade()) == TEXT[:100]


def test_the_decoder_takes_the_path_of_the_encoder_or_refuses(monkeypatch):
    packed = compress(TEXT[:100], new_model(), adaptive=LEARNING)
    assert "compiled" not in learning_of(packed)
    monkeypatch.setattr(compiled_program, "block_cpu", None)
    with pytest.raises(ArchiveError, match="compiled kernel that cannot be used here: the kernel was not built"):
        decompress(packed, new_model())
    plain = compress(TEXT[:100], new_model(), adaptive=LEARNING)
    monkeypatch.undo()
    assert learning_of(plain)["compiled"] is False
    assert decompress(plain, new_model()) == TEXT[:100]


def test_a_loss_that_is_not_finite_leaves_the_weights():
    model = new_model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e30)
    predictor = AdaptivePredictor(model, 100, replace(LEARNING, compiled=False))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for byte in TEXT[:40]:
        predictor.read(np.array([byte]))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_other_weights_are_refused(model):
    packed = compress(TEXT, model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1
    with pytest.raises(ArchiveError, match="made with other weights"):
        decompress(packed, other)
    changed = new_model()
    learned = compress(TEXT, changed, adaptive=LEARNING)
    with pytest.raises(ArchiveError, match="made with other weights"):
        decompress(learned, changed)  # compressing has changed them


def test_other_arithmetic_is_refused_before_it_decodes(model, monkeypatch):
    packed = compress(TEXT, model)
    finite = predictors.finite
    monkeypatch.setattr(predictors, "finite", lambda logits: finite(logits * (1 + 1e-6)))
    with pytest.raises(ArchiveError, match="computes other probabilities here"):
        decompress(packed, model)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_block_that_is_decoded_wrongly_is_not_written(model, monkeypatch, tmp_path, streams):
    monkeypatch.setattr("hf_recurrent.compression.coding.BLOCK_CODE", 40)
    packed = compress(TEXT, model, streams=streams, mixes=False)
    (tmp_path / "packed").write_bytes(packed)
    fingerprint = read_header(io.BytesIO(packed), len(packed)).network.fingerprint
    monkeypatch.setattr(agreement, "_fingerprint", lambda *_: fingerprint)  # as if it were the same
    read, count = FrozenPredictor.read, 0

    def drift(self, tokens):
        nonlocal count
        read(self, tokens)
        count += 1
        if count > 300 // streams:
            self.logits = np.roll(self.logits, 1, -1)

    monkeypatch.setattr(FrozenPredictor, "read", drift)
    done, output = [], io.BytesIO()
    with pytest.raises(ArchiveError, match="decoded to other bytes than were compressed"):
        decompress_to(output, io.BytesIO(packed), len(packed), model, done.append)
    content, count = output.getvalue(), 0
    with pytest.raises(ArchiveError, match="decoded to other bytes than were compressed"):
        decompress_file(tmp_path / "packed", tmp_path / "data", model)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"] and done
    assert all(byte in (0, TEXT[place]) for place, byte in enumerate(content))
    assert sum(map(bool, content)) == done[-1]


@pytest.fixture(params=["counts", "network"])
def archive(request, model):
    """An archive of 60 bytes, and the model that made it."""
    used = None if request.param == "counts" else model
    return bytearray(compress(TEXT[:60], used)), used


@pytest.mark.sampled(2)
def test_every_damaged_byte_is_noticed(archive):
    packed, used = archive
    texts = [packed.index(text) + place for text in RELEASE_AND_KERNEL if text in packed for place in range(len(text))]
    for place, change in itertools.product(range(len(packed)), (0x41, 0x80, 0xFF)):
        damaged = packed.copy()
        damaged[place] ^= change
        try:
            assert decompress(damaged, used) == TEXT[:60]  # names of the release and of the kernel are not needed
            assert place in texts
        except ArchiveError as error:
            assert str(error).endswith("."), error


def test_every_shorter_archive_is_refused(archive):
    packed, used = archive
    for length in range(len(packed)):
        with pytest.raises(ArchiveError):
            decompress(packed[:length], used)
    with pytest.raises(ArchiveError, match="continues after its last block"):
        decompress(packed + b"0", used)


def test_a_header_cannot_ask_for_much_memory(archive):
    packed, used = archive
    packed[5:11] = (1 << 47).to_bytes(6, "little")
    with pytest.raises(ArchiveError, match="too few"):
        decompress(packed, used)


@pytest.mark.parametrize("kind", ["code", "stored"])
def test_random_blocks_are_refused(kind):
    """With checksums that match: what they decode to is refused, or is as long as they say."""
    generator = np.random.default_rng(0)
    for size in (1, 7, 300, 3000):
        header, content = io.BytesIO(), generator.bytes(size if kind == "stored" else 40)
        write_header(header, agreement.new_header(None, size))
        numbers = size, len(content) | (1 << 31 if kind == "stored" else 0), zlib.crc32(content)
        if kind == "stored":
            block = struct.pack("<IIII", *numbers, zlib.crc32(content)) + content
            assert decompress(header.getvalue() + block) == content
        else:
            with pytest.raises(ArchiveError, match="decoded to other bytes"):
                decompress(header.getvalue() + struct.pack("<IIII", *numbers, 0) + content)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            4,
            1,
            "format has version 1, of a development version before hf-recurrent 0.1.0; this release reads version 2",
        ),
        (4, 3, "format has version 3, of a later release"),
        (
            11,
            77,
            r"hf-recurrent 0.1.0 made it, with version 77 of the count memory; this release has versions \d+ and",
        ),
    ],
)
def test_archives_of_other_versions(archive, place, value, message):
    packed, used = archive
    packed[place] = value
    with pytest.raises(ArchiveError, match=message):
        decompress(packed, used)


def test_archives_of_the_first_count_memory_still_open():
    """Made before there was a large one; its version is in the header."""
    packed = bytes.fromhex(
        "48465243020402000000000305302e312e30000000040200004f000000324a9d8c43953d7d9b9a98a06fc2958fac733f57ae6e54b8ec"
        "cdccf708312abd33cf2a918858a70ab94cccc4aa63721a0b440aa8b53a7eee27101fbb782005ddf0f738b5563d763d8b3440d141c883"
        "7bb43c65e98d8b5b"
    )
    text = b"".join(b"def read_%d(stream): return stream.read(%d)\n" % (number, number**2) for number in range(12))
    assert decompress(packed) == text
    assert version_of(packed) == counts_version(large=False) != version_of(compress(text))


def test_an_archive_with_and_one_without_a_model(model):
    with pytest.raises(ArchiveError, match="made by counts alone; decompress it without a model"):
        decompress(compress(TEXT), model)
    with pytest.raises(ArchiveError, match=r"made with a model \(hash of the weights \w+\); give that model too"):
        decompress(compress(TEXT, model))
    with pytest.raises(ValueError, match="without `model`, counts predict alone"):
        compress(TEXT, streams=2)


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=2000))
def test_counts_alone_give_any_bytes_back(data):
    packed = compress(data)
    assert decompress(packed) == data and len(packed) <= len(data) + 40


def test_counts_make_archives_smaller(model):
    alone, mixed, counts = compress(TEXT, model, mixes=False), compress(TEXT, model), compress(TEXT)
    assert len(mixed) < 0.8 * len(alone) and len(counts) < len(alone)
    assert decompress(alone, model) == decompress(mixed, model) == decompress(counts) == TEXT


def counted_model(**fields):
    sizes = {"count_memory_slots": 1 << 8, "count_memory_text": 1 << 12, "count_memory_window": 256}
    return new_model(**sizes | fields)


@pytest.mark.parametrize("options", [{}, {"streams": 3}, {"adaptive": LEARNING}, {"mixes": False}])
def test_a_model_with_a_count_memory_of_its_own(options):
    """Its memory knows the text, stays as it was, and is back afterwards."""

    def made():
        model = counted_model()
        model.count_memory.insert(torch.tensor([*TEXT], dtype=torch.uint8))
        return model

    model = made()
    before = {name: buffer.clone() for name, buffer in model.count_memory.named_buffers()}
    packed = compress(TEXT, model, **options)
    after = dict(model.count_memory.named_buffers())
    assert all(torch.equal(buffer, after[name]) for name, buffer in before.items())
    assert decompress(packed, made()) == TEXT
    assert version_of(packed) == (counts_version(large=False) if options.get("mixes", True) else 0)
    if not options:
        alone = compress(TEXT, new_model())
        assert len(packed) < 0.6 * len(alone) and version_of(alone) == counts_version()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streams": 0}, "`streams` is 0"),
        ({"streams": 2, "adaptive": LEARNING}, "a model that learns reads one stream"),
    ],
)
def test_bad_arguments(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        compress(TEXT, model, **arguments)


def test_bad_models():
    with pytest.raises(ValueError, match="must have one for each of 256 bytes"):
        compress(TEXT, new_model(vocab_size=300))


@pytest.mark.parametrize("values", [{"stride": 0}, {"rule": "none"}, {"learning_rate": math.nan}, {"stride": True}])
def test_bad_learning_settings(values):
    with pytest.raises(ValueError, match=f"`{next(iter(values))}` is"):
        AdaptiveSettings(**values)


class Stop(Exception):
    pass


class StopAfter:
    """Raises `Stop` at a number of calls."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, done):
        self.calls -= 1
        if not self.calls:
            raise Stop


@pytest.mark.parametrize("kind", ["frozen", "adaptive", "counts"])
def test_an_interrupted_run_continues_as_if_nothing_had_happened(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("hf_recurrent.compression.coding.BLOCK_CODE", 60)
    monkeypatch.setattr("hf_recurrent.compression.files._SECONDS_BETWEEN_SAVES", 0)
    monkeypatch.setattr("hf_recurrent.compression.byte_coding._CHUNK", 64)
    adaptive = LEARNING if kind == "adaptive" else None

    def new_model_or_none():
        return None if kind == "counts" else new_model()

    text = TEXT[:400]
    (tmp_path / "text").write_bytes(text)
    whole = compress(text, new_model_or_none(), adaptive=adaptive)

    def run(work, *arguments):
        """Stop after each second block, and begin again in new objects."""
        for _ in range(40):
            try:
                work(*arguments, new_model_or_none(), StopAfter(3))
                return
            except Stop:
                continue
        raise AssertionError("no end")

    def pack(source, output, model, after):
        compress_file(source, output, model, agreement.new_header(model, len(text), adaptive), after)

    run(pack, tmp_path / "text", tmp_path / "packed")
    assert (tmp_path / "packed").read_bytes() == whole
    run(decompress_file, tmp_path / "packed", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "packed", "text"]


def test_unfinished_work_of_another_file_is_not_continued(tmp_path, model, monkeypatch):
    monkeypatch.setattr("hf_recurrent.compression.coding.BLOCK_CODE", 100)
    monkeypatch.setattr("hf_recurrent.compression.files._SECONDS_BETWEEN_SAVES", 0)
    monkeypatch.setattr("hf_recurrent.compression.coding._REPORTED_STEPS", 10_000)  # so blocks alone are reported
    header = agreement.new_header(model, len(TEXT))

    for name in ("one", "two"):
        (tmp_path / name).write_bytes(TEXT)
    with pytest.raises(Stop):
        compress_file(tmp_path / "one", tmp_path / "packed", model, header, StopAfter(1))
    with pytest.raises(ValueError, match="belongs to another file"):
        compress_file(tmp_path / "two", tmp_path / "packed", model, header)


def test_progress_is_reported_within_a_block(tmp_path, model):
    (tmp_path / "text").write_bytes(TEXT)
    steps, done = -(-len(TEXT) // 2), []
    compress_file(
        tmp_path / "text", tmp_path / "packed", model, agreement.new_header(model, len(TEXT), streams=2), done.append
    )
    expected = [2 * step for step in range(512, steps, 512)] + [len(TEXT)]
    assert done == expected and len(done) > 1
    done.clear()
    decompress_file(tmp_path / "packed", tmp_path / "copy", model, done.append)
    assert done == expected


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100), st.integers(1, 20))
def test_parts_cover_every_byte_once(size, streams):
    parts = Parts(size, streams)
    places = [place for step in range(parts.steps) for place in parts.offsets(step)]
    assert sorted(places) == list(range(size))
    assert np.array_equal(parts.offsets(0, parts.steps), places)
    assert [parts.bytes_before(step) for step in range(parts.steps + 1)] == [
        sum(len(parts.offsets(earlier)) for earlier in range(step)) for step in range(parts.steps + 1)
    ]
    data = np.arange(size) % 251
    pieces = parts.pieces(data.astype(np.uint8)[places] if size else data.astype(np.uint8), 0, parts.steps)
    assert not size or b"".join(piece for _, piece in sorted(pieces)) == bytes(data.astype(np.uint8))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_file_and_leaves_nothing(monkeypatch, tmp_path, code):
    (tmp_path / "data").write_bytes(TEXT)
    (tmp_path / "packed").write_bytes(compress(TEXT))

    def fail(file):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "_sync", fail)
    header = agreement.new_header(None, len(TEXT))
    for write in (
        lambda output: compress_file(tmp_path / "data", output, None, header),
        lambda output: decompress_file(tmp_path / "packed", output),
    ):
        with pytest.raises(OSError, match=rf"{os.strerror(code)}: '.*output'"):
            write(tmp_path / "output")
        assert {path.name for path in tmp_path.iterdir()} == {"data", "packed"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no special files")
def test_special_files_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file; give the name of a file, or -"):
        files.check_output(tmp_path / "pipe", force=True, resume=False)
