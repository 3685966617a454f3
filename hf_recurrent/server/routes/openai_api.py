"""OpenAI's /v1/models, /v1/completions and /v1/chat/completions, with more arguments, such as `session`."""

from itertools import chain

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_recurrent.server.routes.chat_completions import ChatCompletion, chat_as_completion, chat_prompt
from hf_recurrent.server.routes.chat_schemas import ChatRequest, Tools
from hf_recurrent.server.routes.completions import Completion, begin_choices, chat_logprobs, check_completion, respond
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.schemas import CompletionRequest
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.structured_outputs import text_constraint


def openai_routes(served: ServedModel) -> APIRouter:
    routes = APIRouter(prefix="/v1")
    about = {
        "id": served.settings.name,
        "object": "model",
        "created": served.created,
        "owned_by": "hf-recurrent",
        "learns": served.learns,
        "has_chat_template": bool(getattr(served.tokenizer, "chat_template", None)),
    } | served.scheduler.steps.about()

    @routes.get("/models")
    async def list_models() -> dict:
        return {"object": "list", "data": [about]}

    @routes.get("/models/{name:path}")
    async def get_model(name: str) -> dict:
        check_name(served, name)
        return about

    @routes.post("/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> dict | Response:
        check_name(served, body.model)
        functions = [tool.function for tool in body.tools or ()]
        tools = Tools(functions, body.tool_choice, body.parallel_tool_calls)
        completion = chat_as_completion(served, body)
        prompt = chat_prompt(served, [message.for_template() for message in body.messages], tools.definitions)
        check_completion(served, completion, [prompt.tokens])
        constraint = await text_constraint(served, body.response_format, tools=tools)
        choices, readers = await begin_choices(
            served, completion, [prompt.tokens], request, prompt.ends, chat_logprobs, constraint=constraint
        )
        answer = ChatCompletion(completion, choices, [prompt.tokens], readers, tools.may_call)
        return await respond(served, answer, request)

    @routes.post("/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request) -> dict | Response:
        check_name(served, body.model)
        prompts = _prompts(served, body)
        check_completion(served, body, prompts)
        constraint = await text_constraint(served, body.response_format)
        choices, readers = await begin_choices(served, body, prompts, request, constraint=constraint)
        return await respond(served, Completion(body, choices, prompts, readers), request)

    return routes


def check_name(served: ServedModel, name: str) -> None:
    if name != served.settings.name:
        message = f"`model` is {name[:80]!r}; this server has {served.settings.name!r}."
        raise ApiError(404, message, "model", "model_not_found")


def _prompts(served: ServedModel, body: CompletionRequest) -> list[np.ndarray]:
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(400, "`prompt` is an empty list; it must have at least one prompt.", "prompt", "invalid_value")
    if isinstance(given[0], str):
        return [served.encode(prompt, "prompt") for prompt in given]
    served.check_tokens("prompt", chain.from_iterable(given))
    return [np.array(prompt, dtype=np.int64) for prompt in given]
