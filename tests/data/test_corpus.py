import gzip
import itertools
import json
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_recurrent.data import packing
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.loading import load_corpus
from hf_recurrent.data.streams import MultiStreamDataset
from hf_recurrent.modeling.tokenizer.tokenization_byte import ByteTokenizer
from hf_recurrent.modeling.tokenizer.tokenization_dna import DNATokenizer

STORIES = ["Once upon a time.", "", "The cat sät and so on.\n", "Ende"]
WANTED = [story.encode() for story in STORIES if story]


@pytest.fixture
def load(tmp_path):
    return lambda source, **options: load_corpus(source, cache_dir=tmp_path / "cache", **options)


def contents(corpus):
    return [episode.tobytes() for episode in corpus]


def write_parquet(path, column="text", rows=STORIES):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table({"id": list(range(len(rows))), column: rows}), path)


def json_lines(rows=STORIES, column="text"):
    return "".join(json.dumps({"id": 1, column: row}) + "\n" for row in rows).encode()


# Reading


def test_standard_library(load):
    corpus = load("python")
    # Some distributions leave out its tests, two thirds of it.
    fewest = 1000 if os.path.exists(os.path.join(os.path.dirname(os.__file__), "test", "test_os.py")) else 500
    assert len(corpus) > fewest and 10e6 < corpus.num_bytes < 100e6 and corpus.name == "python"
    assert (corpus.vocab_size, corpus.end_token_id) == (256, 0)
    with open(os.__file__, "rb") as file:
        assert file.read() in set(contents(corpus))
    assert isinstance(corpus._store, np.memmap)
    for episode in itertools.islice(corpus, 0, None, 50):
        episode.tobytes().decode("utf-8")


def test_text_files_globs_directories_and_lists(load, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_bytes(b"second")
    (tmp_path / "deep" / ".hidden").write_bytes(b"\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert contents(load(tmp_path / "a.txt")) == [b"first"]
    assert contents(load(str(tmp_path / "*.txt"))) == [b"first"]
    assert contents(load(tmp_path / "deep")) == [b"second"]
    assert contents(load([tmp_path / "deep" / "b.md", str(tmp_path / "**/*.txt")])) == [b"second", b"first"]
    (tmp_path / "[odd].txt").write_bytes(b"brackets")
    assert contents(load(tmp_path / "[odd].txt")) == [b"brackets"]


def test_a_large_text_file_is_one_episode(load, tmp_path):
    text = "ä€😀x" * 700_000  # characters lie across the borders of chunks
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    assert contents(load(tmp_path / "book.txt")) == [text.encode()]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".fa"])
def test_compression_around_every_format(load, tmp_path, suffix, compression):
    if suffix == ".parquet":
        write_parquet(tmp_path / "plain")
    else:
        (tmp_path / "plain").write_bytes(
            {".txt": WANTED[1], ".jsonl": json_lines(), ".fa": b">1\nACG\nT\n>2\n\n>3\nNN"}[suffix]
        )
    data, path = (tmp_path / "plain").read_bytes(), tmp_path / f"file{suffix}{compression}"
    if compression == ".gz":
        data = gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])
    elif compression == ".zst":
        compress = pytest.importorskip("zstandard").ZstdCompressor().compress
        data = compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])
    path.write_bytes(data)
    assert contents(load(path)) == {".txt": WANTED[1:2], ".fa": [b"ACGT", b"NN"]}.get(suffix, WANTED)


def test_json_lines_without_last_newline_and_with_long_lines(load, tmp_path):
    rows = ["x" * 3_000_000, "y"]
    (tmp_path / "a.jsonl").write_bytes(b"\n" + json_lines(rows, "content").rstrip(b"\n"))
    assert contents(load(tmp_path / "a.jsonl", text_column="content")) == [row.encode() for row in rows]


def test_a_row_without_text_is_left_out(load, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": null}\n{"text": "a"}\n')
    assert contents(load(tmp_path / "a.jsonl")) == [b"a"]


@given(
    records=st.lists(st.lists(st.text("ACGTNacgtn", max_size=9), max_size=4), min_size=1, max_size=5),
    size=st.integers(1, 20),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_fasta_records_whatever_the_chunks(records, size, newline):
    from pathlib import Path

    from hf_recurrent.data import readers

    data = "".join(
        f">r{number} x{newline}" + "".join(line + newline for line in lines) for number, lines in enumerate(records)
    )
    pieces = [data.encode()[first : first + size] for first in range(0, len(data), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "read_chunks", lambda path: iter(pieces))
        documents = [b"".join(chunks) for _, chunks in readers.reader_of(Path("a.fa"), False)(Path("a.fa"), "")]
    assert documents == ["".join(lines).encode() for lines in records]


def test_dna_tokenizer_reads_fasta(load, tmp_path):
    (tmp_path / "a.fasta").write_bytes(b">chr1\nACGTN\nacgtn\n>chr2\nRA\n")
    corpus = load(tmp_path / "a.fasta", tokenizer=DNATokenizer())
    assert [episode.tolist() for episode in corpus] == [[1, 2, 3, 4, 5, 1, 2, 3, 4, 5], [6, 1]]
    assert (corpus.vocab_size, corpus.end_token_id) == (7, 0)


def test_binary_files_have_no_end(load, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\xff\0")
    corpus = load(tmp_path / "a.bin", binary=True)
    assert contents(corpus) == [b"\0\xff\0"] and corpus.end_token_id is None
    batch = next(iter(MultiStreamDataset(corpus, 1, 3)))
    assert batch["shift_labels"].tolist() == [[255, 0, -100]]


def test_byte_tokenizer_gives_the_bytes(load, tmp_path):
    (tmp_path / "a.txt").write_bytes(WANTED[1])
    with_tokenizer, without = load(tmp_path / "a.txt", tokenizer=ByteTokenizer()), load(tmp_path / "a.txt")
    assert contents(with_tokenizer) == contents(without)
    assert with_tokenizer.fingerprint == without.fingerprint


def test_saved_datasets(load, tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": STORIES, "id": [1, 2, 3, 4]})
    dataset.save_to_disk(tmp_path / "one")
    assert contents(load(tmp_path / "one")) == WANTED
    datasets.DatasetDict(train=dataset, test=dataset.select([3])).save_to_disk(tmp_path / "splits")
    assert contents(load(tmp_path / "splits", split="test")) == [b"Ende"]
    with pytest.raises(ValueError, match=r"`split` is 'valid'; .*'train', 'test'"):
        load(tmp_path / "splits", split="valid")
    with pytest.raises(ValueError, match=r"`text_column` is 'story'; .*'text', 'id'"):
        load(tmp_path / "one", text_column="story")
    with pytest.raises(ValueError, match="holds int"):
        load(tmp_path / "one", text_column="id")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="not a whole saved dataset"):
        load(tmp_path / "one")


@pytest.fixture
def dataset_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_laid_out_as_tinystories(load, tmp_path, dataset_cache, streaming):
    folder = tmp_path / "TinyStories"
    write_parquet(folder / "data" / "train-00000-of-00002-2d5a1467fff1081b.parquet", rows=STORIES[:2])
    write_parquet(folder / "data" / "train-00001-of-00002-5852b56a2bd28fd9.parquet", rows=STORIES[2:])
    write_parquet(folder / "data" / "validation-00000-of-00001-869c898b519ad725.parquet", rows=["held out"])
    assert contents(load(f"hub:{folder}", streaming=streaming)) == WANTED
    assert contents(load(f"hub:{folder}", streaming=streaming, split="validation")) == [b"held out"]
    assert contents(load(f"hub:{folder}", streaming=streaming, max_bytes=20)) == WANTED[:1]
    with pytest.raises(ValueError, match=r"`text_column` is 'story'; .*'text'"):
        load(f"hub:{folder}", streaming=streaming, text_column="story")
    with pytest.raises(ValueError, match="dev"):
        load(f"hub:{folder}", streaming=streaming, split="dev")


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_laid_out_as_fineweb_edu(load, tmp_path, dataset_cache, streaming):
    folder = tmp_path / "fineweb-edu"
    write_parquet(folder / "data" / "CC-MAIN-2024-10" / "train-00000-of-00014.parquet", rows=["all"])
    write_parquet(folder / "sample" / "10BT" / "000_00000.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/*/*\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    assert contents(load(f"hub:{folder}", streaming=streaming, config_name="sample-10BT")) == WANTED
    assert contents(load(f"hub:{folder}", streaming=streaming)) == [b"all"]


# Errors


def test_missing_sources(load, tmp_path):
    (tmp_path / "nothing").mkdir()
    for source in (tmp_path / "none.txt", str(tmp_path / "*.none"), "owner/name", tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=str(source).replace("*", r"\*")):
            load(source)
    for source in ([], "hub:"):
        with pytest.raises(ValueError, match="`source`"):
            load(source)


def test_empty_sources(load, tmp_path):
    for name in ("a.txt", "a.jsonl", "a.fa", "a.bin"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ValueError, match="empty"):
            load(tmp_path / name)
    write_parquet(tmp_path / "a.parquet", rows=["", ""])
    with pytest.raises(ValueError, match="empty"):
        load(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="empty"):
        Corpus.from_documents(["", b""])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"good \xff bad", "not UTF-8.*byte 5.*binary=True"),
        ("a.txt", b"cut \xe2\x82", "not UTF-8"),
        ("a.txt", b"a\0b", "token id 0.*binary=True"),
        ("a.txt.gz", b"no gzip", "not a whole gzip"),
        # Without the time, the same in every process that collects the tests.
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], "not a whole gzip"),
        ("a.txt.gz", gzip.compress(bytes(range(99)), mtime=0)[:40] + b"\x07" * 99, "not a whole gzip"),
        ("a.txt.zst", b"no zstandard", "not a whole Zstandard"),
        ("a.parquet", b"PAR1 and no more", "not a whole Parquet"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 is a JSON list"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1.*not valid Unicode"),
        ("a.jsonl", b'{"text": 7}\n', "line 1.*holds int"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', "`text_column` is 'text'; .*line 1.*'body', 'id'"),
        ("a.fa", b"ACGT\n", "does not begin with '>'"),
        ("a.fa", b">1\nAC1GT\n", "record 1.*letters"),
    ],
)
def test_damaged_files(load, tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert not list((tmp_path / "cache").glob("*.incomplete"))


def test_cut_zstandard_file(load, tmp_path):
    data = pytest.importorskip("zstandard").ZstdCompressor().compress(os.urandom(5000))
    (tmp_path / "a.bin.zst").write_bytes(data[:-100])
    with pytest.raises(ValueError, match="ends within a frame"):
        load(tmp_path / "a.bin.zst", binary=True)


def test_parquet_without_the_column(load, tmp_path):
    write_parquet(tmp_path / "a.parquet", column="story")
    with pytest.raises(ValueError, match=r"`text_column` is 'text'; .*'id', 'story'"):
        load(tmp_path / "a.parquet")
    assert contents(load(tmp_path / "a.parquet", text_column="story")) == WANTED


@pytest.mark.parametrize(
    ("suffix", "module"), [(".zst", "zstandard"), (".parquet", "pyarrow"), ("/state.json", "datasets")]
)
def test_missing_packages_are_named(load, tmp_path, monkeypatch, suffix, module):
    path = tmp_path / f"a{suffix}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ImportError, match="pip install"):
        load(path if suffix != "/state.json" else path.parent)


def test_tokenizers_that_do_not_fit(load, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc")
    with pytest.raises(ValueError, match="`tokenizer` is of type object; it must have `encode_bytes`"):
        load(tmp_path / "a.txt", tokenizer=object())

    class TooLarge:
        vocab_size, eos_token_id = 7, 0

        def encode_bytes(self, data):
            return np.full(len(data), 7, dtype=np.uint8)

    with pytest.raises(ValueError, match="token id 7; ids must be below 7"):
        load(tmp_path / "a.txt", tokenizer=TooLarge())


# Packing


def test_max_bytes_takes_whole_documents(load, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["12345", "678", "90"]))
    assert [contents(load(tmp_path / "a.jsonl", max_bytes=limit)) for limit in (5, 8, 9, 10)] == [
        [b"12345"],
        [b"12345", b"678"],
        [b"12345", b"678"],
        [b"12345", b"678", b"90"],
    ]
    with pytest.raises(ValueError, match="`max_bytes` is 4, but the first document"):
        load(tmp_path / "a.jsonl", max_bytes=4)
    with pytest.raises(ValueError, match="`max_bytes` is 0"):
        load(tmp_path / "a.jsonl", max_bytes=0)


def test_packed_once_and_again_when_the_file_changes(load, tmp_path, monkeypatch):
    path, runs = tmp_path / "a.txt", []
    real = packing._pack
    monkeypatch.setattr(packing, "_pack", lambda *arguments: runs.append(1) or real(*arguments))
    path.write_bytes(b"one")
    first = load(path)
    assert load(path).fingerprint == first.fingerprint and len(runs) == 1
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert contents(load(path)) == [b"two"] and len(runs) == 2
    assert load(path).fingerprint != first.fingerprint
    load(path, binary=True)
    assert len(runs) == 3


def test_a_damaged_cache_is_made_again(load, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"content")
    load(tmp_path / "a.txt")
    for damage in ("tokens.bin", "offsets.npy", "corpus.json"):
        (damaged,) = (tmp_path / "cache").glob(f"*/{damage}")
        damaged.write_bytes(b"x")
        assert contents(load(tmp_path / "a.txt")) == [b"content"]


def _load_in_process(path, cache, barrier, queue):
    barrier.wait()
    corpus = load_corpus(path, cache_dir=cache)
    queue.put((len(corpus), corpus.fingerprint))


def test_processes_may_pack_at_the_same_time(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["some text"] * 20_000))
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(3), context.Queue()
    arguments = (tmp_path / "a.jsonl", tmp_path / "cache", barrier, queue)
    processes = [context.Process(target=_load_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    results = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(results) == 1 and results.pop()[0] == 20_000
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


# The corpus itself


def test_views_offsets_and_selection():
    corpus = Corpus.from_documents(["abc", "", "d", "efgh"])
    assert corpus.num_bytes == 8 and corpus.offsets.tolist() == [0, 3, 4, 8]
    assert corpus[-1].tobytes() == b"efgh" and np.shares_memory(corpus[0], corpus.store)
    with pytest.raises(IndexError):
        corpus[3]
    with pytest.raises(ValueError, match="read-only"):
        corpus[0][0] = 1
    part = corpus.select([2, 0])
    assert contents(part) == [b"efgh", b"abc"] and part.num_bytes == 7
    assert np.shares_memory(part[0], corpus.store)
    assert b"".join(episode.tobytes() for episode in part) == b"efghabc" and part.offsets.tolist() == [0, 4, 7]
    assert contents(part.select([1])) == [b"abc"]
    assert np.shares_memory(corpus.select([1, 2]).store, corpus.store)
    for wrong in ([], [3], [-1], [0.5]):
        with pytest.raises(ValueError, match="indices"):
            corpus.select(wrong)


@given(number=st.integers(2, 300), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 100))
def test_split_by_document(number, fraction, seed):
    corpus = Corpus.from_documents([bytes([1 + i % 255, 1 + i // 255]) for i in range(number)])
    train, validation = corpus.split(fraction, seed)
    assert len(validation) == min(max(round(number * fraction), 1), number - 1)
    assert sorted(contents(train) + contents(validation)) == sorted(contents(corpus))
    again = corpus.split(fraction, seed)
    assert (contents(again[0]), again[1].fingerprint) == (contents(train), validation.fingerprint)
    assert train.fingerprint != validation.fingerprint


def test_split_is_the_same_everywhere_and_depends_on_the_seed():
    corpus = Corpus.from_documents([bytes([1 + i]) for i in range(200)])
    assert [episode[0] - 1 for episode in corpus.split()[1]] == [1, 18, 27, 43, 47, 58, 75, 136, 145, 170]
    assert contents(corpus.split(seed=1)[1]) != contents(corpus.split(seed=0)[1])
    for fraction in (0, 1, -0.1, 2):
        with pytest.raises(ValueError, match="validation_fraction"):
            corpus.split(fraction)


def test_one_big_book_is_cut():
    train, validation = Corpus.from_documents([b"0123456789"]).split(0.2)
    assert (contents(train), contents(validation)) == ([b"01234567"], [b"89"])
    with pytest.raises(ValueError, match="one byte"):
        Corpus.from_documents([b"x"]).split()


def test_fingerprints_tell_contents_apart():
    corpora = [
        Corpus.from_documents(["ab", "c"]),
        Corpus.from_documents(["a", "bc"]),
        Corpus.from_documents(["abc"]),
        Corpus.from_documents(["ab", "d"]),
        Corpus.from_documents(["ab", "c"], binary=True),
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 5
    assert corpora[0].fingerprint == Corpus.from_documents(["ab", "c"], name="other").fingerprint


def test_arrays_that_are_no_corpus():
    tokens = np.frombuffer(b"abcd", dtype=np.uint8)
    for offsets in ([0], [0, 2], [1, 4], [0, 2, 2, 4], [0, 3, 2, 4], [0.0, 4.0]):
        with pytest.raises(ValueError, match="offsets"):
            Corpus(tokens, np.array(offsets))
    with pytest.raises(ValueError, match="tokens"):
        Corpus(tokens.astype(np.int64), np.array([0, 4]))


def test_a_mapped_corpus_is_sent_to_workers_by_name(load):
    corpus = load("python")
    part = corpus.select([5, 3])
    sent = pickle.dumps(part)
    assert len(sent) < 5000
    assert contents(pickle.loads(sent)) == contents(part)


# Memory


def anonymous_memory():
    """Bytes of resident memory that no file backs."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_streaming_a_large_mapped_file_needs_no_memory(tmp_path):
    size = 1 << 30
    with open(tmp_path / "tokens.bin", "wb") as file:
        file.truncate(size)
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint8, mode="r")
    corpus = Corpus(tokens, np.arange(0, size + 1, size // 1024), end_token_id=None, fingerprint="large")
    before, total = anonymous_memory(), 0
    train, _ = corpus.split()
    for batch in itertools.islice(MultiStreamDataset(train, 16, 4096), 2000):
        total += batch["input_ids"].numel()
    assert total > 1e8 and anonymous_memory() - before < 30e6


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_packing_a_large_file_needs_no_memory(load, tmp_path):
    line = json.dumps({"text": "x" * 5000}).encode() + b"\n"
    with gzip.open(tmp_path / "large.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write(line * 1000)
    load(tmp_path / "large.jsonl.gz", max_bytes=5_000_000)
    before = anonymous_memory()
    assert load(tmp_path / "large.jsonl.gz").num_bytes == 100_000_000
    assert anonymous_memory() - before < 30e6
