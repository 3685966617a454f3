"""The page's addresses: what hostile clients reach."""

import json
import re
import secrets
import sys

import pytest
from running_server import running_server


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


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
