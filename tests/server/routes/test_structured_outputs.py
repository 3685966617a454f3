"""`response_format` and tools: whatever the model, answers parse, and are valid against their schemas."""

import json
import sys
from random import Random

import jsonschema
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_cases import tiny_model
from running_server import running_server

from hf_recurrent import CHAT_TEMPLATE, ByteTokenizer
from hf_recurrent.generation.constraints import ToolCallConstraint
from hf_recurrent.server.routes.tool_calls import CallPart, CallSplitter

pytest.importorskip("xgrammar")
MESSAGES = [{"role": "user", "content": "Hi"}]
some = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def random_model():
    """A model whose distributions are far from flat, so that texts end."""
    torch.manual_seed(0)
    model = tiny_model("memora", hidden_size=8, state_size=8, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight.copy_(2 * torch.randn_like(model.lm_head.weight))
    return model


@pytest.fixture(scope="module")
def server():
    tokenizer = ByteTokenizer(chat_template=CHAT_TEMPLATE)
    with running_server(random_model(), tokenizer=tokenizer, max_new_tokens=50_000) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as found:
        yield found


def answer(client, **arguments):
    arguments = {"model": "tiny", "messages": MESSAGES, "max_tokens": 600} | arguments
    return client.chat.completions.create(**arguments).choices


def json_schema(schema, name: str = "form") -> dict:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def tool(name: str, parameters: dict) -> dict:
    return {"type": "function", "function": {"name": name, "description": "does it", "parameters": parameters}}


_leaves = st.sampled_from([
    {"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"enum": ["é", 1, None]}, {"const": "日"},
    {"type": "integer", "minimum": -3, "maximum": 40}, {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]{1,3}$"}, {"type": "number"},
])  # fmt: skip


def _larger(inner):
    names = st.sampled_from(["a", "b", "été", 'x"y'])
    objects = st.dictionaries(names, inner, max_size=3).map(
        lambda found: {"type": "object", "properties": found, "required": [*found], "additionalProperties": False}
    )
    arrays = inner.map(lambda item: {"type": "array", "items": item, "maxItems": 3})
    return objects | arrays | st.lists(inner, min_size=1, max_size=2).map(lambda found: {"anyOf": found})


schemas = st.recursive(_leaves, _larger, max_leaves=5)
objects = st.dictionaries(st.sampled_from(["a", "b"]), schemas, max_size=2).map(
    lambda found: {"type": "object", "properties": found, "required": [*found], "additionalProperties": False}
)


@some
@given(schemas, st.integers(0, 999), st.sampled_from([3, 600]))
def test_answers_are_valid_or_cut(client, schema, seed, limit):
    for choice in answer(client, response_format=json_schema(schema), seed=seed, n=2, max_tokens=limit):
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
        else:
            assert choice.finish_reason == "length"


@some
@given(objects, objects, st.integers(0, 999))
def test_calls_are_valid_or_cut(client, first, second, seed):
    tools = [tool("first", first), tool("second", second)]
    (choice,) = answer(client, tools=tools, tool_choice="required", seed=seed)
    (call,) = choice.message.tool_calls
    if choice.finish_reason == "tool_calls":
        schema = {"first": first, "second": second}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert not choice.message.content
    else:
        assert choice.finish_reason == "length"


def test_json_object_is_an_object_also_in_a_stream_and_without_a_chat(client):
    for seed in range(5):
        arguments = {"response_format": {"type": "json_object"}, "seed": seed, "temperature": 0.7}
        (choice,) = answer(client, **arguments)
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        pieces = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=600, stream=True, **arguments
        )
        assert "".join(piece.choices[0].delta.content for piece in pieces) == choice.message.content
    schema = {"enum": ["yes", "no"]}
    found = client.completions.create(
        model="tiny", prompt="Is it?", extra_body={"response_format": json_schema(schema)}
    )
    assert found.choices[0].text in ('"yes"', '"no"')


def test_biases_apply_within_the_constraint_and_greedy_takes_the_best_allowed(client):
    form = json_schema({"enum": ["a", "b"]})
    assert answer(client, response_format=form, logit_bias={str(ord("b")): 100})[0].message.content == '"b"'
    assert answer(client, response_format=form, logit_bias={str(ord("z")): 100}, temperature=0)[0].message.content in (
        '"a"', '"b"',
    )  # fmt: skip


def test_named_and_no_tools(client):
    tools = [tool(name, {"type": "object", "additionalProperties": False}) for name in ("first", "second")]
    choice = {"type": "function", "function": {"name": "second"}}
    (found,) = answer(client, tools=tools, tool_choice=choice)
    assert [(call.function.name, call.function.arguments) for call in found.message.tool_calls] == [("second", "{}")]
    (found,) = answer(client, tools=tools, tool_choice="none")
    assert found.message.tool_calls is None and found.finish_reason in ("stop", "length")


def test_a_stream_of_calls_and_the_way_back(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    arguments = {"tools": [tool("f", schema)], "tool_choice": "required", "seed": 1}
    (whole,) = answer(client, **arguments)
    pieces = [piece.choices[0] for piece in client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=600, stream=True, stream_options={"every_token": True}, **arguments
    )]  # fmt: skip
    calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    assert {call.index for call in calls} == {0} and [call.function.name for call in calls if call.id] == ["f"]
    assert "".join(call.function.arguments for call in calls) == whole.message.tool_calls[0].function.arguments
    assert pieces[-1].finish_reason == whole.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "3"}
    after = client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, whole.message, result], tools=arguments["tools"], max_tokens=5
    )
    new = len("\0tool\n3\0assistant\n") + 1  # the state after the call is used: the template writes it as it came
    assert after.usage.prompt_tokens - after.usage.prompt_tokens_details.cached_tokens <= new


@some
@given(objects, st.binary(max_size=8), st.integers(0, 999), st.booleans())
def test_calls_within_a_free_text_are_valid(schema, text, seed, is_single):
    """The text is any bytes; once a call begins, only a valid one is allowed."""
    follower = ToolCallConstraint({"f": schema}, is_single=is_single).follow()
    random, text = Random(seed), text.replace(b"\0", b"") + b"<tool_call>"
    for byte in text:
        assert follower.allowed()[byte] and follower.allowed()[0]
        follower.add(byte)
    assert not follower.allowed()[0]
    for _ in range(3000):
        allowed = follower.allowed().nonzero()[:, 0].tolist()
        # Closing bytes first, so that texts end soon.
        byte = next((byte for byte in b'"}]' if byte in allowed and random.random() < 0.4), random.choice(allowed))
        follower.add(byte)
        text += bytes([byte])
        if text.endswith(b"</tool_call>"):
            break
    else:
        return
    begin, *calls = [part for part in CallSplitter().feed(text.decode("utf-8", "replace"), True) if part.index == 0]
    assert begin.name == "f"
    jsonschema.validate(json.loads("".join(part.text for part in calls)), schema)
    assert follower.allowed()[0] and bool(follower.allowed()[ord("a")]) != is_single


@pytest.mark.parametrize(
    ("arguments", "message", "param"),
    [
        ({"response_format": {"type": "xml"}}, '"xml", which is not supported', "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "which needs it", "response_format"),
        ({"response_format": json_schema({"type": "integer"}, "a b")}, "pattern", "response_format.json_schema.name"),
        ({"response_format": json_schema({"type": "integer", "multipleOf": 3})}, "cannot be enforced",
         "response_format"),
        ({"response_format": json_schema({"type": "word"})}, "`schema.type` is 'word'", "response_format"),
        ({"response_format": json_schema(False)}, "cannot be enforced", "response_format"),
        ({"response_format": json_schema({"$ref": "#/$defs/x"})}, "cannot be enforced", "response_format"),
        ({"response_format": json_schema({"enum": ["a" * 70_000]})}, "at most 65536", "response_format"),
        ({"response_format": json_schema({"type": "string", "pattern": "a{9999}"})}, "repeats", "response_format"),
        ({"response_format": json_schema({"type": "object", "properties": {str(k): {} for k in range(300)}})},
         "300 properties", "response_format"),
        ({"tools": [tool("f", {"type": "object", "allOf": []})]}, "`f.parameters` has 'allOf'", "tools"),
        ({"tools": [tool("f", {}), tool("f", {})]}, "two functions of the same name", "tools"),
        ({"tools": [tool("a b", {})]}, "pattern", "tools[0].function.name"),
        ({"tools": [tool("f", {})], "response_format": {"type": "json_object"}}, "does not go with `tools`", "tools"),
        ({"tool_choice": "required"}, "needs `tools`", "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(server, arguments, message, param):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5} | arguments
    reply = server.request("POST", "/v1/chat/completions", body)
    assert reply.status == 400 and message in reply.error() and reply.json()["error"]["param"] == param


def test_nested_schemas_end_with_an_error(server):
    schema: dict = {"type": "integer"}
    for _ in range(150):
        schema = {"type": "array", "items": schema}
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "response_format": json_schema(schema)}
    assert server.request("POST", "/v1/chat/completions", body).status in (200, 400)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5}
    with running_server(tokenizer=ByteTokenizer(chat_template=CHAT_TEMPLATE)) as server:
        for wrong in (
            {"response_format": {"type": "json_object"}},
            {"tools": [tool("g", {})], "tool_choice": "required"},
        ):
            reply = server.request("POST", "/v1/chat/completions", body | wrong)
            assert reply.status == 400 and "pip install 'hf-recurrent[constraints]'" in reply.error()
        assert server.post("/v1/chat/completions", body | {"tools": [tool("g", {})]})["choices"]


# ---- The text of calls


def split(text: str, cuts: set[int]) -> list:
    splitter, parts, begin = CallSplitter(), [], 0
    for end in [*sorted(cuts), len(text)]:
        parts += splitter.feed(text[begin:end], end == len(text))
        begin = end
    content = "".join(part.text for part in parts if part.index is None)
    calls: dict = {}
    for part in parts:
        if part.index is not None:
            name, arguments = calls.get(part.index, (None, ""))
            calls[part.index] = name or part.name, arguments + part.text
    return [content, *calls.values()]


_ARGUMENTS = ["{}", '{"a": "}\\n</tool_call>"}', '{"x": {"y": [1, "<tool_call>"]}}', '{"s": "}}</tool_call>"}']
_texts = st.sampled_from(["", "Hi ", "a < b", "<tool", "</tool_call>", "{}"])
_calls = st.tuples(st.sampled_from(["f", "gé"]), st.sampled_from(_ARGUMENTS), st.sampled_from(["\n", "", " \n"]))


@settings(max_examples=300, deadline=None)
@given(_texts, st.lists(st.tuples(_calls, _texts), max_size=3), st.sets(st.integers(0, 200)))
def test_calls_are_found_wherever_the_text_is_cut(begin, parts, cuts):
    text, content, calls = begin, begin, []
    for (name, arguments, space), after in parts:
        text += f'<tool_call>{space}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{space}</tool_call>{after}'
        content += after
        calls.append((name, arguments))
    assert split(text, {cut for cut in cuts if cut < len(text)}) == [content, *calls]


def test_what_is_no_call_is_text():
    for text in ("<tool_call>hello", '<tool_call>{"name": 3}</tool_call>', "<tool_call>" + "x" * 500):
        assert split(text, {3, 14}) == [text]
    assert CallSplitter().feed('<tool_call>\n{"name": "f", "arguments": {"a": 1', True)[-1] == CallPart('{"a": 1', 0)
