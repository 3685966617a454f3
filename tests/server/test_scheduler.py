"""A session's bytes equal `generate()` alone, whatever else runs."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from model_cases import tiny_model

from hf_recurrent.generation.sampling import Sampling
from hf_recurrent.server.batch import Batch
from hf_recurrent.server.job import Job, Request
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.sampling import TokenSource, choose_tokens
from hf_recurrent.server.scheduler import Scheduler, TimeIsUp
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.session_database import SessionDatabase
from hf_recurrent.server.session_store import (
    NothingToContinue,
    SessionBusy,
    SessionStore,
    Stopped,
    TooMany,
    UnknownSession,
)

SAMPLINGS = [Sampling(), Sampling(0.0), Sampling(0.7, 0, 0.9), Sampling(1.3, 20, 1.0), Sampling(0.9, 5, 0.5)]
MODELS = ["memora", pytest.param("hawk", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def generate_alone(model, text: bytes, new: int, sampling: Sampling, seed: int, state=None) -> list[int]:
    """The new tokens of `generate()`, without the end token."""
    torch.manual_seed(seed)
    options = {"do_sample": False}
    if not sampling.is_greedy:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    options |= {} if state is None else {"state": state}
    ids = torch.tensor([list(text)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)
    return [token for token in output[0, len(text) :].tolist() if token != 0]


def job_of(text: bytes, **arguments) -> Job:
    return Job(Request(np.frombuffer(text, np.uint8), **arguments))


def finish(scheduler: Scheduler, *jobs: Job) -> None:
    for future in [scheduler.submit(job) for job in jobs]:
        future.result()
    while not all(job.is_done for job in jobs):
        time.sleep(0.001)
    for job in jobs:
        if job.error:
            raise job.error


def make_scheduler(model, store=None, **options) -> Scheduler:
    options = {"begin_token": 0, "end_tokens": frozenset([0])} | options
    return Scheduler(ModelSteps(model), SessionStore(model.init_state(1)) if store is None else store, **options)


def test_rows_of_a_batch_are_sampled_as_alone():
    logits = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) * 3
    samplings = [SAMPLINGS[row % len(SAMPLINGS)] for row in range(40)]
    sources = [TokenSource(sampling, row) for row, sampling in enumerate(samplings)]
    together = [choose_tokens(logits, sources) for _ in range(3)]
    for row, sampling in enumerate(samplings):
        alone = TokenSource(sampling, row)
        assert [choose_tokens(logits[row : row + 1], [alone])[0] for _ in range(3)] == [step[row] for step in together]


def test_probabilities_that_are_nan_choose_nothing():
    logits = torch.zeros(3, 256)
    logits[1, 7] = float("nan")
    for sampling in (Sampling(), Sampling(0.0)):
        chosen = choose_tokens(logits, [TokenSource(sampling, 0)] * 3)
        assert [token is None for token in chosen] == [False, True, False]


@pytest.mark.parametrize("family", MODELS)
def test_random_schedules_give_the_bytes_of_each_session_alone(family, tmp_path):
    """60 sessions are read, generate, fork and rewind in random order, a few at a time, on a server that restarts."""
    model, chance = tiny_model(family), random.Random(f"schedule of {family}")
    zero = model.init_state(1)

    def new_store():
        # So few in memory that most come back from disk.
        return SessionStore(zero, SessionDatabase(tmp_path, zero), ModelSteps(model).continue_from, max_resident=9)

    store = new_store()
    scheduler = make_scheduler(model, store, max_rows=13)
    # Where each session has to be, and its mark.
    places = {}
    marks = {}
    for number in range(60):
        session = scheduler.call(store.add, Session(Snapshot(zero))).result()
        places[session.id] = zero, None
        if number == 30:
            scheduler.close()
            store = new_store()
            scheduler = make_scheduler(model, store, max_rows=13)
        jobs = []
        for session_id in chance.sample(sorted(places), min(len(places), 3)):
            text = chance.randbytes(chance.choice([1, 2, 7, 50])).replace(b"\0", b"x")
            sampling, seed, new = chance.choice(SAMPLINGS), chance.randrange(1000), chance.choice([0, 1, 8])
            source = TokenSource(sampling, seed)
            job = job_of(text, session_id=session_id, max_new_tokens=new, source=source, scores=0)
            jobs.append((session_id, text, sampling, seed, new, job))
        finish(scheduler, *(job for *_, job in jobs))
        for session_id, text, sampling, seed, new, job in jobs:
            assert len(job.scores.log_probabilities) == len(text)
            state, pending = places[session_id] = read_singly(model, text, *places[session_id])
            if new:
                assert job.output == generate_alone(model, bytes([pending]), new, sampling, seed, state)
                has_ended = len(job.output) < new
                places[session_id] = (
                    (zero, None) if has_ended else read_singly(model, bytes(job.output), state, pending)
                )
        of = chance.choice(sorted(places))
        if chance.random() < 0.3:
            fork = scheduler.call(store.fork, of).result()
            places[fork.id] = places[of]
            marks |= {fork.id: marks[of]} if of in marks else {}
        elif of in marks and chance.random() < 0.5:
            scheduler.call(store.rewind, of, "mark").result()
            places[of] = marks[of]
        else:
            scheduler.call(store.set_mark, of, "mark").result()
            marks[of] = places[of]
    for session_id, (state, pending) in places.items():
        snapshot = scheduler.call(store.get, session_id).result().snapshot
        assert snapshot.pending == pending and all(torch.equal(snapshot.state[name], state[name]) for name in state)
    scheduler.close()


@torch.no_grad()
def read_singly(model, text: bytes, state=None, pending: int | None = None):
    """The state after all but the last byte, one byte at a time, and the last byte."""
    state = model.init_state(1) if state is None else state
    for byte in [*([] if pending is None else [pending]), *text[:-1]]:
        state = model(torch.tensor([[byte]]), state=state, use_cache=True).state
    return state, text[-1]


def test_a_prompt_is_read_as_generate_reads_it():
    model = tiny_model("memora")
    scheduler = make_scheduler(model)
    cases = [(b"a" * length + b"bc", SAMPLINGS[length % 5], length) for length in (0, 1, 47, 48, 200)] + [
        (b"", SAMPLINGS[0], 3)
    ]
    jobs = [job_of(text, max_new_tokens=30, source=TokenSource(how, seed)) for text, how, seed in cases]
    finish(scheduler, *jobs)
    for job, (text, how, seed) in zip(jobs, cases, strict=True):
        # An empty text begins with the end byte.
        assert job.output == generate_alone(model, text or b"\0", 30, how, seed)
    scheduler.close()


def test_scores_are_log_probabilities():
    model = tiny_model("memora", torch.float64)
    scheduler = make_scheduler(model)
    text = b"some text to be scored, longer than one slice of the scheduler" * 3
    job = job_of(text, scores=2, max_new_tokens=4, output_scores=0, source=TokenSource(Sampling(), 0))
    finish(scheduler, job)
    whole = text + bytes(job.output)
    with torch.no_grad():
        expected = model(torch.tensor([list(whole)])).logits.log_softmax(-1)[0]
    own = [expected[place, token] for place, token in enumerate(whole[1:])]
    found = [*job.scores.log_probabilities, *job.output_scores.log_probabilities]
    assert np.isnan(found[0]) and np.allclose(found[1:], own, atol=1e-9)
    best = expected[4].topk(2)
    assert list(job.scores.alternatives[5]) == best.indices.tolist() and job.scores.alternatives[0] == {}
    scheduler.close()


def test_stop_sequences_are_held_back_until_they_are_decided():
    model = tiny_model("memora")
    scheduler = make_scheduler(model)
    alone = generate_alone(model, b"q", 40, Sampling(), 5)
    stop = alone[10:13]
    job = job_of(b"q", max_new_tokens=40, source=TokenSource(Sampling(), 5), stops=[bytes(stop), bytes([1, 2, 3])])
    released = []
    job.wake = lambda: released.append((job.released, len(job.output)))
    finish(scheduler, job)
    assert job.finish_reason == "stop" and job.output[: job.released] == alone[:10] and job.output == alone[:13]
    assert max(count for count, _ in released) == 10, "a part of the stop sequence was shown"
    scheduler.close()


def test_a_session_has_one_reader_at_a_time():
    model = tiny_model("memora")
    store = SessionStore(model.init_state(1))
    scheduler = make_scheduler(model, store)
    session = scheduler.call(store.add, Session(Snapshot(store.zero))).result()
    slow = job_of(b"a" * 20000, session_id=session.id)
    scheduler.submit(slow).result()
    for call in (store.fork, store.delete):
        with pytest.raises(SessionBusy):
            scheduler.call(call, session.id).result()
    with pytest.raises(SessionBusy):
        scheduler.submit(job_of(b"b", session_id=session.id)).result()
    with pytest.raises(UnknownSession):
        scheduler.submit(job_of(b"b", session_id="none")).result()
    others = [job_of(b"a" * 20000) for _ in range(3)]
    for job in others:
        scheduler.submit(job).result()
    for job in (others[1], slow):  # not the first of those that are read
        job.cancel()
        with pytest.raises(Stopped):
            finish_only(job)
    # A read that was cut off was not read at all.
    assert scheduler.call(store.get, session.id).result().snapshot.bytes_read == 0
    scheduler.call(store.delete, session.id).result()
    scheduler.close()


def test_a_generation_that_is_cancelled_ends_where_it_is():
    model = tiny_model("memora")
    store = SessionStore(model.init_state(1))
    scheduler = make_scheduler(model, store, end_tokens=frozenset())
    session = scheduler.call(store.add, Session(Snapshot(store.zero))).result()
    job = job_of(b"a", session_id=session.id, max_new_tokens=10**6, source=TokenSource(Sampling(), 0))
    scheduler.submit(job).result()
    while len(job.output) < 5:
        time.sleep(0.001)
    job.cancel()
    while not job.is_done:
        time.sleep(0.001)
    snapshot = scheduler.call(store.get, session.id).result().snapshot
    state, pending = read_singly(model, b"a" + bytes(job.output))
    assert snapshot.bytes_read == 1 + len(job.output) and snapshot.pending == pending
    assert all(torch.equal(snapshot.state[name], state[name]) for name in state)
    scheduler.close()


def test_more_texts_than_rows_take_turns(monkeypatch):
    """Each has the bytes that it has alone, and none waits for the end of another one."""
    monkeypatch.setattr("hf_recurrent.server.scheduler._TURN_SECONDS", 0.0)
    monkeypatch.setattr("hf_recurrent.server.scheduler._COMMIT_SECONDS", 0.0)
    model = tiny_model("memora")
    store = SessionStore(model.init_state(1))
    scheduler = make_scheduler(model, store, max_rows=3, end_tokens=frozenset())
    sessions = [scheduler.call(store.add, Session(Snapshot(store.zero))).result() for _ in range(4)]
    texts = [f"text {number}".encode() for number in range(8)]

    def new_jobs(ids) -> list[Job]:
        return [
            job_of(text, max_new_tokens=60, source=TokenSource(SAMPLINGS[number % 5], number), session_id=session)
            for number, (text, session) in enumerate(zip(texts, ids, strict=True))
        ]

    jobs = new_jobs([*(session.id for session in sessions), *[None] * 4])
    ended_before = {}  # the first byte of each: how many jobs
    for job in jobs:
        job.wake = lambda job=job: job.released and ended_before.setdefault(job, sum(other.is_done for other in jobs))
    finish(scheduler, *jobs)
    assert list(ended_before.values()) == [0] * 8
    side_by_side, expected = make_scheduler(model, end_tokens=frozenset()), new_jobs([None] * 8)
    finish(side_by_side, *expected)
    side_by_side.close()
    assert [job.output for job in jobs] == [job.output for job in expected]
    for session, job, text in zip(sessions, jobs, texts, strict=False):
        state, pending = read_singly(model, text + bytes(job.output))
        assert session.snapshot.pending == pending and session.snapshot.bytes_read == len(text) + 60
        assert all(torch.equal(session.snapshot.state[name], state[name]) for name in state)
    scheduler.close()


def test_a_text_that_waits_for_its_turn_ends_where_it_is():
    model = tiny_model("memora")
    store = SessionStore(model.init_state(1))
    scheduler = make_scheduler(model, store, max_rows=1, end_tokens=frozenset())
    session = scheduler.call(store.add, Session(Snapshot(store.zero))).result()
    jobs = [
        job_of(b"a", max_new_tokens=10**6, source=TokenSource(Sampling(), 0), session_id=each, seconds=5)
        for each in (session.id, None)
    ]
    for job in jobs:
        scheduler.submit(job).result()
    while not jobs[1].output:
        assert not jobs[0].is_done
        time.sleep(0.001)
    jobs[0].cancel()
    finish_only(jobs[0])
    jobs[1].cancel()
    finish_only(jobs[1])
    state, pending = read_singly(model, b"a" + bytes(jobs[0].output))
    assert jobs[0].finish_reason == "length" and jobs[0].released == len(jobs[0].output) > 0
    assert session.snapshot.pending == pending and session.snapshot.bytes_read == 1 + len(jobs[0].output)
    for name, part in session.snapshot.state.items():
        assert torch.equal(part, state[name]) and part.untyped_storage().nbytes() == part.nbytes
    scheduler.close()


def test_limits_of_time_and_number(monkeypatch):
    model = tiny_model("memora")
    monkeypatch.setattr("hf_recurrent.server.scheduler._MOST_WAITING", 10**6 + 2)
    scheduler = make_scheduler(model, max_jobs=3, end_tokens=frozenset())
    endless = [job_of(b"a", max_new_tokens=10**6, seconds=0.2, source=TokenSource(Sampling(), 0)) for _ in range(2)]
    long = job_of(b"a" * 10**6, seconds=0.05)
    held = threading.Event()
    scheduler.call(held.wait)  # all are admitted before a tick, so that none is over before the last one comes
    *accepted, refused = [scheduler.submit(job) for job in (*endless, long, job_of(b"a"))]
    held.set()
    for future in accepted:
        future.result()
    with pytest.raises(TooMany, match="too many requests wait"):
        refused.result()
    with pytest.raises(TimeIsUp):
        finish_only(long)
    for job in endless:
        finish_only(job)
        assert job.finish_reason == "length" and len(job.output)
    with pytest.raises(TooMany):
        scheduler.submit(job_of(b"a" * (10**6 + 3))).result()
    scheduler.close()
    scheduler = make_scheduler(model, begin_token=None)
    with pytest.raises(NothingToContinue):
        scheduler.submit(job_of(b"", max_new_tokens=1, source=TokenSource(Sampling(), 0))).result()
    scheduler.close()


def finish_only(job: Job) -> None:
    while not job.is_done:
        time.sleep(0.001)
    if job.error:
        raise job.error


def test_a_model_that_fails_does_not_end_the_server(monkeypatch):
    model = tiny_model("memora")
    scheduler = make_scheduler(model)
    working, scheduler.steps.step = scheduler.steps.step, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        finish(scheduler, job_of(b"a", max_new_tokens=3, source=TokenSource(Sampling(), 0)))
    scheduler.steps.step = working
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Batch, "add", lambda *_: 1 / 0)
        finish(scheduler, job_of(b"a", max_new_tokens=3, source=TokenSource(Sampling(), 0)))
    job = job_of(b"a", max_new_tokens=3, source=TokenSource(Sampling(), 0))
    finish(scheduler, job)
    assert job.output == generate_alone(model, b"a", 3, Sampling(), 0)
    scheduler.close()
