"""/metrics for Prometheus."""

from collections.abc import Callable, Iterator

import psutil
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from hf_recurrent.server.routes.guards import Guards
from hf_recurrent.server.routes.served_model import ServedModel

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def request_histograms(registry: CollectorRegistry) -> list[Callable[[str, float], None]]:
    """Observers of a path and seconds: until the end of a response, and until the first byte of its body."""
    found = []
    for name, text in (("request", "a response ends"), ("first_byte", "the first byte of a response's body")):
        histogram = Histogram(
            f"hf_recurrent_{name}_seconds", f"Until {text}.", ("path",), registry=registry, buckets=_SECONDS
        )
        found.append(lambda path, seconds, histogram=histogram: histogram.labels(path).observe(seconds))
    return found


class ServerMetrics(Collector):
    """The metrics of a server, whose guards count the responses."""

    def __init__(self, served: ServedModel, guards: Guards):
        self._served, self._guards = served, guards

    def collect(self) -> Iterator[Metric]:
        scheduler = self._served.scheduler
        counts, store, reuse = scheduler.counts, scheduler.store, scheduler.reuse
        blobs = scheduler.responses.blobs
        for name, text, value in (
            ("bytes_read", "Bytes that were read.", counts.bytes_read),
            ("bytes_generated", "Bytes that were generated.", counts.bytes_generated),
            ("reused_bytes", "Bytes that were not read again.", reuse.tokens if reuse else 0),
            ("ticks", "Steps of the batch and slices of texts.", counts.ticks),
            ("failed_jobs", "Jobs that ended with an error.", counts.failed),
            ("store_failures", "Calls of the store that failed, and damaged pieces.", blobs.failures),
        ):
            yield CounterMetricFamily(f"hf_recurrent_{name}", text, value)
        gauges = [
            ("sessions", "Sessions, in memory or on disk.", len(store)),
            ("resident_sessions", "Sessions in memory.", store.resident),
            ("stored_prefixes", "Stored states of texts that are no sessions.", len(reuse.store) if reuse else 0),
            ("waiting_jobs", "Jobs that wait for a row.", counts.waiting),
            ("reading_jobs", "Jobs whose text is being read.", counts.reading),
            ("generating_jobs", "Rows of the batch.", counts.generating),
            ("running_requests", "Requests at the moment.", self._guards.running),
            ("state_bytes", "Bytes of a state.", sum(part.nbytes for part in store.zero.values())),
            ("resident_memory_bytes", "Memory of the process.", psutil.Process().memory_info().rss),
        ]
        if scheduler.learner is not None:
            record = scheduler.learner.record()
            yield CounterMetricFamily("hf_recurrent_learned_bytes", "Bytes that were learned from.", record.bytes_read)
            yield CounterMetricFamily("hf_recurrent_updates", "Updates of the weights.", record.updates)
            yield CounterMetricFamily(
                "hf_recurrent_failed_updates", "Texts with a NaN or infinite loss.", scheduler.learner.failures
            )
            gauges += [
                ("prequential_bits_per_byte", "Over all bytes learned from.", record.bits_per_byte),
                ("windowed_bits_per_byte", "Over the last of them.", record.windowed_bits_per_byte),
            ]
        for name, text, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(f"hf_recurrent_{name}", text, value)
        requests = CounterMetricFamily("hf_recurrent_requests", "Requests with an API key.", labels=("key",))
        for key, count in list(self._guards.requests.items()):
            requests.add_metric((key,), count)
        yield requests
        yield InfoMetricFamily("hf_recurrent_model", "The served model.", {"name": self._served.settings.name})
        responses = CounterMetricFamily("hf_recurrent_responses", "Responses.", labels=("method", "path", "status"))
        for (method, path, status), count in list(self._guards.responses.items()):
            responses.add_metric((method, path, str(status)), count)
        yield responses
