"""`--learn`: the model learns from what marked sessions read, and can go back."""

import pytest
import torch
from model_cases import tiny_model
from running_server import running_server

from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.settings import LearnerSettings
from hf_recurrent.server.serving import Learning

TEXT = b"to be or not to be, that is the question. " * 8


def learning_in(folder, **settings) -> Learning:
    return Learning(
        LearnerSettings(**{"rule": "rtrl", "stride": 4, "learning_rate": 1e-2} | settings), folder, 100_000
    )


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def are_equal(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in second)


def test_a_session_is_learned_from_like_a_stream(tmp_path):
    """In pieces of any length, with other sessions in between, and what is generated is not learned from."""
    alone = OnlineLearner(tiny_model("memora"), rule="rtrl", stride=4, learning_rate=1e-2)
    alone.read(TEXT)
    model = tiny_model("memora")
    with running_server(model, learning=learning_in(tmp_path)) as server:
        session, other = server.new_session(learns=True), server.new_session()
        for begin in range(0, len(TEXT), 50):
            server.read(session, TEXT[begin : begin + 50].decode())
            server.read(other, "is not learned from")
        learned = server.get("/v1/learning")
        lines = server.request("GET", "/metrics").body.decode()
    assert are_equal(weights_of(model), weights_of(alone.model))
    record = alone.record()
    assert learned["bytes_read"] == len(TEXT) and learned["updates"] == record.updates
    assert learned["bits_per_byte"] == record.bits_per_byte
    assert f"hf_recurrent_prequential_bits_per_byte {record.bits_per_byte}" in lines


def test_bits_per_byte_fall_and_unlearning_brings_them_back(tmp_path):
    model = tiny_model("memora")
    before = weights_of(model)
    with running_server(model, learning=learning_in(tmp_path)) as server:
        probe = server.read(server.new_session(), TEXT.decode(), bits=True)["bits_per_byte"]
        session = server.new_session(learns=True)
        server.read(session, TEXT.decode())
        learned = server.post("/v1/learning/checkpoints")["checkpoint"]
        after, improved = weights_of(model), server.read(server.new_session(), TEXT.decode())["bits_per_byte"]
        assert improved < probe - 1
        unlearned = server.post("/v1/learning/unlearn", {"checkpoint": "checkpoint-0"})
        assert unlearned["checkpoints"] == ["checkpoint-0", learned] and unlearned["bytes_read"] == 0
        assert are_equal(weights_of(model), before)
        assert server.read(server.new_session(), TEXT.decode())["bits_per_byte"] == pytest.approx(probe)
        server.read(session, "it goes on")
        server.post("/v1/learning/unlearn", {"checkpoint": learned})
        assert are_equal(weights_of(model), after)
        for name in ("../checkpoint-0", "checkpoint-1", "/etc"):
            reply = server.request("POST", "/v1/learning/unlearn", {"checkpoint": name})
            assert reply.status == 400 and "must be one of checkpoint-0" in reply.error()


def test_a_restart_goes_on_from_the_last_checkpoint(tmp_path):
    model, sessions = tiny_model("memora"), tmp_path / "sessions"
    with running_server(model, learning=learning_in(tmp_path / "learned"), session_dir=sessions) as server:
        session = server.new_session(learns=True)
        server.read(session, TEXT.decode())
        state = server.request("GET", f"/v1/sessions/{session}/state").body
        server.post("/v1/learning/checkpoints")
        learned = server.get("/v1/learning")
    again = tiny_model("memora")
    with running_server(again, learning=learning_in(tmp_path / "learned"), session_dir=sessions) as server:
        assert are_equal(weights_of(again), weights_of(model))
        assert server.get("/v1/learning") == learned
        assert server.get(f"/v1/sessions/{session}") | {"created": 0} == {
            "id": session, "object": "session", "created": 0, "bytes_read": len(TEXT), "learns": True, "marks": {},
        }  # fmt: skip
        server.read(session, "more text, from which the weights change")
        # A state of weights that the model has had.
        server.post("/v1/sessions/from_state", state)
        assert server.request("PATCH", f"/v1/sessions/{session}", {"learns": False}).json()["learns"] is False
        before = server.get("/v1/learning")["bytes_read"]
        server.read(session, "not learned any more")
        assert server.get("/v1/learning")["bytes_read"] == before


def test_a_diverging_text_changes_nothing(tmp_path):
    model = tiny_model("memora")
    with running_server(model, learning=learning_in(tmp_path)) as server:
        session = server.new_session(learns=True)
        learner = server.scheduler.learner
        before = weights_of(model)
        handle = model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))
        server.read(session, "a text")
        handle.remove()
        assert are_equal(weights_of(model), before) and learner.failures == 1
        server.read(session, TEXT.decode())
        assert not are_equal(weights_of(model), before) and server.get("/v1/learning")["failures"] == 1


def test_without_learning_there_is_none():
    with running_server() as server:
        for method, path, body in (
            ("GET", "/v1/learning", None),
            ("POST", "/v1/sessions", {"learns": True}),
            ("PATCH", f"/v1/sessions/{server.new_session()}", {"learns": True}),
        ):
            reply = server.request(method, path, body)
            assert reply.status == 400 and "start it with --learn" in reply.error()
