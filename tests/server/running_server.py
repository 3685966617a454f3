"""A server on a loopback port, in a thread of the test's process."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from model_cases import tiny_model

from hf_recurrent import ByteTokenizer
from hf_recurrent.server.routes.app import build_app, http_server, listen
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.settings import ServerLimits, ServerSettings
from hf_recurrent.server.scheduler import Scheduler
from hf_recurrent.server.serving import serving_scheduler


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> str:
        """The message of an error, which has to have OpenAI's form."""
        error = self.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and self.status >= 400
        assert "Traceback" not in error["message"]
        return error["message"]


class Client:
    """Requests to the server at a port."""

    def __init__(self, port: int, scheduler: Scheduler | None = None, headers: dict[str, str] | None = None):
        self.port, self.scheduler, self._headers = port, scheduler, headers or {}

    def request(
        self, method: str, path: str, body: dict | bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, data, {"content-type": "application/json"} | self._headers | (headers or {}))
        response = connection.getresponse()
        reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        connection.close()
        return reply

    def get(self, path: str) -> Any:
        return self._checked(self.request("GET", path))

    def post(self, path: str, body: dict | bytes | None = None) -> Any:
        return self._checked(self.request("POST", path, body))

    def complete(self, **body) -> Any:
        return self.post("/v1/completions", {"model": "tiny"} | body)

    def new_session(self, **body) -> str:
        return self.post("/v1/sessions", body)["id"]

    def read(self, session: str, text: str, **body) -> Any:
        return self.post(f"/v1/sessions/{session}/read", {"text": text} | body)

    def generate(self, session: str, **body) -> Any:
        return self.post(f"/v1/sessions/{session}/generate", body)

    def stream(self, body: dict, path: str = "/v1/completions") -> Iterator[Any]:
        """The events of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | self._headers)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
        connection.close()

    @staticmethod
    def _checked(reply: Reply) -> Any:
        assert reply.status == 200, reply.body
        return reply.json()


@contextmanager
def running_server(
    model=None,
    *,
    tokenizer=None,
    session_dir: Path | None = None,
    learning=None,
    options: dict | None = None,
    **settings,
) -> Iterator[Client]:
    """A server of a tiny model.

    Args:
        options: of `serving_scheduler`.
        settings: fields of `ServerSettings` and `ServerLimits`.
    """
    torch.set_num_threads(1)
    model = model or tiny_model("memora")
    tokenizer = tokenizer or ByteTokenizer()
    started = serving_scheduler(model, tokenizer, session_dir=session_dir, learning=learning, **options or {})
    with started as scheduler, listen("127.0.0.1", 0) as listener:
        limits = {field.name: settings.pop(field.name) for field in fields(ServerLimits) if field.name in settings}
        settings = {"name": "tiny", "limits": ServerLimits(**limits)} | settings
        served = ServedModel(scheduler, tokenizer, ServerSettings(**settings))
        server = http_server(served, build_app(served))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield Client(listener.getsockname()[1], scheduler)
        finally:
            server.should_exit = True
            thread.join()
