"""Models with a count memory are served as `generate()` runs them: it does not learn from the model's own bytes."""

import shutil
import time

import pytest
import torch
from counted_model import counted_model, word_corpus
from model_cases import tiny_model
from running_server import running_server
from test_scheduler import finish, finish_only, generate_alone, job_of, make_scheduler, read_singly

from hf_recurrent.generation.sampling import Sampling
from hf_recurrent.modeling.contexts.count_memory import STATE_PART
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.sampling import TokenSource
from hf_recurrent.server.serving import serving_scheduler
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.session_database import SessionDatabase
from hf_recurrent.server.session_store import SessionStore

TEXT = b"def self.x = return (1)\n    def x = self."


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return counted_model(word_corpus())


@torch.no_grad()
def after(model, read: bytes, generated: bytes):
    """The state after bytes that were read and bytes that were generated, but the last one."""
    state = model.init_state(1)
    for place, byte in enumerate(read + generated[:-1]):
        options = {"sampled": True} if place >= len(read) else {}
        state = model(torch.tensor([[byte]]), state=state, use_cache=True, **options).state
    return state


def are_equal(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], part) for name, part in second.items())


def test_generated_bytes_are_those_of_generate(model, monkeypatch):
    """Also where texts begin while others generate, and take turns."""
    monkeypatch.setattr("hf_recurrent.server.scheduler._TURN_SECONDS", 0.0)
    monkeypatch.setattr("hf_recurrent.server.scheduler._COMMIT_SECONDS", 0.0)
    scheduler = make_scheduler(model, max_rows=3, end_tokens=frozenset())
    texts = [TEXT[: 1 + 9 * number] for number in range(5)]
    jobs = [
        job_of(text, max_new_tokens=60, source=TokenSource(Sampling(0.8), number)) for number, text in enumerate(texts)
    ]
    finish(scheduler, *jobs)
    scheduler.close()
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    for number, (text, job) in enumerate(zip(texts, jobs, strict=True)):
        state, pending = read_singly(model, text)
        alone = generate_alone(model, bytes([pending]), 60, Sampling(0.8), number, state)
        assert [token for token in job.output if token] == alone
        state = after(model, text, bytes(job.output))
        assert are_equal(job.snapshot.state, state)
        learned, _ = read_singly(model, text + bytes(job.output))
        assert not torch.equal(learned[STATE_PART], state[STATE_PART])


def test_sessions_are_kept_on_disk_and_moved(model, tmp_path):
    with running_server(model, session_dir=tmp_path) as server:
        session = server.new_session()
        server.read(session, TEXT.decode())
        fork = server.post(f"/v1/sessions/{session}/fork")["id"]
        data = server.request("GET", f"/v1/sessions/{session}/state").body
        expected = server.generate(session, max_tokens=20, seed=1)
    with running_server(model, session_dir=tmp_path) as server:
        assert server.generate(fork, max_tokens=20, seed=1) == expected
        moved = server.post("/v1/sessions/from_state", data)["id"]
        assert server.generate(moved, max_tokens=20, seed=1)["base64"] == expected["base64"]


@pytest.mark.parametrize("kind", ["counted", "plain"])
@pytest.mark.parametrize("size", [20, 400])  # 400: the record is written anew in the middle of the generation
def test_a_generation_that_was_killed_is_read_again(model, tmp_path, kind, size):
    model = model if kind == "counted" else tiny_model("memora")
    with serving_scheduler(model, None, session_dir=tmp_path / "alive") as scheduler:
        scheduler.end_tokens = frozenset()
        session = scheduler.call(scheduler.store.add, Session(Snapshot(scheduler.store.zero))).result()
        job = job_of(b"", max_new_tokens=10**6, session_id=session.id, source=TokenSource(Sampling(), 3))
        scheduler.submit(job).result()
        while job.released < size:
            time.sleep(0.001)

        def copy() -> int:  # between two ticks, so that nothing is released after it
            shutil.copytree(tmp_path / "alive", tmp_path / "killed")
            return job.released

        acknowledged = scheduler.call(copy).result()
        job.cancel()
        finish_only(job)
    with serving_scheduler(model, None, session_dir=tmp_path / "killed") as scheduler:
        snapshot = scheduler.call(scheduler.store.get, session.id).result().snapshot
    assert acknowledged <= snapshot.bytes_read <= len(job.output)
    generated = bytes(job.output[: snapshot.bytes_read])
    expected = after(model, b"\0", generated) if kind == "counted" else read_singly(model, b"\0" + generated)[0]
    assert snapshot.pending == generated[-1] and are_equal(snapshot.state, expected)


def test_a_record_of_the_middle_of_a_generation_says_so(model, tmp_path):
    zero = model.init_state(1)
    for tokens, sampled in (([], None), ([66, 67], True)):
        database = SessionDatabase(tmp_path, zero)
        session = Session(Snapshot(zero, 65, 1, is_generating=True))
        store = SessionStore(zero, database, ModelSteps(model).continue_from)
        store.add(session)
        database.append([(session.id, tokens)])
        store.close()
        store = SessionStore(zero, SessionDatabase(tmp_path, zero), ModelSteps(model).continue_from)
        snapshot = store.get(session.id).snapshot
        expected = after(model, b"", bytes([65, *tokens])) if sampled else zero
        assert not snapshot.is_generating and are_equal(snapshot.state, expected)
        assert SessionDatabase(tmp_path, zero).read(session.id)[1] == []
        assert not SessionDatabase(tmp_path, zero).read(session.id)[0].snapshot.is_generating
        store.close()
