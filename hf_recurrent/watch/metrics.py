"""Counters and gauges of watched logs for Prometheus, served to this machine."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hf_recurrent.watch.alerts import AlertSender
from hf_recurrent.watch.watched_log import WatchedLog

# Name → type and help, in the order of the page. Prometheus appends "_total" to the names of counters.
METRICS: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]] = {
    "lines": (CounterMetricFamily, "Lines read."),
    "unusual_lines": (CounterMetricFamily, "Lines that were flagged as unusual."),
    "bytes": (CounterMetricFamily, "Bytes of the lines read."),
    "events": (CounterMetricFamily, "Events: unusual lines of a kind that belong together, and unusual sessions."),
    "sessions": (CounterMetricFamily, "Sessions that have ended."),
    "templates": (GaugeMetricFamily, "Templates of lines."),
    "score": (GaugeMetricFamily, "Unusualness of the last line."),
    "threshold": (GaugeMetricFamily, "Unusualness above which a line is flagged."),
    "lag_bytes": (GaugeMetricFamily, "Bytes of the log that were not read yet."),
    "last_line_timestamp_seconds": (GaugeMetricFamily, "When the last line was read."),
}


class MetricsServer(Collector):
    """Serves `/metrics` on the loopback interface, in its own threads; port 0 is a free one."""

    def __init__(self, port: int, logs: Sequence[WatchedLog], senders: Sequence[AlertSender]):
        self._logs, self._senders = logs, senders
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        self.address = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def collect(self) -> Iterator[Metric]:
        values = {log.name: log.metrics() for log in self._logs}
        for name, (family, text) in METRICS.items():
            metric = family(f"hf_recurrent_watch_{name}", text, labels=("log",))
            for log, found in values.items():
                metric.add_metric((log,), found[name])
            yield metric
        if self._senders:
            text = "Alerts of --exec and --webhook that failed or were dropped."
            failures = sum(sender.failures for sender in self._senders)
            yield CounterMetricFamily("hf_recurrent_watch_alert_failures", text, failures)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
