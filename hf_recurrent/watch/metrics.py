"""Counters and gauges of watched logs in the text format of Prometheus, served to this machine."""

import math
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PREFIX = "hf_recurrent_watch_"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Name → type and help, in the order of the page.
METRICS = {
    "lines_total": ("counter", "Lines read."),
    "unusual_lines_total": ("counter", "Lines that were flagged as unusual."),
    "bytes_total": ("counter", "Bytes of the lines read."),
    "bits_total": ("counter", "Bits of surprise of the lines read."),
    "score": ("gauge", "Unusualness of the last line."),
    "threshold": ("gauge", "Unusualness above which a line is flagged."),
    "lag_bytes": ("gauge", "Bytes of the log that were not read yet."),
    "last_line_timestamp_seconds": ("gauge", "When the last line was read."),
    "reverts_total": ("counter", "Times that the model diverged and went back to its last checkpoint."),
    "alert_failures_total": ("counter", "Alert commands that failed or were dropped."),
}


def metrics_page(samples: Iterable[tuple[str, str, float]]) -> str:
    """The page of (name in `METRICS`, log, value); an empty log is a metric without a label."""
    by_name: dict[str, list[str]] = {}
    for name, log, value in samples:
        label = "{log=" + _quoted(log) + "}" if log else ""
        by_name.setdefault(name, []).append(f"{_PREFIX}{name}{label} {_number(value)}\n")
    page = ""
    for name, (kind, text) in METRICS.items():
        if name in by_name:
            page += f"# HELP {_PREFIX}{name} {text}\n# TYPE {_PREFIX}{name} {kind}\n" + "".join(by_name[name])
    return page


class MetricsServer:
    """Serves `/metrics` on the loopback interface, in a thread.

    Args:
        port: 0 for a free one.
        page: text of the page, called for each request.

    Raises:
        OSError: the port cannot be used.
    """

    def __init__(self, port: int, page: Callable[[], str]):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                body = page().encode()
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Requests are not logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value))
