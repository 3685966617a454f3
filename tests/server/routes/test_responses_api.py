"""/v1/responses, used by OpenAI's own client."""

import json

import openai
import pytest
import torch
from model_cases import tiny_model
from running_server import running_server

from hf_recurrent import CHAT_TEMPLATE, ByteTokenizer
from hf_recurrent.server.job import Job, Request
from hf_recurrent.server.routes.response_progress import ResponseProgress
from hf_recurrent.server.routes.response_schemas import ResponsesRequest
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.settings import ServerSettings

TOKENIZER = ByteTokenizer(chat_template=CHAT_TEMPLATE)
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
LETTERS = {str(letter): 100 for letter in b"abcdefgh ,."}


def client_of(server, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=api_key, max_retries=0)


@pytest.fixture(scope="module")
def server():
    with running_server(tokenizer=TOKENIZER, max_new_tokens=3000) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as found:
        yield found


def create(client, given, **arguments):
    return client.responses.create(**{"model": "tiny", "input": given, "max_output_tokens": 30} | arguments)


def generated(prompt: str, seed: int, new: int) -> str:
    model, ids = tiny_model("memora"), torch.tensor([list(prompt.encode())])
    torch.manual_seed(seed)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0}
    output = model.generate(ids, max_new_tokens=new, **options)[0, ids.shape[1] :]
    return bytes(token for token in output.tolist() if token).decode("utf-8", "replace")


def test_an_answer_follows_the_chat_template(client):
    found = create(client, "Grüße", instructions="Be brief.", extra_body={"seed": 4}, metadata={"a": "b"})
    prompt = "system\nBe brief.\0user\nGrüße\0assistant\n"
    assert found.output_text == generated(prompt, 4, 30) and found.metadata == {"a": "b"}
    assert found.usage.input_tokens == len(prompt.encode()) and found.usage.output_tokens == 30
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Grüße"}]},
    ]
    assert create(client, items, extra_body={"seed": 4}).output_text == found.output_text


def test_the_next_turn_reads_its_new_text_and_equals_a_cold_run(client):
    greedy = {
        "temperature": 0,
        "instructions": "Be brief, and say only what is asked for.",
        "extra_body": {"logit_bias": LETTERS},
    }
    first = create(client, "How are you?", **greedy)
    second = create(client, "And then?", previous_response_id=first.id, **greedy)
    new = len("\0user\nAnd then?\0assistant\n") + 1  # the last byte of the answer was never read
    assert second.usage.input_tokens - second.usage.input_tokens_details.cached_tokens == new
    messages = [
        {"role": "system", "content": greedy["instructions"]}, {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And then?"},
    ]  # fmt: skip
    with running_server(tokenizer=TOKENIZER, options={"prefix_bytes": 0}) as cold, client_of(cold) as other:
        alone = other.chat.completions.create(
            model="tiny", messages=messages, max_tokens=30, temperature=0, extra_body={"logit_bias": LETTERS}
        )
    assert second.output_text == alone.choices[0].message.content
    assert second.usage.input_tokens == alone.usage.prompt_tokens
    third = create(client, "Why?", previous_response_id=second.id)  # without the instructions, another text
    assert third.usage.input_tokens < second.usage.input_tokens + 30


def test_a_stored_state_survives_the_end_of_the_process_and_of_the_other_states(tmp_path):
    with running_server(tokenizer=TOKENIZER, session_dir=tmp_path) as server, client_of(server) as client:
        # Bytes that are not UTF-8, of which the next turn knows more than their text.
        first = create(client, "How are you today?", extra_body={"seed": 1})
        expected = create(client, "Go on", previous_response_id=first.id, extra_body={"seed": 2})
        cached = expected.usage.input_tokens_details.cached_tokens
    for name in tmp_path.glob("prefixes.sqlite*"):
        name.unlink()
    with running_server(tokenizer=TOKENIZER, session_dir=tmp_path) as server, client_of(server) as client:
        found = create(client, "Go on", previous_response_id=first.id, extra_body={"seed": 2})
        assert found.output_text == expected.output_text and client.responses.retrieve(first.id) == first
        assert found.usage.input_tokens_details.cached_tokens == cached > 40
    for state in tmp_path.glob("store/responses/*/*"):
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    with running_server(tokenizer=TOKENIZER, session_dir=tmp_path) as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        assert "hf_recurrent_store_failures_total 1.0" in server.request("GET", "/metrics").body.decode()


def test_a_stream_has_the_events_of_openai(client):
    arguments = {"extra_body": {"seed": 3}, "max_output_tokens": 60}
    whole = create(client, "Hi", **arguments)
    events = list(create(client, "Hi", stream=True, **arguments))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert {*kinds[4:-4]} == {"output_text.delta"} and [e.sequence_number for e in events] == [*range(len(events))]
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == whole.output_text
    last = events[-1].response
    assert client.responses.retrieve(last.id) == last and last.usage.total_tokens == whole.usage.total_tokens
    with client.responses.stream(model="tiny", input="Hi", max_output_tokens=5) as stream:  # OpenAI's own events
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_get_input_items_and_delete(client):
    found = create(client, [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}])
    assert client.responses.retrieve(found.id) == found
    assert [item.content[0].text for item in client.responses.input_items.list(found.id)] == ["Two", "One"]
    later = create(client, "Go on", previous_response_id=found.id)
    client.responses.delete(found.id)
    for missing in (found.id, "resp_unknown", "resp_../../etc/passwd000000000000"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(missing)
    create(client, "Go on", previous_response_id=later.id)  # has all that it needs
    unstored = create(client, "Hi", store=False)
    with pytest.raises(openai.BadRequestError, match="there is no such response") as caught:
        create(client, "Go on", previous_response_id=unstored.id)
    assert caught.value.body["code"] == "previous_response_not_found"


def test_a_response_belongs_to_its_api_key(server, client):
    found = create(client, "Secret")
    with client_of(server, "another") as stranger:
        with pytest.raises(openai.NotFoundError):
            stranger.responses.retrieve(found.id)
        with pytest.raises(openai.BadRequestError):
            create(stranger, "Go on", previous_response_id=found.id)
        with pytest.raises(openai.NotFoundError):
            stranger.responses.delete(found.id)


def test_calls_of_tools_and_their_results(client):
    pytest.importorskip("xgrammar")
    arguments = {"tools": [ADD], "tool_choice": "required", "max_output_tokens": 2000}
    found = create(client, "1 + 2?", **arguments)
    (call,) = found.output
    assert (call.type, call.name, call.status, found.status) == ("function_call", "add", "completed", "completed")
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    after = create(client, result, previous_response_id=found.id, tools=[ADD], tool_choice="none")
    new = len("\0tool\n3\0assistant\n")
    assert after.usage.input_tokens - after.usage.input_tokens_details.cached_tokens <= new + 1
    again = create(
        client, [{"role": "user", "content": "1 + 2?"}, call.model_dump(exclude_none=True), *result], tools=[ADD]
    )
    assert again.usage.input_tokens == after.usage.input_tokens
    events = list(create(client, "1 + 2?", stream=True, **arguments))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2] == "output_item.added" and kinds[-3:] == [
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    deltas = "".join(event.delta for event in events if event.type.endswith("arguments.delta"))
    assert deltas == events[-3].arguments == events[-1].response.output[0].arguments


def test_text_format(client):
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "name": "pair", "schema": ADD["parameters"], "strict": True}
    found = create(client, "Hi", text={"format": form}, max_output_tokens=2000)
    assert found.output_text.startswith('{"a": ') and found.output_text.endswith(('"b": "x"}', '"b": "y"}'))
    assert found.text.format.schema_ == ADD["parameters"]


@pytest.mark.parametrize(
    ("arguments", "message", "param"),
    [
        ({"input": []}, "`input` has 0 items", "input"),
        ({"input": [{"role": "user"}]}, "needs `content`", "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "JSON object",
         "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "which is not supported", "input[0].type"),
        ({"background": True}, "which is not supported", "background"),
        ({"previous_response_id": "resp_x"}, "no such response", "previous_response_id"),
        ({"max_output_tokens": 3001}, "asks for 3001", "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs `name` and `schema`", "text.format"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "not one of the `tools`",
         "tool_choice"),
        ({"tool_choice": "required"}, "needs `tools`", "tool_choice"),
        ({"tool_choice": 3}, "must be 'none', 'auto', 'required'", "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "not supported", "reasoning"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(server, arguments, message, param):
    reply = server.request("POST", "/v1/responses", {"model": "tiny", "input": "Hi"} | arguments)
    assert reply.status == 400 and message in reply.error() and reply.json()["error"]["param"] == param


def test_a_base_model_is_no_assistant():
    with running_server() as server:
        reply = server.request("POST", "/v1/responses", {"model": "tiny", "input": "Hi"})
    assert reply.status == 404 and "is not an assistant: it has no chat template" in reply.error()


def test_logprobs_of_a_response_are_those_of_the_chat(client):
    with_them = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": {"seed": 4}}
    found = create(client, "Grüße", **with_them)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Grüße"}], seed=4, max_tokens=30, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    expected = [token.model_dump() for token in chat.choices[0].logprobs.content]
    assert [each.model_dump() for each in found.output[0].content[0].logprobs] == expected
    assert found.top_logprobs == 2 and client.responses.retrieve(found.id) == found
    events = list(create(client, "Grüße", **with_them, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [each.to_dict() for event in deltas for each in event.logprobs] == expected
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [each.to_dict() for each in done.logprobs] == expected
    assert create(client, "Grüße").output[0].content[0].logprobs == []
    follow = create(client, [item.to_dict() for item in found.output] + [{"role": "user", "content": "a"}])
    assert follow.status == "incomplete"
    with pytest.raises(openai.BadRequestError, match="which is not supported; only"):
        create(client, "a", include=["reasoning.encrypted_content"])


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_logprobs_of_a_response_with_a_call_are_of_its_message_only(server, step):
    text = b'Yes <b> <tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call> \xff done <'
    served = ServedModel(server.scheduler, TOKENIZER, ServerSettings("tiny"))
    body = ResponsesRequest(model="tiny", input="a", top_logprobs=1)
    job = Job(Request([], output_scores=1))
    progress, events = ResponseProgress(served, body, job, 1, may_call=True), []
    for begin in range(0, len(text), step):
        new = text[begin : begin + step]
        job.output += new
        job.output_scores.add(torch.zeros(len(new), 256), [*new])
        job.released = len(job.output)
        job.is_done, job.finish_reason = job.released == len(text), "stop"
        events += json.loads(json.dumps([*progress.take(is_last=job.is_done)]))
    before, call, after = progress.json()["output"]
    assert (call["name"], after["content"][0]["text"]) == ("add", " \ufffd done <")
    tokens = [each["bytes"][0] for item in (before, after) for each in item["content"][0]["logprobs"]]
    assert bytes(tokens) == b"Yes <b>  \xff done <"
    deltas = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert [each["bytes"][0] for each in deltas] == tokens
