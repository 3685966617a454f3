"""Stock models with their own tokenizers and caches behind the server's interface."""

import copy
import json
import threading

import numpy as np
import pytest
import torch
from cached_cases import FAMILIES, VOCAB_SIZE, cached_model
from running_server import running_server
from word_tokenizers import END, END_OF_TURN, byte_level_tokenizer

from hf_recurrent.server.job import Job
from hf_recurrent.server.routes.completions import CompletionChoice
from hf_recurrent.server.text_tokenizer import TextTokenizer

PROMPT = "The server reads größer text"
TOKENIZER = byte_level_tokenizer()
TEXT = TextTokenizer(TOKENIZER, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models():
    return {family: cached_model(family) for family in ("mamba2", "bamba")}


@pytest.fixture(scope="module", params=["mamba2", "bamba"])
def served(request, models):
    model = models[request.param]
    with running_server(model, tokenizer=TOKENIZER) as client:
        yield model, client


def generated(model, prompt: str, count: int) -> list[int]:
    ids = TOKENIZER(prompt, return_tensors="pt").input_ids
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()


def answer(client, prompt, count=20, **body):
    found = client.complete(prompt=prompt, max_tokens=count, **{"temperature": 0, "logprobs": 3} | body)
    choice = found["choices"][0]
    return choice["text"], choice["logprobs"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_answer_is_that_of_generate(served):
    model, client = served
    text, _, _ = answer(client, PROMPT, 40)
    assert text == TEXT.decode_bytes(generated(model, PROMPT, 40)).decode(errors="replace")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in ("mamba2", "bamba") else pytest.mark.long) for each in FAMILIES]
)
def test_a_restarted_server_goes_on_bit_for_bit_and_reads_nothing_again(family, tmp_path):
    cached, lengths = check_restarts(cached_model(family), tmp_path, 1)
    assert cached == [0, *(length - 1 for length in lengths[:-1])]  # the last token of an answer was never read


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mamba", "mamba2", "recurrent_gemma", "bamba"])
def test_blocks_on_a_cpu_are_the_same_bit_for_bit_and_read_the_last_answer_again(family, tmp_path):
    cached, lengths = check_restarts(cached_model(family), tmp_path, 8)
    read = [length - 15 - 1 for length in lengths[:-1]]
    assert cached == [0, *(length if family == "recurrent_gemma" else length // 8 * 8 for length in read)]


def check_restarts(model, folder, block):
    """Turns of a conversation, each with a new server, are as from a server that stores nothing, bit for bit.

    Their tokens are the same as from the model's own `generate`, which reads all tokens before it as one block.

    Returns:
        The number of tokens that each turn did not read, and the number of tokens after each turn.
    """
    names, turns, reused, lengths = [TEXT.name(token) for token in range(VOCAB_SIZE)], [], [], []
    tokens = TEXT.encode_bytes((PROMPT * 3).encode()).tolist()
    for number in range(3):
        with running_server(model, tokenizer=TOKENIZER, session_dir=folder, options={"block": block}) as client:
            text, logprobs, cached = answer(client, tokens, 15)
        own = copy.deepcopy(model).generate(torch.tensor([tokens]), max_new_tokens=15, do_sample=False)[0]
        assert logprobs["tokens"] == [names[token] for token in own[len(tokens) :]]
        reused.append(cached)
        turns.append((tokens, text, logprobs))
        lengths.append(len(tokens) + 15)
        tokens = [*tokens, *map(names.index, logprobs["tokens"]), 70 + number, 80]
    with running_server(model, tokenizer=TOKENIZER, options={"prefix_bytes": 0, "block": block}) as client:
        for tokens, text, logprobs in turns:
            assert answer(client, tokens, 15) == (text, logprobs, 0)
    return reused, lengths


def test_users_at_different_positions_get_their_own_answers(models):
    prompts = [PROMPT[: 5 + 3 * number] for number in range(6)]
    for family, model in models.items():
        with running_server(model, tokenizer=TOKENIZER, options={"max_rows": 4}) as client:
            found = {}

            def ask(prompt, client=client, found=found):
                found[prompt] = answer(client, prompt, 30)[0]

            threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        expected = [TEXT.decode_bytes(generated(model, prompt, 30)).decode(errors="replace") for prompt in prompts]
        assert [found[prompt] for prompt in prompts] == expected, family


def test_stop_strings_may_begin_and_end_inside_of_tokens(served):
    _, client = served
    letters = {str(token): 100 for token in TEXT.encode_bytes(b"The state of a recurrent model is its memory")}
    sampling = {"temperature": 1.0, "seed": 2, "logit_bias": letters}
    whole, _, _ = answer(client, PROMPT, 30, **sampling)
    places = range(1, len(whole) - 4, 11)
    assert len(places) > 3
    for place in places:
        stop = whole[place : place + 3]
        body = {"prompt": PROMPT, "max_tokens": 30, "stop": [stop, "never"]} | sampling
        assert client.complete(**body)["choices"][0] == {
            "index": 0, "text": whole[: whole.index(stop)], "logprobs": None, "finish_reason": "stop",
        }  # fmt: skip
        options = {"stream": True, "stream_options": {"every_token": True}}
        events = client.stream({"model": "tiny"} | body | options)
        assert "".join(event["choices"][0]["text"] for event in events) == whole[: whole.index(stop)]


def test_a_stream_has_whole_characters():
    class Served:
        decode = staticmethod(TEXT.decode_bytes)

    job, pieces = Job.__new__(Job), []
    job.output, job.tail, job.is_done, job.finish_reason = [], b"", False, "length"
    choice = CompletionChoice(Served(), job, 0)
    text = "größer 你好 😀 the state"
    for token in TEXT.encode_bytes(text.encode()).tolist():
        job.output.append(token)
        job.released = len(job.output)
        pieces.append(choice.take()["text"])
    job.is_done = True
    pieces.append(choice.take()["text"])
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces) and "" in pieces


def test_chat_uses_the_template_and_the_end_of_a_turn(models):
    model, messages = cached_model("mamba2"), [{"role": "user", "content": "the state?"}]
    model.generation_config.eos_token_id = [END_OF_TURN]
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = TEXT.decode_bytes(generated(model, rendered, 12)).decode(errors="replace")
    with running_server(model, tokenizer=TOKENIZER) as client:
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        found = client.post("/v1/chat/completions", body)
        assert found["choices"][0]["message"]["content"] == expected
        assert found["usage"]["prompt_tokens"] == len(TOKENIZER(rendered).input_ids)
        for token in (END_OF_TURN, END):  # of the model and of the tokenizer
            found = client.post("/v1/chat/completions", body | {"logit_bias": {str(token): 100}})
            assert found["choices"][0]["message"]["content"] == "" and found["usage"]["completion_tokens"] == 0
            assert found["choices"][0]["finish_reason"] == "stop"


def test_logprobs_of_a_chat_have_the_bytes_of_words_and_none_of_special_tokens(served):
    model, client = served
    ids = TEXT.encode_bytes("größer the".encode()).tolist()
    bias = {str(token): 100 for token in (*ids, END_OF_TURN)}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 30, "seed": 1}
    body |= {"logprobs": True, "top_logprobs": 20, "logit_bias": bias}
    choice = client.post("/v1/chat/completions", body)["choices"][0]
    content = choice["logprobs"]["content"]
    data = b"".join(bytes(token["bytes"] or []) for token in content)
    assert data.decode(errors="replace") == choice["message"]["content"] and "ö" in choice["message"]["content"]
    prompt = TOKENIZER.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
    first = model(torch.tensor([TOKENIZER(prompt).input_ids])).logits[0, -1].log_softmax(-1)
    best = first.topk(20)
    assert [each["logprob"] for each in content[0]["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    for token, each in zip(best.indices.tolist(), content[0]["top_logprobs"], strict=True):
        assert each["bytes"] == ([*TEXT.decode_bytes([token])] or None)
    special = next(token for token in content if token["token"] == TOKENIZER.convert_ids_to_tokens(END_OF_TURN))
    assert special["bytes"] is None


def test_a_session_goes_on_after_the_end_of_an_answer(served, tmp_path):
    _, client = served
    session = client.new_session()
    size = client.read(session, "the state of")["bytes_read"]
    assert size == len(TOKENIZER("the state of").input_ids)
    found = client.generate(session, max_tokens=5, logit_bias={str(END): 100})
    assert (found["text"], found["bytes_read"], found["finish_reason"]) == ("", size + 1, "stop")
    reply = client.request("GET", f"/v1/sessions/{session}/state").body
    copy = client.post("/v1/sessions/from_state", reply)["id"]
    for each in (session, copy):
        client.read(each, " größer")
    first, second = (client.generate(each, max_tokens=10, bits=True, seed=1) for each in (session, copy))
    assert first["bits"] == second["bits"] and first["text"] == second["text"]
    whole = [*TOKENIZER("the state of").input_ids, END, *TOKENIZER(" größer").input_ids]
    text, _, _ = answer(client, whole, 10, temperature=1.0, seed=1)
    assert text == first["text"]
    damaged = bytearray(reply)
    damaged[-5] ^= 1
    reply = client.request("POST", "/v1/sessions/from_state", bytes(damaged))
    assert reply.status == 400 and "`body` is damaged" in reply.error()


def test_models_say_what_a_state_is(models):
    with running_server(models["mamba2"], tokenizer=TOKENIZER) as client:
        about = client.get("/v1/models")["data"][0]
        assert about["batched"] is True and about["state_bytes_per_token"] == 0
        assert about["state_bytes"] == sum(part.nbytes for part in client.scheduler.store.zero.values())
    with running_server(models["bamba"], tokenizer=TOKENIZER) as client:
        about = client.get("/v1/models")["data"][0]
        assert about["batched"] is False and about["state_bytes_per_token"] == 2 * 8 * 4  # keys and values
        assert about["cache"] == "DynamicCache"


def test_states_that_grow_fill_the_store_by_their_size(models):
    limit = 60_000
    with running_server(models["bamba"], tokenizer=TOKENIZER, options={"prefix_bytes": limit}) as client:
        for number in range(6):
            client.complete(prompt=[5 + number] * 70, max_tokens=2)
        store = client.scheduler.reuse.store
        entries = store._entries.values()
        sizes = {entry.key.length: len(entry.data) for entry in entries}
        assert len({*sizes.values()}) == len(sizes) > 1  # another size for each length
        assert sum(entry.nbytes for entry in entries) == store._bytes <= limit
        assert len(store) < 6 * 3


def test_wrong_requests_name_what_is_wrong(served):
    _, client = served
    session = client.new_session()
    reply = client.request("POST", f"/v1/sessions/{session}/read", {"base64": "/w=="})
    assert reply.status == 400 and "it is not UTF-8" in reply.error()
    reply = client.request("POST", "/v1/completions", {"model": "tiny", "prompt": [VOCAB_SIZE]})
    assert reply.status == 400 and f"from 0 to {VOCAB_SIZE - 1}" in reply.error()
    body = json.dumps({"model": "tiny", "prompt": "a", "stop": ["\ud800"]}).encode()
    assert client.request("POST", "/v1/completions", body).status == 400


def test_bits_are_counted_for_bytes(served):
    _, client = served
    session = client.new_session()
    found = client.read(session, "größer als nötig")
    known = [value for value in found["bits"] if value is not None]
    assert np.isclose(found["bits_per_byte"], sum(known) / len("größer als nötig".encode()))
