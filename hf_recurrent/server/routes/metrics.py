"""/metrics for Prometheus."""

from collections.abc import Iterator

import psutil
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from hf_recurrent.server.routes.guards import Guards
from hf_recurrent.server.routes.served_model import ServedModel

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def request_histograms(registry: CollectorRegistry) -> list[Histogram]:
    """Seconds until the end of a response, and until the first byte of its body, by path."""
    texts = {"request": "Until a response ends.", "first_byte": "Until the first byte of a response's body."}
    return [
        Histogram(f"hf_recurrent_{name}_seconds", text, ("path",), registry=registry, buckets=_SECONDS)
        for name, text in texts.items()
    ]


class ServerMetrics(Collector):
    """The metrics of a server, whose guards count the responses."""

    def __init__(self, served: ServedModel, guards: Guards):
        self._served, self._guards = served, guards

    def collect(self) -> Iterator[Metric]:
        scheduler = self._served.scheduler
        counts, store, reuse = scheduler.counts, scheduler.store, scheduler.reuse
        totals = [
            ("bytes_read", "Bytes that were read.", counts.bytes_read),
            ("bytes_generated", "Bytes that were generated.", counts.bytes_generated),
            ("reused_bytes", "Bytes that were not read again.", reuse.tokens if reuse else 0),
            ("ticks", "Steps of the batch and slices of texts.", counts.ticks),
            ("failed_jobs", "Jobs that ended with an error.", counts.failed),
            (
                "store_failures",
                "Calls of the store that failed, and damaged pieces.",
                scheduler.responses.blobs.failures,
            ),
        ]
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
            totals += [
                ("learned_bytes", "Bytes that were learned from.", record.bytes_read),
                ("updates", "Updates of the weights.", record.updates),
                ("failed_updates", "Texts with a NaN or infinite loss.", scheduler.learner.failures),
            ]
            gauges += [
                ("prequential_bits_per_byte", "Over all bytes learned from.", record.bits_per_byte),
                ("windowed_bits_per_byte", "Over the last of them.", record.windowed_bits_per_byte),
            ]
        for kind, values in ((CounterMetricFamily, totals), (GaugeMetricFamily, gauges)):
            for name, text, value in values:
                if value is not None:
                    yield kind(f"hf_recurrent_{name}", text, value)
        requests = CounterMetricFamily("hf_recurrent_requests", "Requests with an API key.", labels=("key",))
        for key, count in list(self._guards.requests.items()):
            requests.add_metric((key,), count)
        yield requests
        yield InfoMetricFamily("hf_recurrent_model", "The served model.", {"name": self._served.settings.name})
        responses = CounterMetricFamily("hf_recurrent_responses", "Responses.", labels=("method", "path", "status"))
        for (method, path, status), count in list(self._guards.responses.items()):
            responses.add_metric((method, path, str(status)), count)
        yield responses
