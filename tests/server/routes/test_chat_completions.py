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
        running_server(tokenizer=ByteTokenizer(chat_template=CHAT_TEMPLATE), max_new_tokens=500) as server,
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
    assert found.choices[0].message.content == generated(1, 500)
    assert found.choices[0].finish_reason == ("stop" if found.usage.completion_tokens < 500 else "length")


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
        ({"logprobs": True}, "`logprobs` is true, which is not supported", "logprobs", "unsupported_value"),
        ({"max_tokens": 501}, "`max_tokens` asks for 501", "max_tokens", "integer_above_max_value"),
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
