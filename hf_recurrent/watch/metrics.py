"""Counters and gauges of watched logs for Prometheus, served to this machine."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
    "alert_failures": (CounterMetricFamily, "Alerts of --exec and --webhook that failed or were dropped."),
}


class MetricsServer(Collector):
    """Serves `/metrics` on the loopback interface, in its own threads.

    Args:
        port: 0 for a free one.
        samples: called for each page; yields (name in `METRICS`, log, value); an empty log means no label.

    Raises:
        OSError: the port cannot be used.
    """

    def __init__(self, port: int, samples: Callable[[], Iterable[tuple[str, str, float]]]):
        self._samples = samples
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        self.address = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, list[tuple[str, float]]] = {}
        for name, log, value in self._samples():
            by_name.setdefault(name, []).append((log, value))
        for name, (family, text) in METRICS.items():
            if values := by_name.get(name):
                metric = family(f"hf_recurrent_watch_{name}", text, labels=("log",) if values[0][0] else ())
                for log, value in values:
                    metric.add_metric((log,) if log else (), value)
                yield metric

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
