"""The bodies of chats: messages, tools, and which of them may be called."""

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.schemas import ANY_OBJECT, MOST_TOKENS, Body, ChoicesRequest, Name, TopLogprobs


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


def as_parts(content: object, kind: str = "text") -> object:
    """A text as the list of its one part."""
    return [{"type": kind, "text": content}] if isinstance(content, str) else content


class CalledFunction(Body):
    """The function of a call, with its arguments as JSON."""

    name: Name
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _are_json(cls, value: str) -> str:
        try:
            found = json.loads(value or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError("it must be a JSON object in a string")
        return value


class ToolCall(Body):
    """A call of a tool in an earlier answer."""

    id: Annotated[str, Field(max_length=100)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    """A message: a text, or its parts; calls of tools, or the result of one. Answers have the last fields."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = None
    content: Annotated[list[TextPart] | None, BeforeValidator(as_parts), Field(validate_default=True)] = None
    name: str | None = None
    tool_call_id: Annotated[str, Field(max_length=100)] | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Literal[None] = None
    function_call: Literal[None] = None

    @field_validator("content")
    @classmethod
    def _is_given(cls, value: list[TextPart] | None, info: Any) -> list[TextPart] | None:
        if value is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return value

    def for_template(self) -> dict[str, Any]:
        """As chat templates have it."""
        message: dict[str, Any] = {"role": self.role, "content": "".join(part.text for part in self.content or ())}
        if self.tool_calls:
            calls = [(call.id, call.function.name, call.function.arguments) for call in self.tool_calls]
            message["tool_calls"] = [template_call(*call) for call in calls]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


def template_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as chat templates have it: the arguments are an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.loads(arguments or "{}")}}


class Function(Body):
    """A function that may be called."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # a schema is always enforced


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class ToolChoice(NamedTuple):
    """Which tools may be called: the mode is "none", "auto" or "required"; the name is of the only one."""

    mode: str
    name: str | None = None

    def as_response(self) -> str | dict[str, str]:
        """As responses show it."""
        return self.mode if self.name is None else {"type": "function", "name": self.name}


def as_tool_choice(value: object) -> object:
    """`tool_choice` of chats and of responses."""
    if value in ("none", "auto", "required"):
        return ToolChoice(str(value))
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return ToolChoice("required", function["name"])
    raise ValueError("it must be 'none', 'auto', 'required' or an object that names a function")


Choice = Annotated[Any, BeforeValidator(as_tool_choice)]


class Tools:
    """The tools of a request; raises an ApiError if the choice is none of the functions."""

    def __init__(self, functions: list[Function], choice: ToolChoice | None, is_parallel: bool | None):
        self.choice, self.is_parallel = choice or ToolChoice("auto"), is_parallel is not False
        self.definitions = [
            {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}
            for function in functions
        ]
        self.schemas = {function.name: function.parameters or ANY_OBJECT for function in functions}
        if len(self.schemas) < len(functions):
            raise ApiError(400, "`tools` has two functions of the same name.", "tools", "invalid_value")
        if self.choice.name is not None:
            if self.choice.name not in self.schemas:
                message = f"`tool_choice` is {self.choice.name!r}, which is not one of the `tools`."
                raise ApiError(400, message, "tool_choice", "invalid_value")
            self.schemas = {self.choice.name: self.schemas[self.choice.name]}
        if self.choice.mode == "required" and not functions:
            raise ApiError(400, "`tool_choice` needs `tools`.", "tool_choice", "invalid_value")

    @property
    def may_call(self) -> bool:
        return bool(self.schemas) and self.choice.mode != "none"


class ChatRequest(ChoicesRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
