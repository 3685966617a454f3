"""The body of `POST /v1/responses`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from hf_recurrent.server.routes.chat_schemas import CalledFunction, Choice, Function, as_parts, template_call
from hf_recurrent.server.routes.schemas import (
    ANY_OBJECT,
    MOST_TOKENS,
    Body,
    Name,
    PieceOptions,
    TextRequest,
    TopLogprobs,
)

_Id = Annotated[str, Field(max_length=100)]
_Status = Literal["in_progress", "completed", "incomplete"]


class ContentPart(Body):
    """A part of a message. The last fields come back from answers."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_Content = Annotated[list[ContentPart], BeforeValidator(lambda value: as_parts(value, "input_text"))]


class InputItem(Body):
    """A message, a call of a tool, or its result."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content | None = None
    call_id: _Id | None = None
    name: str | None = None
    arguments: str | None = None
    output: _Content | None = None
    id: _Id | None = None
    status: _Status | None = None
    phase: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "InputItem":
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments")}
        needed["function_call_output"] = ("call_id", "output")
        if missing := [name for name in needed[self.type] if getattr(self, name) is None]:
            raise ValueError(f"an item of the type {self.type!r} needs `{missing[0]}`")
        if self.type == "function_call":
            CalledFunction(name=self.name, arguments=self.arguments)
        return self

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the item to messages as chat templates have them; a call belongs to the answer before it."""
        if self.type == "message":
            messages.append({"role": self.role, "content": "".join(part.text for part in self.content)})
        elif self.type == "function_call_output":
            content = "".join(part.text for part in self.output)
            messages.append({"role": "tool", "content": content, "tool_call_id": self.call_id})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(template_call(self.call_id, self.name, self.arguments))


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(Body):
    """`text.format`: a [`ResponseFormat`] without a level."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "TextFormat":
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("the type 'json_schema' needs `name` and `schema`")
        return self

    @property
    def schema(self) -> dict[str, Any] | bool | None:
        """As [`ResponseFormat.schema`]."""
        return self.schema_ if self.type == "json_schema" else ANY_OBJECT if self.type == "json_object" else None


class TextOptions(Body):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseTool(Function):
    """A function that may be called."""

    type: Literal["function"]


class ResponseStreamOptions(PieceOptions):
    """`stream_options` of a response."""

    include_obfuscation: bool = False


class ResponsesRequest(TextRequest):
    """`POST /v1/responses`."""

    input: Annotated[list[InputItem], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: str | None = None
    previous_response_id: _Id | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: TopLogprobs | None = None
    # These change no text.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled", "auto"] | None = None  # no text is too long

    @property
    def logprobs(self) -> int | None:
        """Number of most likely tokens to list for each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.include or self.top_logprobs else None
