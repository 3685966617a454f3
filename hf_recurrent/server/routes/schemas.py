"""The bodies of requests. Values of other types, unknown fields, NaN and infinities are refused.

`errors.py` turns the errors into sentences.
"""

import base64
import binascii
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from hf_recurrent.argument_checks import LEAST_TEMPERATURE
from hf_recurrent.generation.sampling import Sampling
from hf_recurrent.server.sampling import LogitChanges

_MOST_SEED = 2**63 - 1 - (1 << 16)  # further choices take the next seeds
MOST_TOKENS = 1 << 31
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Stops = Annotated[list[_Stop], Field(max_length=4), BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Id = Annotated[str, Field(max_length=100)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
ANY_OBJECT = {"type": "object", "additionalProperties": True}


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SamplingFields(Body):
    """Sampling of new text."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=_MOST_SEED)] | None = None
    stop: _Stops | None = None

    @field_validator("temperature")
    @classmethod
    def _can_divide(cls, value: float | None) -> float | None:
        if value and value < LEAST_TEMPERATURE:
            raise ValueError(f"it must be 0 or at least {LEAST_TEMPERATURE}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _has_tokens(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if wrong := next((key for key in value or () if not (key.isascii() and key.isdigit())), None):
            raise ValueError(f"it has the key {wrong[:40]!r}; keys must be token ids")
        return value

    @property
    def sampling(self) -> Sampling:
        """With the defaults of OpenAI: temperature 1, and every token."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if self.top_p == 0:  # of the most likely token alone
            temperature = 0.0
        return Sampling(temperature, max(self.top_k or 0, 0), self.top_p or 1.0, self.min_p or 0.0)

    @property
    def changes(self) -> LogitChanges:
        """Penalties and biases."""
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        repetition = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        return LogitChanges(self.presence_penalty or 0.0, self.frequency_penalty or 0.0, repetition, bias)

    def seed_or_random(self) -> int:
        return secrets.randbits(62) if self.seed is None else self.seed


class PieceOptions(Body):
    """`stream_options` of a session's generation."""

    every_token: bool = False  # by default, an event has the bytes of 20 ms or more


class StreamOptions(PieceOptions):
    """`stream_options` of a completion."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """A schema and its name."""

    name: Name
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None  # a schema is always enforced


class ResponseFormat(Body):
    """The form of new text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("`json_schema` belongs to the type 'json_schema', which needs it")
        return self

    @property
    def schema(self) -> dict[str, Any] | bool | None:
        """The schema of the text; None for a free text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class TextRequest(SamplingFields):
    """Arguments of all of OpenAI's requests. Those that are not supported may be given with their neutral value."""

    model: str
    stream: bool | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class ChoicesRequest(TextRequest):
    """Arguments of requests for one or several texts."""

    n: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(ChoicesRequest):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]] = ""
    session: _Id | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class SessionRequest(Body):
    """`POST /v1/sessions`."""

    source: Annotated[_Id | None, Field(alias="from")] = None
    learns: bool | None = None


class ChangeRequest(Body):
    """`PATCH /v1/sessions/ID`."""

    learns: bool


class MarkRequest(Body):
    """`POST /v1/sessions/ID/marks` and `.../rewind`."""

    mark: Name


class CheckpointRequest(Body):
    """`POST /v1/learning/unlearn`."""

    checkpoint: Annotated[str, Field(max_length=100)]


class ReadRequest(Body):
    """`POST /v1/sessions/ID/read`: a text, or any bytes in base64."""

    text: str | None = None
    base64: str | None = None
    bits: bool = True

    @field_validator("base64")
    @classmethod
    def _is_base64(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                raise ValueError("it is not valid base64") from None
        return value

    @model_validator(mode="after")
    def _has_one(self) -> "ReadRequest":
        if (self.text is None) == (self.base64 is None):
            raise ValueError("give either `text` or `base64`")
        return self

    @property
    def content(self) -> str | bytes:
        return self.text if self.base64 is None else base64.b64decode(self.base64)


class GenerateRequest(SamplingFields):
    """`POST /v1/sessions/ID/generate`."""

    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 16
    bits: bool = False
    stream: bool = False
    stream_options: PieceOptions = PieceOptions()
