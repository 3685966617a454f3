"""A client of the sessions of `hf-recurrent serve`, without dependencies; OpenAI's client is for the other routes."""

import base64
import http.client
import json
import selectors
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit


class ServerError(RuntimeError):
    """An answer that is an error, with its HTTP `status`, `code` and `param`."""

    def __init__(self, status: int, error: dict[str, Any]):
        super().__init__(f"{status}: {error.get('message')}")
        self.status, self.code, self.param = status, error.get("code"), error.get("param")


class SessionClient:
    """A server. Several threads may use it, each over a connection of its own.

    Args:
        address: such as `http://127.0.0.1:8000`.
        api_key: of the server.
        timeout: seconds without an answer.

    Raises:
        ValueError: the address is not one of HTTP.
    """

    def __init__(self, address: str, api_key: str | None = None, timeout: float = 600.0):
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"`address` is {address!r}; it must be such as 'http://127.0.0.1:8000'.")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._timeout = parts.hostname, parts.port, timeout
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._threads = threading.local()

    def create(self, learns: bool | None = None) -> "RemoteSession":
        """A new session; with `learns`, the model learns from what it reads."""
        return self._new({} if learns is None else {"learns": learns})

    def session(self, session_id: str) -> "RemoteSession":
        """An existing session."""
        return RemoteSession(self, session_id)

    def from_state(self, data: bytes) -> "RemoteSession":
        """A new session from the content of a state file."""
        return self._new(data, "/from_state")

    def request(self, method: str, path: str, body: dict[str, Any] | bytes | None = None) -> bytes:
        """The body of an answer.

        Raises:
            ServerError: it is an error.
            OSError: the server cannot be reached.
        """
        connection = getattr(self._threads, "connection", None)
        if connection is None or _is_closed(connection):
            connection = self._threads.connection = self._kind(self._host, self._port, timeout=self._timeout)
        return _content(self._send(connection, method, path, body))

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer; to stop it, close the iterator. Raises as [`request`]."""
        connection = self._kind(self._host, self._port, timeout=self._timeout)
        try:
            response = self._send(connection, "POST", path, body)
            if response.status != 200:
                _content(response)
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise ServerError(200, event["error"])
                    yield event
        finally:
            connection.close()

    def _new(self, body: dict[str, Any] | bytes, end: str = "") -> "RemoteSession":
        return RemoteSession(self, json.loads(self.request("POST", f"/v1/sessions{end}", body))["id"])

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | bytes | None
    ) -> http.client.HTTPResponse:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        try:
            connection.request(method, self._prefix + path, data, self._headers | {"content-type": kind})
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise


class RemoteSession:
    """A session of a server, by its id."""

    def __init__(self, client: SessionClient, id: str):
        self.id, self._client = id, client

    def read(self, text: str | bytes, bits: bool = False) -> dict[str, Any]:
        """Read a text: `bytes_read`, and with `bits` the bits of each byte."""
        given = {"text": text} if isinstance(text, str) else {"base64": base64.b64encode(text).decode()}
        return self._post("/read", given | {"bits": bits})

    def generate(self, max_tokens: int = 16, **sampling: Any) -> bytes:
        """New bytes. The arguments are the API's: `temperature`, `seed`, `stop`, `top_p` and others."""
        return base64.b64decode(self._post("/generate", {"max_tokens": max_tokens} | sampling)["base64"])

    def stream(self, max_tokens: int = 16, **sampling: Any) -> Iterator[bytes]:
        """New bytes as they come; an iterator that is closed stops the generation."""
        body = {"max_tokens": max_tokens, "stream": True} | sampling
        for event in self._client.stream(self._path("/generate"), body):
            yield base64.b64decode(event["base64"])

    def fork(self) -> "RemoteSession":
        """Another session at the same place."""
        return RemoteSession(self._client, self._post("/fork")["id"])

    def mark(self, name: str) -> None:
        """Remember this place."""
        self._post("/marks", {"mark": name})

    def rewind(self, name: str) -> None:
        """Go back to a mark."""
        self._post("/rewind", {"mark": name})

    def stop(self) -> bool:
        """Stop what the session does; False if it does nothing."""
        return self._post("/stop")["stopped"]

    def state(self) -> bytes:
        """The content of a state file, for `SessionClient.from_state` and `generate --state`."""
        return self._client.request("GET", self._path("/state"))

    def about(self) -> dict[str, Any]:
        """`bytes_read`, `marks` and others."""
        return json.loads(self._client.request("GET", self._path("")))

    def delete(self) -> None:
        """Forget the session."""
        self._client.request("DELETE", self._path(""))

    def _path(self, end: str) -> str:
        return f"/v1/sessions/{quote(self.id, safe='')}{end}"

    def _post(self, end: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return json.loads(self._client.request("POST", self._path(end), body))


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """True if the server has closed the connection, as it does with idle ones: there is something to receive."""
    if connection.sock is None:
        return False  # it opens by itself
    with selectors.DefaultSelector() as selector:
        selector.register(connection.sock, selectors.EVENT_READ)
        return bool(selector.select(0))


def _content(response: http.client.HTTPResponse) -> bytes:
    data = response.read()
    if response.status == 200:
        return data
    try:
        error = json.loads(data)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": data[:200].decode("utf-8", "replace")}
    raise ServerError(response.status, error)
