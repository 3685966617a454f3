"""Several processes and one packed corpus: one packs, the others wait, and a killed one leaves nothing in the way."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from hf_recurrent.data import packing, sources
from hf_recurrent.data.loading import load_corpus

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
TEXT = b"It was a dark night. " * 1000


@pytest.fixture
def gate(monkeypatch, tmp_path):
    """Reading waits for this file after the first document; `log` has one character for each time that it began."""
    gate = tmp_path / "gate"

    def documents(path, text_column):
        yield "document 0", [TEXT]
        with open(tmp_path / "log", "a") as file:
            file.write("r")
        wait_for(gate.exists)
        yield "document 1", [TEXT]

    monkeypatch.setattr(sources, "reader_of", lambda path, binary: documents)
    (tmp_path / "text.txt").write_bytes(TEXT)
    return gate


def started(tmp_path):
    def work():
        load_corpus(tmp_path / "text.txt", cache_dir=tmp_path / "cache")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_three_processes_share_one_cache(gate, tmp_path):
    processes = [started(tmp_path) for _ in range(3)]
    wait_for((tmp_path / "log").exists)
    gate.touch()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert load_corpus(tmp_path / "text.txt", cache_dir=tmp_path / "cache").num_bytes == 2 * len(TEXT)
    assert (tmp_path / "log").read_text() == "r"


def test_a_killed_process_leaves_neither_a_lock_nor_files(gate, tmp_path):
    process = started(tmp_path)
    wait_for((tmp_path / "log").exists)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(list((tmp_path / "cache").glob("*.incomplete"))) == 1
    gate.touch()
    corpus = load_corpus(tmp_path / "text.txt", cache_dir=tmp_path / "cache")
    assert corpus.num_bytes == 2 * len(TEXT) and (tmp_path / "log").read_text() == "rr"
    assert not list((tmp_path / "cache").glob("*.incomplete*"))


def test_files_of_a_process_that_still_packs_stay(gate, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(packing, "_SILENT_SECONDS", 0.05)
    process = started(tmp_path)
    wait_for((tmp_path / "log").exists)
    threading.Timer(0.5, gate.touch).start()
    load_corpus(tmp_path / "text.txt", cache_dir=tmp_path / "cache")
    process.join(60)
    assert process.exitcode == 0 and "Another process packs the corpus" in caplog.text
