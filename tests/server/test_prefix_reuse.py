"""A text that begins like an earlier one has the bytes of a cold run, and nothing of it is read twice."""

import random
import time

import numpy as np
import pytest
import torch
from counted_model import counted_model, word_corpus
from model_cases import tiny_model
from test_counted_sessions import are_equal
from test_scheduler import SAMPLINGS, finish, finish_only, job_of, make_scheduler, read_singly

from hf_recurrent.generation.sampling import Sampling
from hf_recurrent.server.job import Job, Request
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.prefix_database import PrefixDatabase
from hf_recurrent.server.prefix_reuse import PrefixReuse
from hf_recurrent.server.prefix_store import PrefixStore
from hf_recurrent.server.sampling import TokenSource
from hf_recurrent.server.scheduler import Scheduler
from hf_recurrent.server.serving import serving_scheduler
from hf_recurrent.server.text_hashes import TextHashes

GREEDY = Sampling(0.0)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=["memora", "counted", pytest.param("hawk", marks=pytest.mark.slow)])
def model(request):
    return counted_model(word_corpus()) if request.param == "counted" else tiny_model(request.param)


def reusing(model, max_bytes: int = 1 << 26, directory=None, **options) -> Scheduler:
    steps = ModelSteps(model)
    database = None if directory is None else PrefixDatabase(directory, steps.computation())
    store = PrefixStore(model.init_state(1), max_bytes, database)
    return make_scheduler(model, reuse=PrefixReuse(store, steps), **options)


def asking(text: bytes, new: int = 20, sampling: Sampling = GREEDY, seed: int = 0, ends=(), **options) -> Job:
    """A job that may start from stored states."""
    tokens = np.frombuffer(text, np.uint8)
    source = TokenSource(sampling, seed)
    hashes = TextHashes(tokens, ends=ends)
    return Job(Request(tokens, max_new_tokens=new, source=source, text=hashes, **options))


def stored(scheduler: Scheduler, text: bytes) -> tuple[int, dict] | None:
    """The longest stored beginning."""
    return scheduler.call(scheduler.reuse.store.find, TextHashes(np.frombuffer(text, np.uint8)), len(text)).result()


def random_bytes(chance: random.Random, count: int) -> bytes:
    return bytes(chance.choice(b"def self.x=()\n return") for _ in range(count))


def same(first: Job, second: Job) -> bool:
    return (
        first.output == second.output
        and first.finish_reason == second.finish_reason
        and first.snapshot.pending == second.snapshot.pending
        and first.snapshot.bytes_read == second.snapshot.bytes_read
        and are_equal(first.snapshot.state, second.snapshot.state)
    )


@pytest.mark.sampled(2)
def test_answers_and_states_are_those_of_a_cold_run(model, tmp_path, monkeypatch):
    """Texts grow, branch and repeat, several at a time, with restarts and evictions; states are equal bit for bit."""
    monkeypatch.setattr("hf_recurrent.server.prefix_reuse._SPACING", 100)
    chance, cold = random.Random(3), make_scheduler(model)
    room = 12 * (sum(part.nbytes for part in model.init_state(1).values()) + 1024)
    warm, texts, reused = reusing(model, room, tmp_path, max_rows=3), [random_bytes(chance, 300)], 0
    for number in range(14):
        if number in (5, 10):
            warm.close()
            warm = reusing(model, room, tmp_path, max_rows=3)
        asked = [
            (
                chance.choice(texts)[: chance.choice([None, 150])] + random_bytes(chance, chance.choice([0, 1, 30])),
                each,
            )
            for each in range(4)
        ]

        def jobs(asked=asked) -> list[Job]:
            return [
                asking(text, 25, SAMPLINGS[seed], seed, ends=(70,), stops=[bytes([46, 120])] if seed % 2 else ())
                for text, seed in asked
            ]

        found, expected = jobs(), jobs()
        finish(warm, *found)
        finish(cold, *expected)
        assert all(map(same, found, expected))
        assert [job.cached_tokens for job in expected] == [0] * 4
        reused += sum(job.cached_tokens for job in found)
        texts += [text + bytes(job.output) for (text, _), job in zip(asked, found, strict=True)]
    assert reused > 5000
    for text in texts:  # a stored state equals the state of reading its text as a prompt
        while result := stored(warm, text):
            text = text[: result[0]]
            assert are_equal(result[1], read_singly(model, text + b"?")[0])
            text = text[:-1]
    warm.close()
    cold.close()


def test_a_turn_reads_its_own_text_only(model):
    """A count memory learns from an answer only when it is read, so that the next turn reads it."""
    scheduler, text = reusing(model, end_tokens=frozenset()), random_bytes(random.Random(0), 2000)
    first = asking(text)
    finish(scheduler, first)
    before, longer = scheduler.counts.bytes_read, text + bytes(first.output) + b"and now?"
    second = asking(longer)
    finish(scheduler, second)
    fed = len(longer) - 1 - second.cached_tokens  # the last byte is fed when the answer begins
    if not ModelSteps(model).keeps_answers:
        assert second.cached_tokens == len(text) - 1
    else:  # the last byte of an answer is generated, but not fed
        assert second.cached_tokens == len(text) + 19 and fed == 8
    assert scheduler.counts.bytes_read - before == fed and scheduler.reuse.tokens == second.cached_tokens
    again = asking(longer)
    finish(scheduler, again)
    assert again.cached_tokens == len(longer) - 1 and same(again, second)
    scheduler.close()


def test_an_answer_that_ended_is_stored_before_its_end_token_and_stop_sequence():
    model = tiny_model("memora")
    text = random_bytes(random.Random(1), 60)
    alone = make_scheduler(model, end_tokens=frozenset())
    job = asking(text, 30, Sampling())
    finish(alone, job)
    alone.close()
    answer = bytes(job.output)
    ended = reusing(model, end_tokens=frozenset([answer[12]]))
    finish(ended, asking(text, 30, Sampling()))
    first = answer.index(answer[12])
    assert stored(ended, text + answer[:first] + b"\0user")[0] == 60 + first
    ended.close()
    stopped = reusing(model, end_tokens=frozenset())
    job = asking(text, 30, Sampling(), stops=[bytes(answer[9:13])])
    finish(stopped, job)
    assert job.output[: job.released] == list(answer[:9])
    assert stored(stopped, text + answer[:9] + b"another")[0] == 69
    assert stored(stopped, text + answer[:13])[0] == 72
    stopped.close()


def test_a_text_that_began_with_the_end_token_is_not_stored():
    """Its client does not know of that token, and a longer prompt does not have it."""
    model = tiny_model("memora")
    scheduler = reusing(model, end_tokens=frozenset())
    job = asking(b"", 100)
    finish(scheduler, job)
    assert job.prefix == [0] and len(scheduler.reuse.store) == 0
    scheduler.close()


def test_scores_are_of_all_tokens():
    model = tiny_model("memora")
    scheduler, text = reusing(model), random_bytes(random.Random(2), 700)
    for _ in range(2):
        job = asking(text, scores=0)
        finish(scheduler, job)
        assert job.cached_tokens == 0 and len(job.scores.log_probabilities) == 700
    later = asking(text)
    finish(scheduler, later)
    assert later.cached_tokens == 699
    scheduler.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_common_beginning_is_read_once_by_jobs_that_begin_together(model, is_cut):
    """Also where the job that reads it is cancelled meanwhile."""
    chance = random.Random(4)
    common = random_bytes(chance, 3000)
    texts = [common + random_bytes(chance, 40) for _ in range(12)]
    scheduler, cold = reusing(model, max_rows=4), make_scheduler(model, max_rows=4)
    jobs = [asking(text) for text in texts]
    if is_cut:
        reader = asking(common)
        scheduler.submit(reader).result()
        for job in jobs:
            scheduler.submit(job).result()
        while scheduler.counts.bytes_read < 500:
            time.sleep(0.0005)
        reader.cancel()
        for job in jobs:
            finish_only(job)
    else:
        finish(scheduler, *jobs)
    expected = [asking(text) for text in texts]
    finish(cold, *expected)
    assert all(map(same, jobs, expected))
    # The texts differ after the last stored place of the common part, 2560.
    assert scheduler.counts.bytes_read <= 3000 + 12 * 480 + 600 < 12 * 3000
    assert not scheduler.reuse._readers
    scheduler.close()
    cold.close()


def test_jobs_that_fail_or_expire_leave_no_one_waiting(monkeypatch):
    model = tiny_model("memora")
    scheduler, text = reusing(model), random_bytes(random.Random(5), 3000)
    working, calls = scheduler.steps.read, []

    def read(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError
        return working(*arguments)

    monkeypatch.setattr(scheduler.steps, "read", read)
    jobs = [asking(text) for _ in range(3)]
    with pytest.raises(ZeroDivisionError):
        finish(scheduler, *jobs)
    (failed,) = [job for job in jobs if job.error]
    others = [job for job in jobs if job is not failed]
    for job in others:
        finish_only(job)
    assert isinstance(failed.error, ZeroDivisionError) and not scheduler.reuse._readers
    assert same(*others) and len(others[0].output) == 20
    scheduler.close()


def test_a_server_that_learns_stores_nothing_and_other_weights_find_nothing(tmp_path):
    text = random_bytes(random.Random(6), 400)
    for seed, expected in ((0, 0), (0, 399), (1, 0)):
        model = tiny_model("memora")
        with torch.no_grad():
            next(model.parameters())[0, 0] *= 1 + 1e-6 * seed  # rounded in the hash that sessions are tied to
        with serving_scheduler(model, None, session_dir=tmp_path) as scheduler:
            job = asking(text)
            finish(scheduler, job)
            assert job.cached_tokens == expected
    with serving_scheduler(tiny_model("memora"), None, prefix_bytes=0) as scheduler:
        assert scheduler.reuse is None
        finish(scheduler, job_of(text))
