"""`load_corpus` of datasets that are already loaded: columns, splits, formats, names, and what is packed once."""

import os
import time

import pytest

from hf_recurrent import load_corpus, load_splits

datasets = pytest.importorskip("datasets")
STORIES = ["Once upon a time.", "", "The cat sät and so on.\n", "Ende"]
WANTED = [story.encode() for story in STORIES if story]


@pytest.fixture
def load(tmp_path):
    return lambda source, **options: load_corpus(source, cache_dir=tmp_path / "cache", **options)


@pytest.fixture
def dataset():
    return datasets.Dataset.from_dict(
        {"text": STORIES, "raw": [b"\xff\x01", b"a", None, b"\x00b"], "id": [1, 2, 3, 4]}
    )


def contents(corpus):
    return [episode.tobytes() for episode in corpus]


def packed(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())


def test_a_dataset_is_packed_once(load, dataset, tmp_path):
    corpus = load(dataset)
    assert contents(corpus) == WANTED and corpus.name == f"dataset {dataset._fingerprint}"
    assert contents(load(dataset)) == WANTED and len(packed(tmp_path)) == 1
    assert contents(load(dataset.select([0]))) == WANTED[:1] and len(packed(tmp_path)) == 2
    changed = dataset.map(lambda row: {"text": row["text"].upper()})
    assert contents(load(changed))[-1] == b"ENDE"


def test_the_name_of_a_loaded_dataset(load, dataset):
    dataset.info.dataset_name = "tiny_stories"
    assert load(dataset).name == "tiny_stories"
    assert load([dataset, dataset.select([0])]).name == "tiny_stories, tiny_stories"


def test_columns_of_text_and_of_bytes(load, dataset):
    assert contents(load(dataset, text_column="raw", binary=True)) == [b"\xff\x01", b"a", b"\x00b"]
    with pytest.raises(ValueError, match=r"row 3 holds token id 0"):
        load(dataset, text_column="raw")
    with pytest.raises(ValueError, match=r"`text_column` is 'story'; .*'text', 'raw', 'id'"):
        load(dataset, text_column="story")
    with pytest.raises(ValueError, match="column 'id' holds int"):
        load(dataset, text_column="id")


def test_formats_do_not_matter_and_transforms_do(load, dataset):
    assert contents(load(dataset.with_format("numpy"))) == WANTED
    bracketed = dataset.with_transform(lambda rows: {"text": [f"<{text}>" for text in rows["text"]]})
    assert contents(load(bracketed))[-1] == b"<Ende>"


def test_splits(load, dataset):
    splits = datasets.DatasetDict(train=dataset, test=dataset.select([3]))
    assert contents(load(splits)) == WANTED and contents(load(splits, split="test")) == [b"Ende"]
    streams = datasets.IterableDatasetDict({"test": dataset.to_iterable_dataset()})
    assert contents(load(streams, split="test")) == WANTED
    for source, present in ((splits, "'train', 'test'"), (streams, "'test'")):
        with pytest.raises(ValueError, match=rf"`split` is 'dev'; .* must be one of {present}"):
            load(source, split="dev")


def test_training_and_validation(dataset, tmp_path):
    train, validation = load_splits(dataset, validation_fraction=0.5, cache_dir=tmp_path)
    assert sorted(contents(train) + contents(validation)) == sorted(WANTED)


def test_streams_are_read_anew_and_stored_by_content(load, dataset, tmp_path):
    rows = ["a", "b"]
    stream = datasets.IterableDataset.from_generator(lambda: ({"text": row} for row in rows))
    first = load(stream)
    assert contents(first) == [b"a", b"b"] and first.name == "generator"
    assert load(stream).fingerprint == first.fingerprint and len(packed(tmp_path)) == 1
    assert load(datasets.Dataset.from_dict({"text": rows}).to_iterable_dataset()).name == "streamed dataset"
    rows.append("c")
    assert contents(load(stream)) == [b"a", b"b", b"c"] and len(packed(tmp_path)) == 2
    assert contents(load([stream, dataset])) == [b"a", b"b", b"c", *WANTED]
    assert not list((tmp_path / "cache").glob("*incomplete"))


def test_old_leftovers_of_streams_are_removed(load, tmp_path):
    for age, name in ((0, "new"), (10**6, "old")):
        leftover = tmp_path / "cache" / f"content.{name}.incomplete"
        leftover.mkdir(parents=True)
        os.utime(leftover, (time.time() - age,) * 2)
    load(datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}])))
    assert [path.name for path in (tmp_path / "cache").glob("*.incomplete")] == ["content.new.incomplete"]


def test_an_endless_stream_needs_a_size(load):
    def endless():
        while True:
            yield {"text": "abcd"}

    corpus = load(datasets.IterableDataset.from_generator(endless), max_bytes=10)
    assert contents(corpus) == [b"abcd", b"abcd"]


def test_a_stream_without_known_columns(load):
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"body": "x"}]))
    assert contents(load(stream, text_column="body")) == [b"x"]
    with pytest.raises(ValueError, match=r"`text_column` is 'text'; .*'body'"):
        load(stream)


def test_other_types_are_one_sentence(load):
    with pytest.raises(ValueError, match="`source` is of type int; it must be"):
        load(5)
