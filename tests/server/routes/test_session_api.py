"""Sessions over HTTP: read, generated, forked, rewound, moved as files, kept on disk."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from model_cases import tiny_model
from running_server import running_server
from safetensors.torch import load, save

from hf_recurrent.generation.text_state import TextState, load_text_state, pack_text_state


@pytest.fixture(scope="module")
def server():
    with running_server() as client:
        yield client


def test_bits_of_every_byte(server):
    session, text = server.new_session(), "A small café."
    first, second = server.read(session, text[:6]), server.read(session, text[6:])
    with torch.no_grad():
        logits = tiny_model("memora")(torch.tensor([list(text.encode())])).logits[0].double()
    nats = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(list(text.encode()[1:])), reduction="none")
    expected = (nats / torch.tensor(2.0).log()).tolist()
    assert first["bits"][0] is None
    assert [*first["bits"][1:], *second["bits"]] == pytest.approx(expected, rel=1e-5)
    assert second["bits_per_byte"] == pytest.approx(sum(expected[5:]) / len(expected[5:]), rel=1e-5)
    assert second["bytes_read"] == len(text.encode())
    assert server.read(session, "x", bits=False) == {"bytes_read": len(text.encode()) + 1}


def test_bytes_that_are_no_text(server):
    data = bytes(range(1, 256))
    session = server.new_session()
    server.post(f"/v1/sessions/{session}/read", {"base64": base64.b64encode(data).decode()})
    found = server.generate(session, max_tokens=50, seed=0)
    made = base64.b64decode(found["base64"])
    assert made.decode("utf-8", "replace") == found["text"] and found["bytes_read"] == 255 + len(made)


def test_a_session_that_begins_by_generating_says_which_byte_it_read_first(server):
    def state(session):
        return load(server.request("GET", f"/v1/sessions/{session}/state").body)

    direct, completed, read, ended = (server.new_session() for _ in range(4))
    found = server.generate(direct, max_tokens=9, seed=3)
    completion = server.complete(session=completed, max_tokens=9, seed=3)
    assert base64.b64decode(found["prefix"]) == b"\0" and completion["prefix"] == found["prefix"]
    assert found["text"] == completion["choices"][0]["text"] and found["finish_reason"] == "length"
    again = base64.b64encode(b"\0" + base64.b64decode(found["base64"])).decode()
    server.post(f"/v1/sessions/{read}/read", {"base64": again})
    for session in (direct, completed):
        assert all(torch.equal(part, state(read)[name]) for name, part in state(session).items())
    assert server.generate(direct, max_tokens=9, seed=4) == server.generate(completed, max_tokens=9, seed=4)
    assert "prefix" not in server.generate(direct, max_tokens=1)
    server.read(ended, "a")
    assert "prefix" not in server.generate(ended, max_tokens=1)


def test_a_generation_with_bits_is_streamed_and_stopped(server):
    whole, streamed, read = (server.new_session() for _ in range(3))
    for session in (whole, streamed, read):
        server.read(session, "Once")
    options = {"max_tokens": 60, "seed": 2, "bits": True}
    expected = server.generate(whole, **options)
    path = f"/v1/sessions/{streamed}/generate"
    pieces = list(server.stream(options | {"stream": True}, path))
    assert "".join(piece["text"] for piece in pieces) == expected["text"]
    assert [value for piece in pieces for value in piece["bits"]] == expected["bits"]
    data = b"".join(base64.b64decode(piece["base64"]) for piece in pieces)
    assert data == base64.b64decode(expected["base64"]) and len(data) == len(expected["bits"])
    assert pieces[-1]["bytes_read"] == expected["bytes_read"] and not any("bytes_read" in each for each in pieces[:-1])
    assert pieces[-1]["finish_reason"] == expected["finish_reason"]
    body = {"base64": base64.b64encode(data).decode()}
    assert server.post(f"/v1/sessions/{read}/read", body)["bits"] == pytest.approx(expected["bits"], rel=1e-5)
    each = server.post(f"/v1/sessions/{whole}/fork")["id"]
    options |= {"stream": True, "stream_options": {"every_token": True}}
    singles = list(server.stream(options, f"/v1/sessions/{each}/generate"))
    assert {len(piece["bits"]) for piece in singles[:-1]} == {1} and len(singles[-1]["bits"]) <= 1
    assert "".join(piece["text"] for piece in singles) == server.generate(whole, max_tokens=60, seed=2)["text"]
    # Stopped where it is, with every byte that the session has.
    pieces, ends = [], server.scheduler.end_tokens
    server.scheduler.end_tokens = frozenset()
    for piece in server.stream({"max_tokens": 60_000, "stream": True}, path):
        if not pieces:
            assert server.request("POST", f"/v1/sessions/{streamed}/read", {"text": "x"}).status == 409
            assert server.post(f"/v1/sessions/{streamed}/stop") == {"stopped": True}
        pieces.append(piece)
    server.scheduler.end_tokens = ends
    count = sum(len(base64.b64decode(piece["base64"])) for piece in pieces)
    assert 0 < count < 60_000 and pieces[-1]["bytes_read"] == expected["bytes_read"] + count
    assert server.post(f"/v1/sessions/{streamed}/stop") == {"stopped": False}


def test_a_stopped_read_was_not_read(server):
    session = server.new_session()
    server.read(session, "abc")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.request, "POST", f"/v1/sessions/{session}/read", {"text": "x" * 1_000_000})
        while not server.post(f"/v1/sessions/{session}/stop")["stopped"]:
            pass
        assert reply.result().status == 409 and "nothing of the text was read" in reply.result().error()
    assert server.get(f"/v1/sessions/{session}")["bytes_read"] == 3


def test_forks_and_marks(server):
    session = server.new_session()
    server.read(session, "Once upon a time")
    marked = server.post(f"/v1/sessions/{session}/marks", {"mark": "start"})
    assert marked["marks"] == {"start": 16}
    fork = server.post(f"/v1/sessions/{session}/fork")
    assert fork["bytes_read"] == 16 and fork["marks"] == {"start": 16} and fork["id"] != session
    copy = server.new_session(**{"from": session})
    expected = server.generate(session, max_tokens=12, seed=1)
    assert server.generate(fork["id"], max_tokens=12, seed=1) == expected
    assert server.generate(copy, max_tokens=12, seed=1) == expected
    server.read(session, "something else")
    assert server.post(f"/v1/sessions/{session}/rewind", {"mark": "start"})["bytes_read"] == 16
    assert server.generate(session, max_tokens=12, seed=1) == expected
    assert server.request("DELETE", f"/v1/sessions/{session}/marks/start").json()["marks"] == {}
    assert server.request("POST", f"/v1/sessions/{session}/rewind", {"mark": "start"}).status == 404
    listed = server.get("/v1/sessions?limit=2")
    rest = server.get(f"/v1/sessions?after={listed['data'][-1]}")
    assert listed["has_more"] and {session, fork["id"], copy} <= {*listed["data"], *rest["data"]}
    assert server.request("DELETE", f"/v1/sessions/{session}").json()["deleted"]
    assert server.request("GET", f"/v1/sessions/{session}").status == 404


def test_a_state_moves_to_another_server(server, tmp_path):
    session = server.new_session()
    server.read(session, "It goes with me")
    data = server.request("GET", f"/v1/sessions/{session}/state").body
    path = tmp_path / "state.safetensors"
    path.write_bytes(data)
    assert load_text_state(tiny_model("memora"), path).pending == [ord("e")]  # a file of `generate --state` too
    expected = server.generate(session, max_tokens=12, seed=1)["base64"]
    with running_server() as other:
        moved = other.post("/v1/sessions/from_state", data)["id"]
        assert other.generate(moved, max_tokens=12, seed=1)["base64"] == expected
    with running_server(tiny_model("memora", num_hidden_layers=1)) as other:
        reply = other.request("POST", "/v1/sessions/from_state", data)
        assert reply.status == 400 and "belongs to other weights" in reply.error()


def hostile_states() -> dict[str, bytes]:
    model = tiny_model("memora")
    state = model.init_state(1)
    whole = pack_text_state(model, TextState(state, [65]))
    head = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    name = next(iter(state))
    numbers = load(whole)

    def changed(tensors, **metadata) -> bytes:
        return save(tensors, head | metadata)

    return {
        "empty": b"",
        "cut": whole[:-7],
        "long": whole + b"x",
        "huge header": (2**62).to_bytes(8, "little") + whole[8:],
        "no safetensors": b"\x80\x04}q\x00." * 20,
        "NaN": changed(numbers | {name: torch.full_like(numbers[name], float("nan"))}),
        "infinite": changed(numbers | {name: torch.full_like(numbers[name], float("inf"))}),
        "another value": changed(numbers | {name: numbers[name] + 1}),
        "another pending byte": changed(numbers, pending="[66]"),
        "shape": changed(numbers | {name: torch.zeros(1, 5)}),
        "two texts": changed(
            {key: torch.zeros(2, *value.shape[1:]) for key, value in numbers.items()}, pending="[1,2]"
        ),
        "integers": changed(numbers | {name: numbers[name].long()}),
        "missing": changed({key: value for key, value in numbers.items() if key != name}),
        "no hash": save(numbers, {"pending": "[65]"}),
        "no pending": save(numbers, {key: value for key, value in head.items() if key != "pending"}),
        "pending outside": changed(numbers, pending="[256]"),
        "pending true": changed(numbers, pending="[true]"),
        "pending nested": changed(numbers, pending="[" * 5000),
        "pending text": changed(numbers, pending="x"),
        "other weights": changed(numbers, weights="0" * 64),
    }


@pytest.mark.parametrize("case", hostile_states())
def test_damaged_states_are_refused(server, case):
    before = len(server.scheduler.store)
    reply = server.request("POST", "/v1/sessions/from_state", hostile_states()[case])
    assert reply.status == 400 and reply.error() and len(server.scheduler.store) == before


def test_sessions_outlive_the_server(tmp_path):
    with running_server(session_dir=tmp_path, options={"max_resident": 2}) as client:
        sessions = [client.new_session() for _ in range(6)]
        for number, session in enumerate(sessions):
            client.read(session, f"text {number}")
            client.post(f"/v1/sessions/{session}/marks", {"mark": "here"})
        assert client.scheduler.store.resident == 2
        uninterrupted = [client.post(f"/v1/sessions/{session}/fork")["id"] for session in sessions]
        expected = [client.generate(session, max_tokens=8, seed=1) for session in uninterrupted]
    with running_server(session_dir=tmp_path) as client:
        assert client.get("/v1/sessions")["data"] == [*sessions, *uninterrupted]
        assert [client.generate(session, max_tokens=8, seed=1) for session in sessions] == expected
        assert client.post(f"/v1/sessions/{sessions[0]}/rewind", {"mark": "here"})["bytes_read"] == 6
    other = tiny_model("memora", num_hidden_layers=1)
    with pytest.raises(ValueError, match="belong to other weights"), running_server(other, session_dir=tmp_path):
        pass
    (tmp_path / "sessions.sqlite").write_bytes(b"no database" * 1000)
    for name in ("wal", "shm"):
        (tmp_path / f"sessions.sqlite-{name}").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="is damaged or not a database"), running_server(session_dir=tmp_path):
        pass


def test_so_many_sessions_and_no_more():
    with running_server(options={"max_sessions": 3}) as client:
        first = client.new_session()
        client.post(f"/v1/sessions/{first}/marks", {"mark": "a"})
        client.post(f"/v1/sessions/{first}/marks", {"mark": "a"})
        for path, body in (("fork", None), ("marks", {"mark": "b"})):
            assert path == "marks" or client.request("POST", f"/v1/sessions/{first}/{path}", body).status == 429
        client.new_session()
        reply = client.request("POST", "/v1/sessions")
        assert reply.status == 429 and "this server allows 3" in reply.error()
        client.request("DELETE", f"/v1/sessions/{first}")
        client.new_session()
