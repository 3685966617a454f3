"""Visitors of the page: their texts are the API's sessions, private, limited and forgotten."""

import asyncio
import math

import pytest
from running_server import running_server

from hf_recurrent import ByteTokenizer
from hf_recurrent.server.page.visitor import Visitor, Visitors
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.schemas import GenerateRequest
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.settings import ServerSettings
from hf_recurrent.server.session_store import SessionError, TooMany


@pytest.fixture(scope="module")
def server():
    with running_server(has_page=False, options={"max_states": 60}) as server:
        yield server


@pytest.fixture
def served(server):
    return ServedModel(server.scheduler, ByteTokenizer(), ServerSettings("tiny", max_new_tokens=500))


async def all_of(updates) -> None:
    async for _ in updates:
        pass


def test_a_visitor_has_what_the_api_has(server, served):
    async def visit() -> Visitor:
        visitor = Visitor(served)
        await all_of(visitor.read("It was a dark night"))
        await visitor.mark()
        await all_of(visitor.generate(GenerateRequest(max_tokens=30, seed=5)))
        return visitor

    visitor = asyncio.run(visit())
    session = server.new_session()
    bits = server.read(session, "It was a dark night")["bits"]
    new = server.complete(prompt="", session=session, max_tokens=30, seed=5, logprobs=0)["choices"][0]["logprobs"]
    found = visitor.text.transcript
    assert found.bits[1:19].tolist() == bits[1:] and math.isnan(found.bits[0])
    assert found.bits[19:].tolist() == pytest.approx([value / -math.log(2) for value in new["token_logprobs"]])
    assert found.generated.tolist() == [False] * 19 + [True] * (len(found.data) - 19)
    # Nobody finds the visitor's session.
    assert visitor.text.session_id not in server.get("/v1/sessions")["data"]
    assert server.request("GET", f"/v1/sessions?after={visitor.text.session_id}").status == 404

    async def go_back() -> bytes:
        data = await visitor.save()
        await visitor.fork()
        await visitor.rewind(next(iter(visitor.text.marks)))
        assert visitor.text.transcript.data == b"It was a dark night"
        visitor.choose("Text 1")
        assert visitor.text.transcript is found
        await visitor.load(data, "mine")
        await all_of(visitor.generate(GenerateRequest(max_tokens=9, temperature=0)))
        continued = visitor.text.transcript.data
        visitor.choose("Text 1")
        await all_of(visitor.generate(GenerateRequest(max_tokens=9, temperature=0)))
        assert visitor.text.transcript.data == found.data + continued
        await visitor.leave()

    before = len(server.scheduler.store)
    asyncio.run(go_back())
    assert len(server.scheduler.store) == before - 1  # also the fork and the loaded text are gone
    server.request("DELETE", f"/v1/sessions/{session}")


def test_visitors_have_limits(server, served):
    async def visit() -> None:
        visitor = Visitor(served)
        with pytest.raises(ApiError, match="`max_tokens` asks for 501"):
            await all_of(visitor.generate(GenerateRequest(max_tokens=501)))
        with pytest.raises(ApiError, match="Write something first"):
            await all_of(visitor.read(""))
        with pytest.raises(ApiError, match="does not learn; start it with --learn"):
            await visitor.set_learns(True)
        with pytest.raises(SessionError, match="`file`"):
            await visitor.load(b"\x00" * 100, "x")
        with pytest.raises(ApiError, match="Choose a mark"):
            await visitor.rewind("1")
        with pytest.raises(ApiError, match="at most 24 marks"):
            for _ in range(25):
                await visitor.mark()
        with pytest.raises((ApiError, TooMany), match=r"at most 12 texts|this server allows 60"):
            for _ in range(12):
                await visitor.fork()
        await visitor.leave()
        assert len(server.scheduler.store) == 0

    asyncio.run(visit())


def test_a_stopped_text_ends_where_it_is(served):
    async def visit() -> None:
        visitor = Visitor(served)
        async for _ in visitor.generate(GenerateRequest(max_tokens=500)):
            visitor.stop()
        written = visitor.text.transcript.data
        assert len(written) < 500
        session = served.scheduler.store.get(visitor.text.session_id)
        assert session.snapshot.bytes_read == len(written)
        with pytest.raises(ApiError, match="Stopped; the text was not read"):
            reading = asyncio.create_task(all_of(visitor.read("x" * 100_000)))
            while visitor._running is None:
                await asyncio.sleep(0)
            visitor.stop()
            await reading
        assert visitor.text.transcript.data == written and session.snapshot.bytes_read == len(written)
        await visitor.leave()

    asyncio.run(visit())


def test_visitors_do_not_see_each_other_and_are_forgotten(served, monkeypatch):
    async def visit() -> None:
        visitors = Visitors(served)
        one, other = await visitors.get("one", True), await visitors.get("other", True)
        await all_of(one.read("secret"))
        assert other.text.transcript.data == b"" and await visitors.get("one") is one
        for key in ("guessed", "", None):
            with pytest.raises(ApiError, match="has forgotten your texts"):
                await visitors.get(key)
        visitors.has_left("one")
        assert await visitors.get("one") is one  # the connection was lost for a moment
        session = one.text.session_id
        one.last_used -= 4000
        await visitors.get("other")
        assert len(visitors) == 1 and session not in served.scheduler.store._private
        monkeypatch.setattr("hf_recurrent.server.page.visitor.MOST_VISITORS", 1)
        with pytest.raises(ApiError, match="too many visitors"):
            await visitors.get("more", True)

    asyncio.run(visit())
