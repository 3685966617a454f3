"""Documents that are streamed by `datasets` and not packed: what the streams read, and that runs resume exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import tiny_corpora, tiny_trainer
from torch.utils.data import DataLoader

from hf_recurrent import Corpus, Mixture, MultiStreamDataset, StreamedDocuments, stream_documents
from hf_recurrent.cli.data_arguments import DataArguments, load_evaluation_source, load_training_sources

datasets = pytest.importorskip("datasets")
# Interleaved Parquet waits this many seconds each time that reading ends.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
KEYS = ("input_ids", "shift_labels", "reset_mask", "stream_positions")


def text(source, shard, row):
    return f"{source}{shard}.{row} " * (1 + (7 * row + shard) % 23)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five Parquet and three JSONL shards of 40 and more documents, with an empty one."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(5):
        rows = [text("a", shard, row) for row in range(40 + 9 * shard)] + [""]
        datasets.Dataset.from_dict({"text": rows, "n": list(range(len(rows)))}).to_parquet(
            folder / f"a{shard}.parquet"
        )
    for shard in range(3):
        lines = [json.dumps({"text": text("b", shard, row)}) for row in range(70 - 9 * shard)]
        (folder / f"b{shard}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def streamed(folder, names="a*.parquet", **options):
    return stream_documents(folder / names, **options)


def interleaved(folder, probabilities=(0.7, 0.3)):
    parts = [streamed(folder).dataset, streamed(folder, "b*.jsonl").dataset]
    return datasets.interleave_datasets(
        parts, probabilities=list(probabilities), seed=3, stopping_strategy="all_exhausted"
    )


PIPELINES = {
    "parquet": lambda folder: streamed(folder),
    "jsonl": lambda folder: streamed(folder, "b*.jsonl"),
    "interleaved": lambda folder: StreamedDocuments(interleaved(folder), name="both"),
    "shuffled": lambda folder: StreamedDocuments(streamed(folder).dataset.shuffle(seed=1, buffer_size=30), name="s"),
    "mapped": lambda folder: StreamedDocuments(
        streamed(folder).dataset.map(lambda row: {"text": (row["text"] or "")[::-1]}), name="m"
    ),
    "held out": lambda folder: streamed(folder).split(0.3)[1],
    "mixture": lambda folder: Mixture([streamed(folder), streamed(folder, "b*.jsonl")], [0.6, 0.4]),
    "mixture with a corpus": lambda folder: Mixture([tiny_corpora()[0], streamed(folder, "b*.jsonl")], [0.6, 0.4]),
}


def blocks_of(source, count, start=0, **options):
    return list(islice(source.blocks(5, 24, **options), start, start + count))


def same(first, second):
    return all(torch.equal(a[key], b[key]) for a, b in zip(first, second, strict=True) for key in KEYS)


def test_streams_read_their_shards_in_order(folder):
    blocks = blocks_of(streamed(folder), 400)
    inputs = torch.cat([block["input_ids"] for block in blocks], 1)
    targets = torch.cat([block["shift_labels"] for block in blocks], 1)
    resets = torch.cat([block["reset_mask"] for block in blocks], 1)
    for shard in range(5):
        documents = [text("a", shard, row).encode() for row in range(40 + 9 * shard)]
        expected = b"".join(documents * 5)[: inputs.shape[1]]
        assert inputs[shard].numpy().astype(np.uint8).tobytes() == expected
        starts = np.cumsum([0] + [len(document) for document in documents * 5])
        assert resets[shard].nonzero()[:, 0].tolist() == starts[starts < len(expected)].tolist()
        ends = torch.tensor(starts[(starts > 0) & (starts <= len(expected))] - 1)
        following = inputs[shard].roll(-1)
        following[ends] = 0
        assert torch.equal(targets[shard, :-1], following[:-1])


def test_the_keys_are_those_of_packed_blocks(folder):
    packed = next(iter(MultiStreamDataset(tiny_corpora()[0], 5, 24)))
    block = blocks_of(streamed(folder), 1)[0]
    assert set(block) - set(packed) == {"stream_bookmarks"}
    assert all((block[key].dtype, block[key].shape) == (packed[key].dtype, packed[key].shape) for key in packed)


def test_streams_of_one_shard_take_turns(folder):
    source = streamed(folder, "b0.jsonl")
    seen = [set() for _ in range(3)]
    for block in islice(source.blocks(3, 50), 500):
        for stream, (number, _) in enumerate(block["stream_positions"].tolist()):
            seen[stream].add(number)
    reader = source.blocks(3, 400).group_reader(0)
    assert [bytes(each.tokens).decode() for each in reader._readers] == [text("b", 0, row) for row in range(3)]
    assert all(len(numbers) > 60 for numbers in seen)  # a stream has 23 or 24 of the 70 documents per pass


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_blocks_continue_from_any_position(folder, pipeline):
    source = PIPELINES[pipeline](folder)
    whole = blocks_of(source, 300)
    for cut in (0, 1, 57, 180, 296):
        start = {"positions": whole[cut]["stream_positions"].numpy()}
        # From the bookmarks, and, as for positions that something else has stored, without them.
        assert same(
            blocks_of(source, 3, bookmarks=whole[cut]["stream_bookmarks"].numpy(), **start), whole[cut + 1 :][:3]
        )
        if cut < 100:
            assert same(blocks_of(source, 3, **start), whole[cut + 1 :][:3])


def test_bookmarks_spare_reading(folder, monkeypatch):
    source = streamed(folder)
    block = blocks_of(source, 1, 250)[0]
    start = {"positions": block["stream_positions"].numpy(), "bookmarks": block["stream_bookmarks"].numpy()}
    rows = []
    original = StreamedDocuments.rows
    monkeypatch.setattr(StreamedDocuments, "rows", lambda *args: rows.append(1) or original(*args))
    blocks_of(source, 1, **start)
    with_bookmarks = len(rows)
    blocks_of(source, 1, positions=start["positions"])
    assert with_bookmarks <= 10 < len(rows) - with_bookmarks


@pytest.mark.long
@pytest.mark.parametrize("pipeline", ["parquet", "interleaved"])
def test_groups_change_nothing_and_workers_are_refused(folder, pipeline):
    source = PIPELINES[pipeline](folder)
    whole = blocks_of(source, 12)
    blocks = source.blocks(5, 24, stream_indices=[4, 0, 2, 1], accumulation_groups=2)
    for count, batch in enumerate(islice(DataLoader(blocks, batch_size=None), 12)):
        rows = [[4, 0], [2, 1]][count % 2]
        assert batch["stream_indices"].tolist() == rows
        assert all(torch.equal(batch[key], whole[count // 2][key][rows]) for key in KEYS)
    with pytest.raises(ValueError, match="`num_workers` must be 0"):
        next(iter(DataLoader(blocks, batch_size=None, num_workers=1)))


@pytest.mark.long
def test_held_out_documents_are_in_one_part_only(folder):
    train, held_out = streamed(folder).split(0.2, seed=5)
    parts = [{value for _, value in part._texts()} for part in (train, held_out)]
    assert not parts[0] & parts[1] and len(parts[0] | parts[1]) == 290
    assert 20 < len(parts[1]) < 100
    assert len({streamed(folder).fingerprint, train.fingerprint, held_out.fingerprint}) == 3


@pytest.mark.long
def test_evaluation_reads_the_first_documents(folder):
    corpus = streamed(folder).limit(100)
    assert isinstance(corpus, Corpus) and corpus[0].tobytes() == text("a", 0, 0).encode() and corpus.num_bytes <= 100
    assert streamed(folder).limit(3).num_bytes == 3


def test_missing_texts_are_no_documents(tmp_path):
    # Not interleaved or shuffled: there, datasets 4.0 fails on missing values.
    datasets.Dataset.from_dict({"text": ["a", None, "", "b"]}).to_parquet(tmp_path / "a.parquet")
    assert [value for _, value in stream_documents(tmp_path / "a.parquet")._texts()] == [b"a", b"b"]


def test_flags(folder):
    names = [str(folder / "a*.parquet"), str(folder / "b*.jsonl")]
    arguments = DataArguments(corpus=names, corpus_probabilities=[0.7, 0.3], packing=False, max_eval_bytes=500)
    train, held_out = load_training_sources(arguments, None)
    assert all(isinstance(part, StreamedDocuments) for part in train.sources)
    assert all(isinstance(part, Corpus) and part.num_bytes <= 500 for part in held_out.sources)
    again = load_evaluation_source(arguments, None, "validation")
    assert again.fingerprint == held_out.fingerprint
    with pytest.raises(ValueError, match="`--max_corpus_bytes` has no effect with `--packing false`"):
        DataArguments(packing=False, max_corpus_bytes=100)


def test_sources_that_cannot_be_streamed(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ValueError, match=r"notes.txt cannot be streamed without packing; a source must be JSONL"):
        stream_documents(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"a4.parquet and b2.jsonl cannot be streamed"):
        stream_documents(folder)
    with pytest.raises(ValueError, match=r"`text_column` is 'story'; it must be a column of .*'text'"):
        streamed(folder, text_column="story")
    with pytest.raises(ValueError, match=r"is a Dataset, .*to_iterable_dataset"):
        stream_documents(datasets.Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(ValueError, match="has no document for stream 1; use fewer streams"):
        blocks_of(stream_documents(datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset()), 9)
    with pytest.raises(ValueError, match="documents that are not packed have only 'multi_stream'"):
        streamed(folder).blocks(2, 8, regime="iid")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match="cannot be read"):
        blocks_of(stream_documents(tmp_path / "bad.jsonl"), 3)
    (tmp_path / "zero.jsonl").write_text('{"text": "a\\u0000b"}\n' * 9)
    with pytest.raises(ValueError, match="row 0 holds token id 0"):
        blocks_of(stream_documents(tmp_path / "zero.jsonl"), 3)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.trained_model.state_dict().items()}


@pytest.mark.parametrize("pipeline", ["interleaved", "mixture with a corpus", "shuffled"])
def test_a_resumed_run_is_the_uninterrupted_one(folder, tmp_path, pipeline):
    corpora = PIPELINES[pipeline](folder), streamed(folder).split(0.1)[1]
    options = {"max_steps": 8, "report_to": "none"}
    whole = tiny_trainer(tmp_path / "run", corpora=corpora, **options)
    whole.train()
    with pytest.raises(ValueError, match="they must be the same"):
        other = streamed(folder, "b*.jsonl"), corpora[1]
        tiny_trainer(tmp_path / "run", corpora=other).train(str(tmp_path / "run/checkpoint-5"))
    cut = tiny_trainer(tmp_path / "run", corpora=(PIPELINES[pipeline](folder), corpora[1]), **options)
    cut.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-5"))
    assert all(torch.equal(value, weights(cut)[name]) for name, value in weights(whole).items())
    assert whole.evaluate()["eval_bits_per_byte"] == cut.evaluate()["eval_bits_per_byte"]


PROGRAM = """
import sys
from pathlib import Path
import test_streamed_documents as tests
from hf_recurrent.checkpoints.tensor_files import write_tensors
from tiny_run import Slow, tiny_trainer
folder, run, pipeline, action = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
source = tests.PIPELINES[pipeline](folder)
options = {"save_steps": 3, "max_steps": 20, "callbacks": [Slow()] if action == "slow" else None}
trainer = tiny_trainer(run, corpora=(source, source), **options)
trainer.train(resume_from_checkpoint=action == "resume")
write_tensors(trainer.trained_model.state_dict(), Path(run, "final.safetensors"))
"""


@pytest.mark.long
@pytest.mark.parametrize("pipeline", ["interleaved", "mixture", "jsonl"])
def test_a_killed_run_resumes_to_the_same_bits(folder, tmp_path, pipeline):
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "trainers"), str(Path(__file__).parents[2])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def start(run, action):
        command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / run), pipeline, action]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(run, action):
        _, errors = (process := start(run, action)).communicate()
        assert process.returncode == 0, errors[-3000:]
        return (tmp_path / run / "final.safetensors").read_bytes()

    whole = finish("whole", "once")
    killed = start("killed", "slow")
    deadline = time.monotonic() + 600
    while not (tmp_path / "killed/checkpoint-6").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "killed/final.safetensors").exists()
    assert finish("killed", "resume") == whole
