"""Stored responses: their JSON, and for the next turn the tokens of the conversation and the state after them."""

import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.server.blob_stores import SafeBlobs
from hf_recurrent.server.state_packing import StatePacking

_ID = re.compile(r"resp_[A-Za-z0-9_-]{20,60}")


@dataclass(frozen=True, eq=False)
class StoredResponse:
    """A response."""

    content: dict[str, Any]  # as JSON
    input_items: list[dict[str, Any]]  # that the request had
    messages: list[dict[str, Any]]  # of the conversation, with the answer, as chat templates have them
    text: str  # of prompt and answer
    tokens: np.ndarray  # of this text
    known: tuple[int, RecurrentState] | None = None  # a length, and the state after this many of these tokens


class ResponseStore:
    """Responses by id. Its methods block; any thread may call them.

    `computation` names the weights and the arithmetic of the states; states of others are not used.
    """

    def __init__(self, blobs: SafeBlobs, zero: RecurrentState, computation: str):
        self.blobs, self._packing, self._computation = blobs, StatePacking(zero), computation

    def put(self, owner: bytes, response: StoredResponse) -> bool:
        """Keep a response of a client; False if that failed."""
        length, state = response.known or (0, None)
        if length > len(response.tokens):
            length, state = 0, None
        packed = b"" if state is None else self._packing.pack(state)
        head = {
            "content": response.content, "input": response.input_items, "messages": response.messages,
            "text": response.text, "length": length, "owner": _hash(owner), "computation": self._computation,
        }  # fmt: skip
        text, tokens = json.dumps(head).encode(), response.tokens.astype("<u4").tobytes()
        data = b"".join(len(part).to_bytes(8, "little") + part for part in (text, tokens, packed))
        return self.blobs.put(self._name(response.content["id"]), zlib.compress(data, 1))

    def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """A response of a client; None if there is none."""
        if not _ID.fullmatch(response_id):
            return None
        name = self._name(response_id)
        data = self.blobs.get([name]).get(name)
        if data is None:
            return None
        text, tokens, packed = _parts(zlib.decompress(data))
        head = json.loads(text)
        if head["owner"] != _hash(owner):
            return None
        known = None
        if packed and head["computation"] == self._computation:
            known = head["length"], self._packing.unpack(packed)
        ids = np.frombuffer(tokens, "<u4").astype(np.int64)
        return StoredResponse(head["content"], head["input"], head["messages"], head["text"], ids, known)

    def delete(self, owner: bytes, response_id: str) -> bool:
        """Forget a response of a client; False if there is none."""
        return self.get(owner, response_id) is not None and self.blobs.delete(self._name(response_id))

    @staticmethod
    def _name(response_id: str) -> str:
        return f"responses/{response_id}"


def _hash(owner: bytes) -> str:
    return hashlib.blake2b(owner, digest_size=16, person=b"owner").hexdigest()


def _parts(data: bytes) -> list[bytes]:
    parts, begin = [], 0
    while begin < len(data):
        size = int.from_bytes(data[begin : begin + 8], "little")
        parts.append(data[begin + 8 : begin + 8 + size])
        begin += 8 + size
    return parts
