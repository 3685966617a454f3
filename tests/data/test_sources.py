"""Sources of a user: functions that give documents, and episode sources, as `NAME:TEXT`."""

import importlib
from pathlib import Path

import pytest
from own_parts_state import restored_parts

from hf_recurrent import ByteTokenizer, Corpus, EpisodeSource, load_corpus, load_splits, register_source
from hf_recurrent.cli.data_arguments import (
    DataArguments,
    load_evaluation_source,
    load_training_sources,
    token_vocabulary,
)


class Counter(EpisodeSource):
    name, fingerprint, vocab_size, tokens_per_epoch = "counter", "counter", 10, 100

    def __init__(self, text):
        self.start = int(text)

    def blocks(self, *arguments, **options): ...

    def evaluate(self, model, share): ...

    def evaluation_metrics(self, sums): ...


@pytest.fixture(autouse=True)
def restored(tmp_path):
    with restored_parts(tmp_path):
        yield


@pytest.fixture
def lines(tmp_path):
    Path(tmp_path, "poem.txt").write_text("é\nbc\n\ndef\n", encoding="utf-8")

    @register_source("lines")
    def read(place):
        for line in Path(place).read_text(encoding="utf-8").splitlines():
            yield line if len(line) < 3 else line.encode()

    return f"lines:{tmp_path / 'poem.txt'}"


def texts(corpus):
    return [bytes(episode) for episode in corpus]


def test_documents_of_a_function(lines, tmp_path):
    corpus = load_corpus(lines, cache_dir=tmp_path / "cache")
    assert texts(corpus) == ["é".encode(), b"bc", b"def"] and corpus.name == lines
    other = tmp_path / "other.txt"
    other.write_text("x")
    assert texts(load_corpus([lines, str(other)], cache_dir=tmp_path / "cache"))[-1] == b"x"
    train, held_out = load_splits(lines, validation_fraction=0.4, cache_dir=tmp_path / "cache")
    assert len(train) + len(held_out) == 3


def test_changed_documents_are_packed_again(lines, tmp_path):
    before = load_corpus(lines, cache_dir=tmp_path / "cache")
    again = load_corpus(lines, cache_dir=tmp_path / "cache")
    (tmp_path / "poem.txt").write_text("new")
    after = load_corpus(lines, cache_dir=tmp_path / "cache")
    assert before.fingerprint == again.fingerprint != after.fingerprint and texts(after) == [b"new"]


def test_on_the_command_line(lines, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    assert token_vocabulary([lines]) is None
    train, held_out = load_training_sources(DataArguments(corpus=[lines], validation_fraction=0.4), ByteTokenizer())
    assert isinstance(train, Corpus) and len(train) + len(held_out) == 3


def test_an_episode_source_on_the_command_line():
    register_source("counter")(Counter)
    arguments = DataArguments(corpus=["counter:7"])
    assert token_vocabulary(arguments.corpus) == 10
    train, held_out = load_training_sources(arguments, ByteTokenizer())
    assert isinstance(train, Counter) and train.start == held_out.start == 7
    assert isinstance(load_evaluation_source(arguments, None, "validation"), Counter)
    for corpus in (["counter:7", "python"], ["counter:7", "counter:8"]):
        with pytest.raises(ValueError, match="`source` is 'counter:7', an `EpisodeSource`, which cannot be combined"):
            load_training_sources(DataArguments(corpus=corpus), ByteTokenizer())


@pytest.mark.parametrize(
    ("give", "reason"),
    [
        (lambda text: [3], "TypeError: document 0 is of type int; it must be str or bytes"),
        (lambda text: 3, "TypeError: 'int' object is not iterable"),
        (lambda text: {}[text], "KeyError: 'x'"),
    ],
)
def test_a_function_that_fails_is_named(give, reason, tmp_path):
    give.__name__ = "give"
    register_source("given")(give)
    with pytest.raises(ValueError, match=rf"`source` is 'given:x'; `give` failed: {reason}\."):
        load_corpus("given:x", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["python", "task", "hub", "mnist", "images"])
def test_names_of_this_package_are_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' is a source of this package"):
        register_source(name)(lambda text: [])


def test_names_and_parts_that_are_refused(lines):
    for name in ("c", "a b", "", "a:b", 3):
        with pytest.raises(ValueError, match="it must be an identifier of at least two characters"):
            register_source(name)(lambda text: [])
    for part in (3, str, dict):
        with pytest.raises(ValueError, match="a function that gives documents, or a subclass of `EpisodeSource`"):
            register_source("part")(part)
    with pytest.raises(ValueError, match="The source 'lines' is registered already, with other code"):
        register_source("lines")(importlib.import_module("json").dumps)


def test_an_unknown_source_suggests_the_nearest_and_the_flag(lines):
    with pytest.raises(
        FileNotFoundError, match=r"did you mean 'lines'\? Import the file that registers a source .*--import FILE"
    ):
        load_corpus("lins:poem.txt")
    with pytest.raises(FileNotFoundError, match=r"'mnist:FOLDER' or 'images:FOLDER'\.$"):
        load_corpus("C:absent")
