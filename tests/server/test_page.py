"""The page's parts without a browser: transcripts, drawings, visitors, and what hostile clients reach."""

import asyncio
import json
import math
import re
import secrets
import sys
from pathlib import Path

import numpy as np
import pytest
from running_server import running_server

from hf_recurrent import ByteTokenizer
from hf_recurrent.server.page import drawing
from hf_recurrent.server.page.transcript import SurpriseCurve, Transcript
from hf_recurrent.server.page.visitor import Visitor, Visitors
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.schemas import GenerateRequest
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.settings import ServerSettings
from hf_recurrent.server.session_store import TooMany

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script> {{value}} ${1} `x` \" '"


# ---- Transcripts and drawings


def test_a_curve_keeps_sums_in_few_bins():
    drawn = np.random.default_rng(0)
    curve, bits = SurpriseCurve(), np.array([])
    for size in (1, 30, 5, 20_000, 7, 100_001):
        more = drawn.exponential(2, size)
        more[0] = math.nan
        curve, bits = curve.add(more), np.concatenate([bits, more])
    assert curve.length == len(bits) and len(curve.sums) <= 256 and curve.counts.sum() == len(bits) - 6
    assert curve.bits_per_byte == pytest.approx(np.nanmean(bits))
    first = bits[: curve.width]
    assert curve.sums[0] == pytest.approx(np.nansum(first)) and curve.counts[0] == np.isfinite(first).sum()
    assert SurpriseCurve().bits_per_byte is None and not curve.learned.any()


def test_a_transcript_keeps_the_last_bytes_and_never_changes():
    transcript = first = Transcript().add(b"abc", [math.nan, 1, 2])
    for _ in range(40):
        transcript = transcript.add("日本".encode() * 50, [3.0] * 300, is_generated=True)
        assert len(transcript.data) == len(transcript.bits) == len(transcript.generated) <= 4096
        transcript.data.decode()  # not cut within a character
    assert first.data == b"abc" and first.is_whole and not transcript.is_whole
    assert transcript.curve.length == 12_003


def test_text_is_escaped_and_bytes_are_coloured():
    data = HOSTILE.encode() + b"\xff\x00\n\t" + "é".encode()
    bits = [math.nan, *[0.1] * (len(data) - 3), 5, 13]
    shown = drawing.draw_text(Transcript(begins_with=HOSTILE).add(data, bits))
    assert not set("{}$`") & set(shown) and "<script" not in shown
    spans = re.findall(r'<span class="([^"]*)"([^>]*)>([^<]*)</span>', shown)
    assert spans[0][0] == "earlier" and spans[1][:1] == ("none",)
    assert [text for _, _, text in spans[-5:]] == ["FF", "00", "\n", "\t", "é"]
    assert spans[-2][0] == "s0 tab" and 'title="5.00, 13.00 bits"' in spans[-1][1]
    assert "var(--s5) 0% 50%,var(--s8) 50% 100%" in spans[-1][1]
    assert HOSTILE not in drawing.draw_note(HOSTILE)


def test_more_bytes_only_add_to_the_drawing():
    """Gradio then sends the new end only."""
    transcript, data = Transcript(), b"word and " * 100
    before = ""
    for begin in range(0, 900, 50):
        transcript = transcript.add(data[begin : begin + 50], [2.0] * 50)
        shown = drawing.draw_text(transcript)
        assert shown.startswith(before)
        before = shown


def test_the_curve_shows_where_the_model_learned():
    curve = SurpriseCurve().add([8.0] * 64).add([2.0] * 64, is_learned=True)
    whole, learned = re.findall(r'points="([^"]*)"', drawing.draw_curve(curve))
    assert [pair.split(",")[1] for pair in whole.split()] == ["0.00", "0.00", "75.00", "75.00"]
    assert len(learned.split()) == 3  # with the last point before
    assert "polyline" in drawing.draw_curve(SurpriseCurve())


def test_colours_are_those_of_the_example():
    example, own = (ROOT / "examples/browser/style.css").read_text(), drawing.__file__
    style = Path(own).with_name("page.css").read_text()
    ramp = re.compile(r"--(?:on-)?s\d: [^;]+;")
    assert ramp.findall(style) == ramp.findall(example)
    levels = re.search(r"LEVELS = (\[.*?\])", (ROOT / "examples/browser/text_view.js").read_text())[1]
    assert tuple(json.loads(levels)) == drawing.LEVELS


# ---- Visitors


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
        with pytest.raises(ApiError, match="`file`"):
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


# ---- Addresses


def test_without_gradio_the_server_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with running_server(has_page=True, api_key="the key") as server:
        reply = server.request("GET", "/")
        assert reply.status == 200 and 'pip install "hf-recurrent[page]"' in reply.body.decode()
        assert server.request("GET", "/v1/models").status == 401
        assert server.request("GET", "/login").status == 401


def test_pages_of_other_sites_reach_nothing(server):
    for origin in ("https://example.com", "http://127.0.0.1:1", "null", "http://localhost"):
        reply = server.request("POST", "/v1/sessions", headers={"origin": origin})
        assert reply.status == 403 and "another site" in reply.error()
    own = f"http://127.0.0.1:{server.port}"
    assert server.request("GET", "/health", headers={"origin": own}).status == 200


@pytest.fixture(scope="module")
def paged():
    pytest.importorskip("gradio", reason="Gradio is not installed")
    with running_server(has_page=True) as server:
        yield server


@pytest.mark.long
def test_nothing_of_gradio_but_the_page_is_reachable(paged):
    secret = "/etc/hostname"
    for path in (
        *(
            f"/gradio_api/file={secret}",
            f"/file={secret}",
            f"/gradio_api/file/{secret}",
            "/gradio_api/upload_progress",
        ),
        *(
            "/gradio_api/proxy=http://127.0.0.1:1/",
            "/gradio_api/info",
            "/gradio_api/openapi.json",
            "/gradio_api/app_id",
        ),
        *("/gradio_api/stream/a/b/c/playlist.m3u8", "/gradio_api/custom_component/a/b/c/d", "/monitoring", "/runs"),
        *("/gradio_api/runs", "/gradio_api/dev/reload", "/gradio_api/deep_link", "/gradio_api/vibe-code", "/pwa_icon"),
        *("/gradio_api/token", "/gradio_api/profiling/traces", "/gradio_api/run-history/records", "/manifest.json"),
    ):
        reply = paged.request("GET", path)
        assert reply.status == 404 and reply.error() == "There is no such address."
    for path in (
        *("/gradio_api/upload", "/gradio_api/component_server", "/gradio_api/run/0", "/gradio_api/call/x", "/login"),
        *("/gradio_api/process_recording", "/gradio_api/vibe-edit", "/gradio_api/stream/x", "/gradio_api/reset"),
    ):
        assert paged.request("POST", path, {}).status == 404
    for path in ("/static/", "/assets/"):
        for climb in ("../../../../../../etc/hostname", "..%2f..%2f..%2f..%2f..%2fetc%2fhostname", "//etc/hostname"):
            assert paged.request("GET", path + climb).status in (403, 404)


@pytest.mark.long
def test_the_page_loads_nothing_from_elsewhere(paged):
    reply = paged.request("GET", "/")
    assert reply.status == 200 and "default-src 'self'" in reply.headers["content-security-policy"]
    page = reply.body.decode()
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//(?!127\.0\.0\.1)""", page)
    config = paged.get("/config")
    assert config["analytics_enabled"] is False and not config["footer_links"]
    style = paged.request("GET", "/theme.css").body.decode()
    assert "@import" not in style and "googleapis" not in style


def event(server, key: str, function: int, data: list) -> list:
    """The last outputs of an event of the page."""
    body = {"data": data, "fn_index": function, "session_hash": key, "event_data": None, "trigger_id": None}
    assert server.request("POST", "/gradio_api/queue/join", body).status == 200
    lines = server.request("GET", f"/gradio_api/queue/data?session_hash={key}").body.decode().splitlines()
    messages = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return next(each["output"] for each in messages if each["msg"] == "process_completed")["data"]


@pytest.mark.long
def test_hostile_events_get_a_sentence(paged, capfd):
    kinds = {kind: each["id"] for each in paged.get("/config")["dependencies"] for _, kind in each["targets"]}
    key, load = secrets.token_hex(), kinds["load"]
    read, go_on, rewind = load + 1, load + 2, load + 5
    assert "Reload the page" in event(paged, key, read, ["secret", 1])[0]
    event(paged, key, load, [])
    assert ">s</span>" in event(paged, key, read, ["secret", 1])[2]
    for function, values in (
        *((read, ["x", times]) for times in (0, 51, 1e300, 1.5, None, "1", [1])),
        *((read, [text, 1]) for text in (None, 1, {"path": "/etc/hostname"}, ["x"], "\ud800", "")),
        *((go_on, ["", count, 0.5]) for count in (0, 2001, None)),
        *((go_on, ["", 5, temperature]) for temperature in (-1, 1e-9, 1e300, "0", True)),
        *((rewind, [mark]) for mark in (None, "1", "../x", 1, ["1"])),
        *((kinds["input"], [value]) for value in (True,)),
        *((load + 10, values) for values in (["?", "x"], ["AAAA", "x"], ["AAAA", 1], [None, "x"])),
    ):
        note, *_ = event(paged, key, function, values)
        assert 'class="error"' in note, (function, values, note)
    other = secrets.token_hex()
    assert "secret" not in str(event(paged, other, load, []))
    for body in (
        {"data": ["x"], "fn_index": read, "session_hash": key},
        {"data": ["x", 1], "fn_index": 999, "session_hash": key},
        {"data": ["x", 1], "fn_index": -1, "session_hash": key},
        {"data": ["x", 1], "fn_index": [read], "session_hash": key},
        {"data": ["x", 1], "fn_index": read, "session_hash": "../x"},
        {"data": ["x", 1], "fn_index": read},
        *(b"{", b"[]", b"null", b"[" * 100_000, b""),
    ):
        assert "no such event" in paged.request("POST", "/gradio_api/queue/join", body).error()
    assert b"session_not_found" in paged.request("GET", "/gradio_api/queue/data?session_hash=nobody").body
    assert (
        paged.request("POST", "/gradio_api/cancel", {"session_hash": "a", "fn_index": 0, "event_id": "b"}).status
        == 200
    )
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.long
def test_a_person_enters_the_key(paged):
    with running_server(has_page=True, api_key="the key") as server:
        for path in ("/config", "/theme.css", "/gradio_api/heartbeat/x", "/assets/index.js"):
            assert server.request("GET", path).status == 401
        assert server.request("POST", "/gradio_api/queue/join", {}).status == 401
        opened = server.request("GET", "/")
        assert opened.status == 303 and opened.headers["location"] == "/login"
        assert 'type="password"' in server.request("GET", "/login").body.decode()
        for wrong in (b"", b"key=", b"key=the+ke", b"key=the+key+", b"\xff&key=%ff", b"key=" + b"&key" * 50):
            reply = server.request("POST", "/login", wrong, {"content-type": "application/x-www-form-urlencoded"})
            assert (reply.status == 401) == (wrong != b"key=the+key+") and ("set-cookie" in reply.headers) == (
                reply.status == 303
            )
        reply = server.request("POST", "/login", b"key=the+key")
        cookie = reply.headers["set-cookie"]
        assert reply.status == 303 and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        with_cookie = {"cookie": cookie.partition(";")[0]}
        assert server.request("GET", "/", headers=with_cookie).status == 200
        assert server.request("GET", "/config", headers=with_cookie).status == 200
        # The cookie is for the page alone.
        assert server.request("GET", "/v1/sessions", headers=with_cookie).status == 401
        assert server.request("GET", "/metrics", headers=with_cookie).status == 401
        assert server.request("GET", "/config", headers={"cookie": "hf_recurrent_page=x; a b=;;"}).status == 401
        assert server.request("GET", "/config", headers={"authorization": "Bearer the key"}).status == 200
