"""Adapters of sessions: exact gradients, isolation, and the way of a session's weights with its state."""

import threading

import pytest
import torch
from counted_model import counted_model, word_corpus
from model_cases import tiny_model
from running_server import running_server

from hf_recurrent.cli.serve import main
from hf_recurrent.server import adapters
from hf_recurrent.server.adapters import ADAPTER, ReadoutAdapter
from hf_recurrent.server.serving import serving_scheduler

RANK = {"options": {"adapter_rank": 4}}
TEXTS = [f"user {number}: the {word} is {word}. ".encode() * 6 for number, word in enumerate(("cat", "dog", "sun"))]


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    model = tiny_model("memora")
    torch.manual_seed(0)
    with torch.no_grad():  # probabilities that are far from equal
        model.lm_head.weight.normal_(std=0.5)
    return model


@torch.no_grad()
def logits_of(model, text: bytes) -> torch.Tensor:
    return model(torch.tensor([list(text)])).logits[0]


def test_inputs_are_the_output_after_the_final_norm(model):
    ids = torch.tensor([list(TEXTS[0])])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0]
    expected = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(
        ReadoutAdapter(model, 2)._inputs(logits_of(model, TEXTS[0])), expected, rtol=0, atol=1e-4
    )


def test_learning_is_adagrad_on_the_gradient_of_each_block(model):
    adapter, text = ReadoutAdapter(model, 3), TEXTS[1][:51]  # blocks of 16, 16, 16 and 2
    logits, targets = logits_of(model, text[:-1]), torch.tensor(list(text[1:]))
    changed, learned = adapter.learn(logits, adapter.new(), targets.tolist())
    inputs, plain = adapter._inputs(logits).double(), logits.double()
    parts = [part.double().clone().requires_grad_() for part in adapter._parts(adapter.new())[:2]]
    optimizer = torch.optim.Adagrad(parts, 0.1, initial_accumulator_value=1e-8, eps=0)
    for begin in range(0, 50, 16):
        block = slice(begin, begin + 16)
        found = plain[block] + inputs[block] @ parts[0].T @ parts[1].T
        torch.testing.assert_close(changed[block].double(), found.detach(), rtol=0, atol=1e-3)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(found, targets[block], reduction="sum").backward()
        optimizer.step()
    assert torch.equal(changed[:16], logits[:16]) and not torch.equal(changed[16:32], logits[16:32])
    for part, expected in zip(adapter._parts(learned), parts, strict=False):
        torch.testing.assert_close(part.double(), expected.detach(), rtol=0, atol=1e-3)


def test_an_update_that_is_not_finite_is_left_out(model):
    adapter = ReadoutAdapter(model, 2)
    vector = adapter.new()
    _, learned = adapter.learn(torch.full((3, 256), torch.nan), vector, [1, 2, 3])
    assert learned is vector


def test_sessions_learn_at_the_same_time_and_apart(model):
    """Bits and answers of every session are as from a server of its own; of one that does not learn, as from any."""

    def use(server, text: bytes, learns: bool, found: dict) -> None:
        session = server.new_session(**({"learns": True} if learns else {}))
        bits = [server.read(session, text.decode())["bits"] for _ in range(3)]
        found[text, learns] = bits, server.generate(session, max_tokens=30, seed=1, bits=True)

    cases, together, alone = [(text, learns) for text in TEXTS for learns in (True, False)], {}, {}
    with running_server(model, **RANK) as server:
        threads = [threading.Thread(target=use, args=(server, *case, together)) for case in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for text, learns in cases:
        with running_server(model, **(RANK if learns else {})) as server:
            use(server, text, learns, alone)
    assert together == alone
    for text in TEXTS:
        first, last = (sum(filter(None, bits)) for bits in alone[text, True][0][::2])
        assert last < 0.5 * first and sum(alone[text, False][0][2]) > 0.9 * first


def test_the_adapter_goes_where_the_state_goes(model, tmp_path):
    """Marks, forks, files, a restart, and the end of an episode."""
    with running_server(model, session_dir=tmp_path / "a", **RANK) as server:
        session = server.new_session(learns=True)
        server.read(session, TEXTS[0].decode())
        server.post(f"/v1/sessions/{session}/marks", {"mark": "here"})
        expected = server.generate(session, max_tokens=20, seed=1)
        server.read(session, TEXTS[1].decode())
        learned = server.request("GET", f"/v1/sessions/{session}/state").body
        changed = server.generate(session, max_tokens=20, seed=1)
        server.post(f"/v1/sessions/{session}/rewind", {"mark": "here"})
        fork = server.post(f"/v1/sessions/{session}/fork")["id"]
        assert server.generate(session, max_tokens=20, seed=1) == expected != changed
    with running_server(model, session_dir=tmp_path / "a", **RANK) as server:
        assert server.generate(fork, max_tokens=20, seed=1) == expected
        moved = server.post("/v1/sessions/from_state", learned)["id"]
        assert server.generate(moved, max_tokens=20, seed=1)["base64"] == changed["base64"]
        server.generate(moved, max_tokens=400, seed=2, logit_bias={"0": 100})  # the end byte
        assert server.scheduler.store.get(moved).snapshot.state[ADAPTER].numel()
        for damaged in (learned[:-4] + b"\0\0\x80\x7f", learned.replace(b"adapter", b"adopter")):
            assert server.request("POST", "/v1/sessions/from_state", damaged).status == 400
    with running_server(model) as server:
        reply = server.request("POST", "/v1/sessions/from_state", learned)
        assert reply.status == 400 and "adapter" in reply.error()
    with running_server(model, options={"adapter_rank": 3}) as server:
        reply = server.request("POST", "/v1/sessions/from_state", learned)
        assert reply.status == 400 and "`--adapter_rank 3`" in reply.error()


def test_learning_is_switched_off_and_on(model):
    with running_server(model, **RANK) as server:
        session = server.new_session()
        server.read(session, TEXTS[0].decode())
        assert ADAPTER not in server.scheduler.store.get(session).snapshot.state
        for learns, changes in ((True, True), (False, False)):
            server._checked(server.request("PATCH", f"/v1/sessions/{session}", {"learns": learns}))
            before = server.scheduler.store.get(session).snapshot.state.get(ADAPTER)
            server.read(session, TEXTS[0].decode())
            after = server.scheduler.store.get(session).snapshot.state[ADAPTER]
            assert changes == (before is None or not torch.equal(before, after))
        about = server.get("/v1/models")["data"][0]
        assert about["learns"] and about["adapter_bytes"] == 4 * after.numel()


def test_counts_mix_what_the_adapter_predicts():
    model = counted_model(word_corpus())
    text, totals = "def self.y = print(y)\n" * 8, []
    for learns in (False, True):
        with running_server(model, **RANK) as server:
            session = server.new_session(**({"learns": True} if learns else {}))
            totals.append(sum(filter(None, server.read(session, text)["bits"])))
    assert totals[0] != totals[1]


def test_a_directory_keeps_one_rank(model, tmp_path):
    for rank, kept in ((0, 0), (2, 0)):
        context = serving_scheduler(model, None, session_dir=tmp_path, adapter_rank=rank)
        if rank == kept:
            with context:
                continue
        with pytest.raises(ValueError, match=f"`--adapter_rank {kept}`, and it is {rank} now"):
            context.__enter__()


def test_models_and_arguments_that_have_no_adapters(model, monkeypatch, capsys):
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    with pytest.raises(ValueError, match="linear map"):
        adapters.ReadoutAdapter(model, 2)
    for arguments, words in (
        (["--adapter_rank", "-1"], "`--adapter_rank` is -1"),
        (["--adapter_rank", "2", "--learn", "--output_dir", "x"], "does not go with `--learn`"),
        (["--adapter_rank", "2", "--processes", "2"], "`--processes`"),
    ):
        with pytest.raises(SystemExit):
            main(["nowhere", *arguments])
        assert words in capsys.readouterr().err
