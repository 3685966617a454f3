"""/v1/models and /v1/completions, used by OpenAI's own client."""

import openai
import pytest
import torch
from model_cases import tiny_model
from running_server import running_server


@pytest.fixture(scope="module")
def model():
    return tiny_model("memora")


@pytest.fixture(scope="module")
def server(model):
    with running_server(model) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as found:
        yield found


def generated(model, prompt: bytes, seed: int, new: int, **options) -> bytes:
    torch.manual_seed(seed)
    ids = torch.tensor([list(prompt)])
    output = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=new, **options)[0, len(prompt) :]
    return bytes(token for token in output.tolist() if token)


@pytest.mark.parametrize("path", ["responses", "embeddings"])
def test_routes_that_the_documentation_names_as_missing(server, path):
    reply = server.request("POST", f"/v1/{path}", {"model": "tiny", "input": "a"})
    assert reply.status == 404 and reply.error()


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "hf-recurrent"
    with pytest.raises(openai.NotFoundError, match="`model` is 'other'; this server has 'tiny'"):
        client.models.retrieve("other")


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_p": 0.8}])
def test_completion_is_that_of_generate(client, model, options):
    found = client.completions.create(model="tiny", prompt="It was", max_tokens=30, seed=4, **options)
    expected = generated(model, b"It was", 4, 30, **options)
    assert found.choices[0].text == expected.decode("utf-8", "replace")
    assert found.choices[0].finish_reason == ("length" if len(expected) == 30 else "stop")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (6, len(expected))


def test_stream_is_the_same_text_without_half_characters(client):
    arguments = {"model": "tiny", "prompt": "caf", "max_tokens": 200, "seed": 1, "temperature": 0.9}
    whole = client.completions.create(**arguments)
    pieces = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    reasons = [piece.choices[0].finish_reason for piece in pieces if piece.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) <= {None}
    assert pieces[-1].usage == whole.usage and len({piece.id for piece in pieces}) == 1


def test_several_prompts_and_choices(client, model):
    found = client.completions.create(model="tiny", prompt=["one", "two"], n=3, max_tokens=8, seed=10)
    expected = [
        generated(model, prompt, seed, 8)
        for prompt, seed in zip([b"one"] * 3 + [b"two"] * 3, range(10, 16), strict=True)
    ]
    assert [choice.text for choice in found.choices] == [text.decode("utf-8", "replace") for text in expected]
    assert [choice.index for choice in found.choices] == list(range(6))
    streamed = [""] * 6
    for piece in client.completions.create(
        model="tiny", prompt=["one", "two"], n=3, max_tokens=8, seed=10, stream=True
    ):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == [choice.text for choice in found.choices]
    tokens = client.completions.create(model="tiny", prompt=[list(b"one")], max_tokens=8, seed=10)
    assert tokens.choices[0].text == found.choices[0].text


def test_stop(client):
    whole = client.completions.create(model="tiny", prompt="x", max_tokens=60, seed=2).choices[0].text
    stop = next(character for character in whole if character.isascii())
    for stream in (False, True):
        found = client.completions.create(
            model="tiny", prompt="x", max_tokens=60, seed=2, stop=[stop, "###"], stream=stream
        )
        choices = [piece.choices[0] for piece in found] if stream else found.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_echo_and_logprobs(client, model):
    prompt = "né"
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=2).choices[0]
    with torch.no_grad():
        expected = model(torch.tensor([list(prompt.encode())])).logits[0].log_softmax(-1)
    assert found.text == prompt and found.finish_reason == "length"
    logprobs = found.logprobs
    assert logprobs.tokens == ["n", "bytes:\\xc3", "bytes:\\xa9"] and logprobs.text_offset == [0, 1, 1]
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx([float(expected[0, 0xC3]), float(expected[1, 0xA9])], abs=1e-5)
    assert list(logprobs.top_logprobs[1].values()) == pytest.approx(expected[0].topk(2).values.tolist(), abs=1e-5)
    arguments = {"model": "tiny", "prompt": "ab", "max_tokens": 20, "seed": 3, "logprobs": 0, "echo": True}
    whole = client.completions.create(**arguments).choices[0]
    assert whole.logprobs.tokens[:2] == ["a", "b"] and len(whole.logprobs.tokens) == 22
    pieces = [piece.choices[0] for piece in client.completions.create(**arguments, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for piece in pieces for value in getattr(piece.logprobs, name)]
        assert joined == getattr(whole.logprobs, name)
    assert "".join(piece.text for piece in pieces) == whole.text


def test_a_session_is_continued(client, server, model):
    session = server.new_session()
    extra = {"session": session}
    first = client.completions.create(model="tiny", prompt="Hello", max_tokens=0, extra_body=extra)
    assert first.choices[0].text == "" and first.session == session
    second = client.completions.create(model="tiny", prompt=" world", max_tokens=9, seed=6, extra_body=extra)
    assert second.choices[0].text == generated(model, b"Hello world", 6, 9).decode("utf-8", "replace")
    assert server.get(f"/v1/sessions/{session}")["bytes_read"] == 11 + second.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="`session` continues one text"):
        client.completions.create(model="tiny", prompt="a", n=2, extra_body=extra)
    with pytest.raises(openai.NotFoundError, match="no such session"):
        client.completions.create(model="tiny", prompt="a", extra_body={"session": "../../etc/passwd"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "`temperature` is not allowed"),
        ({"temperature": 1e-9}, "must be 0 or at least 1e-06"),
        ({"top_p": 0}, "`top_p` is not allowed"),
        ({"n": 10**6}, "`n` asks for 1000000; this server allows at most 64"),
        ({"max_tokens": 10**9}, "`max_tokens` asks for 1000000000; this server allows at most 65536"),
        ({"max_tokens": 10**30}, "`max_tokens` is not allowed"),
        ({"max_tokens": 0}, "there is nothing to do"),
        ({"max_tokens": 60_000, "logprobs": 5}, "`logprobs` asks for 60000"),
        ({"presence_penalty": 0.5}, "`presence_penalty` is not allowed"),
        ({"best_of": 3}, "`best_of` is not allowed"),
        ({"stop": ["a"] * 5}, "`stop` is not allowed"),
        ({"stop": ""}, "`stop` is not allowed"),
        ({"seed": 1.5}, "`seed` is not allowed"),
        ({"extra_body": {"unknown": 1}}, "`unknown` is not allowed"),
        ({"prompt": [[1, 256]]}, "`prompt` has the token 256; it must be from 0 to 255"),
        ({"prompt": []}, "`prompt` is an empty list"),
    ],
)
def test_arguments_out_of_range_are_refused(client, arguments, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**{"model": "tiny", "prompt": "a"} | arguments)


def test_chat_is_refused_with_the_address_to_use(client):
    with pytest.raises(openai.NotFoundError, match=r"use /v1/completions\."):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
