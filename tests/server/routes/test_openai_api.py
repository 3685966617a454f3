"""/v1/models and /v1/completions, used by OpenAI's own client."""

import openai
import pytest
import torch
from model_cases import tiny_model
from running_server import running_server

from hf_recurrent.generation.sampling import Sampling
from hf_recurrent.server.sampling import LogitChanges, TokenSource, choose_tokens


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


def test_a_route_that_the_documentation_names_as_missing(server):
    reply = server.request("POST", "/v1/embeddings", {"model": "tiny", "input": "a"})
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


def test_a_stream_has_an_event_for_every_token_when_asked(client):
    arguments = {"model": "tiny", "prompt": "caf", "max_tokens": 60, "seed": 1, "n": 2, "logprobs": 0}
    whole = client.completions.create(**arguments)
    options = {"every_token": True}
    pieces = [
        piece.choices[0] for piece in client.completions.create(**arguments, stream=True, stream_options=options)
    ]
    for choice in whole.choices:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert [token for piece in own for token in piece.logprobs.tokens] == choice.logprobs.tokens
        assert {len(piece.logprobs.tokens) for piece in own[:-1]} == {1} and len(own[-1].logprobs.tokens) <= 1
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [choice.finish_reason]


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
    ("arguments", "message", "param", "code"),
    [
        ({"temperature": -1}, "`temperature` is -1; it must be at least 0", "temperature", "decimal_below_min_value"),
        ({"temperature": 1e-9}, "must be 0 or at least 1e-06", "temperature", "invalid_value"),
        ({"top_p": 1.5}, "`top_p` is 1.5; it must be at most 1", "top_p", "decimal_above_max_value"),
        ({"n": 10**6}, "`n` asks for 1000000; this server allows at most 64", "n", "integer_above_max_value"),
        ({"max_tokens": 10**9}, "asks for 1000000000; this server allows at most 65536", "max_tokens",
         "integer_above_max_value"),
        ({"max_tokens": 10**30}, "it must be at most 2147483648", "max_tokens", "integer_above_max_value"),
        ({"max_tokens": 0}, "there is nothing to do", "max_tokens", "invalid_value"),
        ({"max_tokens": 60_000, "logprobs": 5}, "`logprobs` asks for 60000", "logprobs", "integer_above_max_value"),
        ({"presence_penalty": 2.5}, "is 2.5; it must be at most 2", "presence_penalty", "decimal_above_max_value"),
        ({"best_of": 3}, "`best_of` is 3, which is not supported; only 1 is", "best_of", "unsupported_value"),
        ({"suffix": "end"}, "`suffix` is \"end\", which is not supported", "suffix", "unsupported_value"),
        ({"stop": ["a"] * 5}, "`stop` has 5 items; at most 4 are allowed", "stop", "array_above_max_length"),
        ({"stop": ""}, "`stop.*` has fewer than 1 characters", "stop[0]", "string_below_min_length"),
        ({"seed": 1.5}, "`seed` is 1.5; it must be an integer", "seed", "invalid_type"),
        ({"logit_bias": {"256": 1}}, "`logit_bias` has the token 256; it must be from 0 to 255", "logit_bias",
         "invalid_value"),
        ({"logit_bias": {"a": 1}}, "has the key 'a'; keys must be token ids", "logit_bias", "invalid_value"),
        ({"extra_body": {"unknown": 1}}, "Unrecognized argument `unknown`", "unknown", "unknown_parameter"),
        ({"extra_body": {"tools": []}}, "`tools` is not supported by this server", "tools", "unsupported_parameter"),
        ({"prompt": [[1, 256]]}, "`prompt` has the token 256; it must be from 0 to 255", "prompt", "invalid_value"),
        ({"prompt": []}, "`prompt` is an empty list", "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "`prompt` must be a string, a list of strings", "prompt", "invalid_type"),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(client, arguments, message, param, code):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "a"} | arguments)
    error = caught.value.body
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_a_missing_model_has_the_code_of_openai(client, server):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    error = caught.value.body
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    error = server.request("POST", "/v1/completions", {"prompt": "a"}).json()["error"]
    assert (error["param"], error["code"]) == ("model", "missing_required_parameter")


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"min_p": 0.3}, {"min_p": 0.3}),
        ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
        ({"repetition_penalty": 1.3, "min_p": 0.01, "top_p": 0.9, "temperature": 0.7},
         {"repetition_penalty": 1.3, "min_p": 0.01, "top_p": 0.9, "temperature": 0.7}),
        ({"logit_bias": {"113": 5.0, "101": -100.0}}, {"sequence_bias": {(113,): 5.0, (101,): -100.0}}),
    ],
)  # fmt: skip
def test_changed_logits_are_those_of_generate(client, model, options, same):
    for n in (1, 2):
        found = client.completions.create(model="tiny", prompt="queue", max_tokens=40, seed=8, n=n, extra_body=options)
        expected = [generated(model, b"queue", 8 + choice, 40, **same) for choice in range(n)]
        assert [choice.text for choice in found.choices] == [text.decode("utf-8", "replace") for text in expected]


def test_top_p_0_takes_the_most_likely_byte(client):
    arguments = {"model": "tiny", "prompt": "queue", "max_tokens": 30}
    greedy = client.completions.create(**arguments, temperature=0).choices[0].text
    assert client.completions.create(**arguments, top_p=0).choices[0].text == greedy


def test_penalties_are_those_of_openai():
    source = TokenSource(Sampling(0.0), 0, LogitChanges(presence_penalty=0.5, frequency_penalty=0.25), 4)
    source.read([3])  # the prompt does not count
    logits = torch.tensor([[1.0, 0.9, 0.1, 0.0]])
    # 1.0 - 0.5 - 0.25 < 0.9, then 0.9 - 0.75 < 1.0 - 0.75, and so on.
    assert [choose_tokens(logits, [source])[0] for _ in range(5)] == [0, 1, 0, 1, 2]
    assert source.changed(logits[0]).tolist() == pytest.approx([0.0, -0.1, -0.65, 0.0])
