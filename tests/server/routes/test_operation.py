"""Several clients and their limits, pages of other origins, logs, metrics, and the end of a server."""

import hashlib
import json
import logging
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from model_cases import tiny_model
from prometheus_client.parser import text_string_to_metric_families
from running_server import Client, running_server

from hf_recurrent.generation.sampling import Sampling
from hf_recurrent.server.job import Job, Request
from hf_recurrent.server.routes.api_keys import ApiKey, KeyRing, read_api_keys
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.request_log import RequestLog
from hf_recurrent.server.sampling import TokenSource
from hf_recurrent.server.serving import serving_scheduler


def endless():
    """A model whose texts do not end."""
    model = tiny_model("memora")
    model.generation_config.eos_token_id = None
    return model


def keys(tmp_path, text: str) -> tuple[ApiKey, ...]:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    return read_api_keys(path)


def bearer(server, key: str) -> Client:
    return Client(server.port, headers={"authorization": f"Bearer {key}"})


def test_keys_of_a_file(tmp_path):
    hashed = hashlib.sha256(b"second").hexdigest()
    found = keys(tmp_path, f"# clients\nalice first max_requests=2\n\nbob sha256:{hashed} requests_per_minute=30\n")
    ring = KeyRing(found)
    assert [ring.find(value) and ring.find(value).name for value in (b"first", b"second", b"third", b"")] == [
        "alice", "bob", None, None,
    ]  # fmt: skip
    assert (found[0].max_requests, found[1].requests_per_minute) == (2, 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("alice", "line 1: it must have a name"),
        ("a/b key", "line 1: it must have a name"),
        ("\nalice sha256:12", "line 2: after 'sha256:'"),
        ("alice key rate=3", "a limit must be one of max_requests, requests_per_minute"),
        ("alice key max_requests=0", "at least 1"),
        ("alice a\nalice b", "the same name twice"),
        ("alice a\nbob a", "the same key twice"),
        ("alice é", "characters that a header cannot have"),
    ],
)
def test_wrong_lines_are_named_and_keys_are_not_shown(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        keys(tmp_path, text)


def test_limits_of_a_key(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    key = ApiKey("a", b"", max_requests=1, requests_per_minute=2)
    ring = KeyRing([key])
    with ring.request(key), pytest.raises(ApiError, match="1 requests running"), ring.request(key):
        pass
    with ring.request(key):
        pass
    with pytest.raises(ApiError, match="may send 2 requests per minute") as caught, ring.request(key):
        pass
    assert caught.value.headers == {"retry-after": "30"}
    now[0] += 30
    with ring.request(key):
        pass


def test_clients_over_the_limits_get_429(tmp_path):
    given = keys(tmp_path, "slow one requests_per_minute=2\nfast two\n")
    with running_server(api_keys=given, hosts=None) as server:
        slow, fast = bearer(server, "one"), bearer(server, "two")
        assert [slow.request("GET", "/v1/models").status for _ in range(3)] == [200, 200, 429]
        reply = slow.request("GET", "/v1/models")
        assert 1 <= int(reply.headers["retry-after"]) <= 30 and "'slow'" in reply.error()
        assert reply.json()["error"]["type"] == "requests" and reply.json()["error"]["code"] == "rate_limit_exceeded"
        assert [fast.request("GET", "/v1/models").status for _ in range(5)] == [200] * 5
        assert fast.request("GET", "/v1/sessions").status == 403  # of others
        assert bearer(server, "three").request("GET", "/v1/models").status == 401
        assert 'hf_recurrent_requests_total{key="slow"} 4.0' in fast.request("GET", "/metrics").body.decode()


def test_clients_with_many_texts_leave_half_of_the_rows_to_others():
    def job(owner: str) -> Job:
        source = TokenSource(Sampling(), 0)
        return Job(Request(np.frombuffer(b"abc", np.uint8), max_new_tokens=10**6, source=source, owner=owner))

    with serving_scheduler(endless(), None, max_rows=4) as scheduler:
        many, one = [job("many") for _ in range(12)], [job("one") for _ in range(2)]
        for each in many:
            scheduler.submit(each).result()
        while scheduler.counts.generating < 4:
            time.sleep(0.001)
        for each in one:
            scheduler.submit(each).result()
        while min(len(each.output) for each in one) < 400:
            time.sleep(0.005)
        before = [len(each.output) for each in [*many, *one]]
        while len(one[0].output) < before[-2] + 600:
            time.sleep(0.005)
        scheduler.end_all().result()
        grown = [len(each.output) - start for each, start in zip([*many, *one], before, strict=True)]
    share = sum(grown[-2:]) / sum(grown)
    assert share > 0.3, grown  # 2 of 14 texts


def test_pages_of_other_origins():
    origin = {"origin": "https://app.example"}
    ask = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with running_server(cors=("https://app.example",)) as server:
        reply = server.request("GET", "/v1/models", headers=origin)
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == origin["origin"]
        reply = server.request("OPTIONS", "/v1/completions", headers=ask)
        assert reply.status == 200 and "POST" in reply.headers["access-control-allow-methods"]
        assert server.request("GET", "/v1/models", headers={"origin": "https://evil.example"}).status == 403
        assert server.request("OPTIONS", "/v1/models", headers=ask | {"origin": "https://evil.example"}).status == 400
    with running_server() as server:
        assert server.request("GET", "/v1/models", headers=origin).status == 403


def test_the_log_has_a_line_for_each_request_and_no_content(tmp_path, monkeypatch):
    log = RequestLog(tmp_path / "log")
    for name in ("hf_recurrent", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", list(logger.handlers))
        monkeypatch.setattr(logger, "propagate", logger.propagate)
    log.take_messages()
    with running_server(log=log) as server:
        server.complete(prompt="the secret text", max_tokens=3)
        list(server.stream({"model": "tiny", "prompt": "the secret text", "max_tokens": 3, "stream": True}))
        assert server.request("POST", "/v1/completions", {"model": "secret"}).status == 404
        assert server.request("GET", "/secret").status == 404
        monkeypatch.setattr(server.scheduler.store, "get", lambda session_id: int("the secret text"))
        assert server.request("GET", "/v1/sessions/x").status == 500
        assert server.request("GET", "/health").headers["x-request-id"].startswith("req_")
    text = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in requests] == [200, 200, 404, 404, 500, 200] and "secret" not in text
    assert [line["path"] for line in requests[:4]] == ["/v1/completions"] * 3 + ["other"]
    assert all(line["is_complete"] and 0 <= line["first_byte_seconds"] <= line["seconds"] for line in requests)
    (message,) = (line for line in lines if line["event"] == "message")
    assert (message["level"], message["error"]) == ("error", "ValueError") and message["at"]


def test_metrics_are_prometheus_and_complete():
    with running_server() as server:
        server.complete(prompt="a", max_tokens=3)
        text = server.request("GET", "/metrics").body.decode()
        names = {family.name for family in text_string_to_metric_families(text)}
        samples = {
            sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
        }
    assert {
        "hf_recurrent_bytes_read", "hf_recurrent_bytes_generated", "hf_recurrent_reused_bytes",
        "hf_recurrent_sessions", "hf_recurrent_waiting_jobs", "hf_recurrent_generating_jobs",
        "hf_recurrent_running_requests",
        "hf_recurrent_request_seconds", "hf_recurrent_first_byte_seconds", "hf_recurrent_responses",
        "hf_recurrent_store_failures", "hf_recurrent_model_info", "hf_recurrent_resident_memory_bytes",
    } <= names  # fmt: skip
    assert samples["hf_recurrent_request_seconds_count"] == 1 and samples["hf_recurrent_bytes_generated_total"] == 3
    buckets = [float(line.split()[-1]) for line in text.splitlines() if "hf_recurrent_request_seconds_bucket" in line]
    assert all(a <= b for a, b in pairwise(buckets)) and buckets[-1] == 1


def test_a_stopped_server_ends_its_texts_where_they_are():
    events: list = []
    with running_server(endless(), stop_seconds=0.2, max_new_tokens=10**6) as server:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 10**6, "stream": True}
        client = threading.Thread(target=lambda: events.extend(server.stream(body)))
        client.start()
        while not events:
            time.sleep(0.005)
    client.join(20)
    assert not client.is_alive() and events[-1]["choices"][0]["finish_reason"] == "length"
