"""A response in progress: its items, and the events of their growth, as OpenAI's API has them."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from hf_recurrent.server.job import Job
from hf_recurrent.server.routes.completions import CompletionChoice, chat_logprobs
from hf_recurrent.server.routes.response_schemas import ResponsesRequest
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.tool_calls import CallPart, CallSplitter


class ResponseProgress:
    """A response in progress: its id, and the text of the answer so far."""

    def __init__(self, served: ServedModel, body: ResponsesRequest, job: Job, prompt_tokens: int, may_call: bool):
        self.id, self.text, self._body, self._job = f"resp_{secrets.token_urlsafe(24)}", "", body, job
        self._choice = CompletionChoice(served, job, 0, logprobs=body.logprobs, form=chat_logprobs)
        self._splitter = CallSplitter() if may_call else None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not yet part of an item
        self._gap = ""  # white space after a call, which is part of a message if more text follows
        self._prompt_tokens, self._created = prompt_tokens, int(time.time())
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while it grows
        self._events, self._every_token = 0, bool(body.stream_options and body.stream_options.every_token)
        # Only so is it known which tokens belong to a message, and which to a call.
        self._takes_tokens = self._every_token or (may_call and body.logprobs is not None)

    def take(self, is_last: bool) -> Iterator[dict[str, Any]]:
        """The events of the new text."""
        if not self._events:
            yield self._event("response.created", response=self.json())
            yield self._event("response.in_progress", response=self.json())
        while piece := self._choice.take(1 if self._takes_tokens else None):
            self.text += piece["text"]
            self._logprobs += piece["logprobs"] or ()
            is_over = piece["finish_reason"] is not None
            text = [CallPart(piece["text"])]
            for part in text if self._splitter is None else self._splitter.feed(piece["text"], is_over):
                yield from self._grow(part)
            if is_over:
                if not self._output:
                    yield from self._begin_message()
                if self._open is not None and self._open["type"] == "message":  # tokens without a text
                    self._open["content"][0]["logprobs"] += self._logprobs
                yield from self._close(is_whole=self._job.finish_reason == "stop")

    def ending(self) -> dict[str, Any]:
        """The last event."""
        return self._event(f"response.{self._status()}", response=self.json())

    def failure(self, error: dict[str, Any]) -> dict[str, Any]:
        code = error["code"] or error["type"]
        return self._event("error", code=code, message=error["message"], param=error["param"])

    def json(self) -> dict[str, Any]:
        """The response so far."""
        body, job, status = self._body, self._job, self._status()
        new, limit = len(job.output), body.max_output_tokens
        form = body.text and body.text.format
        text = form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
        choice = body.tool_choice
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt_tokens + new,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": limit,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text, "verbosity": "medium"},
            "tool_choice": "auto" if choice is None else choice.as_response(),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if status == "in_progress" else usage,
            "user": body.user,
        }

    def _status(self) -> str:
        if not self._job.is_done:
            return "in_progress"
        return "completed" if self._job.finish_reason == "stop" else "incomplete"

    def _grow(self, part: CallPart) -> Iterator[dict[str, Any]]:
        if part.id is not None:
            yield from self._close(is_whole=True)
            item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "status": "in_progress"}
            yield from self._begin(item | {"call_id": part.id, "name": part.name, "arguments": ""})
        if part.index is not None:
            self._open["arguments"] += part.text
            self._logprobs, self._gap = [], ""
            yield self._item_event("response.function_call_arguments.delta", delta=part.text)
            return
        if self._open is None or self._open["type"] != "message":
            self._gap += part.text
            if self._output and not self._gap.strip():  # between calls
                return
            yield from self._close(is_whole=True)
            yield from self._begin_message()
            part, self._gap = CallPart(self._gap), ""
        if part.text or self._every_token:
            self._open["content"][0]["text"] += part.text
            new, self._logprobs = self._logprobs, []
            self._open["content"][0]["logprobs"] += new
            yield self._item_event("response.output_text.delta", content_index=0, delta=part.text, logprobs=new)

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        item = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "status": "in_progress", "role": "assistant"}
        yield from self._begin(item | {"content": []})
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
        self._open["content"].append(part)
        yield self._item_event("response.content_part.added", content_index=0, part=dict(part))

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._open = item
        self._output.append(item)
        added = item | ({"content": []} if item["type"] == "message" else {})
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=added)

    def _close(self, is_whole: bool) -> Iterator[dict[str, Any]]:
        item, place = self._open, {"content_index": 0}
        if item is None:
            return
        item["status"] = "completed" if is_whole else "incomplete"
        if item["type"] == "message":
            part = dict(item["content"][0])
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._item_event("response.output_text.done", **done, **place)
            yield self._item_event("response.content_part.done", part=part, **place)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=dict(item))
        self._open = None

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._open["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1} | fields
