"""/v1/chat/completions, used by OpenAI's own client."""

import openai
import pytest
import torch
from model_cases import tiny_model
from running_server import running_server

from hf_recurrent import CHAT_TEMPLATE, ByteTokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße"}]
CALL = {"name": "f", "arguments": "3"}
PROMPT = "system\nBe brief.\0user\nGrüße\0assistant\n".encode()


@pytest.fixture(scope="module")
def client():
    with (
        running_server(
            tokenizer=ByteTokenizer(chat_template=CHAT_TEMPLATE), max_new_tokens=1000, max_scored=600
        ) as server,
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


def generated(seed: int, new: int) -> str:
    model, ids = tiny_model("memora"), torch.tensor([list(PROMPT)])
    torch.manual_seed(seed)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0}
    output = model.generate(ids, max_new_tokens=new, **options)[0, len(PROMPT) :]
    return bytes(token for token in output.tolist() if token).decode("utf-8", "replace")


def test_an_answer_follows_the_chat_template(client):
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=4, max_completion_tokens=30, n=2)
    assert [choice.message.content for choice in found.choices] == [generated(4, 30), generated(5, 30)]
    assert {choice.message.role for choice in found.choices} == {"assistant"}
    assert (found.object, found.usage.prompt_tokens) == ("chat.completion", len(PROMPT))
    assert found.usage.total_tokens == len(PROMPT) + found.usage.completion_tokens
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}]
    again = client.chat.completions.create(model="tiny", messages=parts + MESSAGES[1:], seed=4, max_tokens=30)
    assert again.choices[0].message.content == found.choices[0].message.content


def test_an_answer_without_a_limit_ends_at_the_end_byte(client):
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1)
    assert found.choices[0].message.content == generated(1, 1000)
    assert found.choices[0].finish_reason == ("stop" if found.usage.completion_tokens < 1000 else "length")


@pytest.mark.parametrize("every_token", [False, True])
def test_a_stream_is_the_same_answer(client, every_token):
    arguments = {"model": "tiny", "messages": MESSAGES, "seed": 2, "max_tokens": 60, "n": 2}
    whole = client.chat.completions.create(**arguments)
    options = {"include_usage": True, "every_token": every_token}
    pieces = list(client.chat.completions.create(**arguments, stream=True, stream_options=options))
    assert {piece.object for piece in pieces} == {"chat.completion.chunk"}
    assert pieces[-1].usage == whole.usage and not pieces[-1].choices
    for choice in whole.choices:
        own = [piece.choices[0] for piece in pieces if piece.choices and piece.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant" and not own[0].delta.content
        assert "".join(piece.delta.content for piece in own) == choice.message.content
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [choice.finish_reason]


def reference_logprobs(prompt: bytes, new: bytes) -> torch.Tensor:
    """Log-probabilities (T, V) of the model in float64, of the new bytes."""
    model = tiny_model("memora").double()
    ids = torch.tensor([list(prompt + new)])
    with torch.no_grad():
        return model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def test_logprobs_are_those_of_the_model_in_openais_form(client):
    arguments = {"model": "tiny", "messages": MESSAGES, "seed": 4, "max_tokens": 30, "n": 2, "logprobs": True}
    arguments["logit_bias"] = {"0": -100}  # log-probabilities are those before it
    found = client.chat.completions.create(**arguments, top_logprobs=3)
    for choice in found.choices:
        content = choice.logprobs.content
        new = bytes(byte for token in content for byte in token.bytes)
        assert len(new) == len(content) == 30 and choice.logprobs.refusal is None
        assert choice.message.content == new.decode("utf-8", "replace")
        expected = reference_logprobs(PROMPT, new)
        best = expected.topk(3)
        for place, token in enumerate(content):
            assert token.token == (chr(new[place]) if new[place] < 128 else f"\\x{new[place]:02x}")
            assert token.logprob == pytest.approx(float(expected[place, new[place]]), abs=1e-5)
            assert [each.logprob for each in token.top_logprobs] == pytest.approx(
                best.values[place].tolist(), abs=1e-5
            )
            assert [each.bytes for each in token.top_logprobs] == [[byte] for byte in best.indices[place].tolist()]
    plain = client.chat.completions.create(**arguments)
    for choice, other in zip(found.choices, plain.choices, strict=True):
        assert [token.logprob for token in choice.logprobs.content] == [t.logprob for t in other.logprobs.content]
        assert all(token.top_logprobs == [] for token in other.logprobs.content)
    options = {"stream": True, "stream_options": {"every_token": True}}
    pieces = list(client.chat.completions.create(**arguments, top_logprobs=3, **options))
    for choice in found.choices:
        own = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert [token for each in own if each.logprobs for token in each.logprobs.content] == choice.logprobs.content
        assert max(len(each.logprobs.content) for each in own if each.logprobs) == 1
    none = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, logprobs=False)
    assert none.choices[0].logprobs is None


def test_an_answer_with_logprobs_and_without_a_limit_ends_at_the_limit_of_logprobs(client):
    free = {str(byte): 100 for byte in b"abc"}
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1, logprobs=True, logit_bias=free)
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (600, "length")


@pytest.mark.parametrize(
    ("arguments", "message", "param", "code"),
    [
        ({"messages": []}, "`messages` has 0 items; at least 1 are needed", "messages", "array_below_min_length"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "\"bot\", which is not supported", "messages[0].role",
         "unsupported_value"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": CALL}]}]},
         "must be a JSON object in a string", "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ({"messages": [{"role": "user"}]}, r"`messages\[0\]\.content` is missing", "messages[0].content",
         "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "which is not supported",
         "messages[0].content[0].type", "unsupported_value"),
        ({"functions": []}, "`functions` is not supported", "functions", "unsupported_parameter"),
        ({"top_logprobs": 3}, "`top_logprobs` needs `logprobs`", "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "must be at most 20", "top_logprobs", "integer_above_max_value"),
        ({"logprobs": True, "max_tokens": 500, "n": 2}, "`logprobs` asks for 1000", "logprobs",
         "integer_above_max_value"),
        ({"max_tokens": 1001}, "`max_tokens` asks for 1001", "max_tokens", "integer_above_max_value"),
    ],
)  # fmt: skip
def test_wrong_messages_and_arguments_are_named(client, arguments, message, param, code):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | arguments)
    assert (caught.value.body["param"], caught.value.body["code"]) == (param, code)


def test_a_template_may_refuse_messages():
    tokenizer = ByteTokenizer(chat_template="{{ raise_exception('The first message must be of the user.') }}")
    with running_server(tokenizer=tokenizer) as server:
        reply = server.request("POST", "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES})
    assert reply.status == 400 and "`messages` is refused by the chat template: The first message" in reply.error()


def test_a_base_model_is_no_assistant():
    with running_server() as server:
        reply = server.request("POST", "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES})
    assert reply.status == 404 and "is not an assistant: it has no chat template" in reply.error()
    assert reply.json()["error"]["param"] == "model" and "Use /v1/completions." in reply.error()
