"""/metrics for Prometheus."""

from collections.abc import Iterator

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hf_recurrent.server.routes.guards import Guards
from hf_recurrent.server.routes.served_model import ServedModel


class ServerMetrics(Collector):
    """The metrics of a server, whose guards count the responses."""

    def __init__(self, served: ServedModel, guards: Guards):
        self._served, self._guards = served, guards

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        scheduler = self._served.scheduler
        counts, store, reuse = scheduler.counts, scheduler.store, scheduler.reuse
        for name, text, value in (
            ("bytes_read", "Bytes that were read.", counts.bytes_read),
            ("bytes_generated", "Bytes that were generated.", counts.bytes_generated),
            ("reused_bytes", "Bytes that were not read again.", reuse.tokens if reuse else 0),
            ("ticks", "Steps of the batch and slices of texts.", counts.ticks),
            ("failed_jobs", "Jobs that ended with an error.", counts.failed),
            ("store_failures", "Calls of the store that failed, and damaged pieces.", scheduler.responses.failures),
        ):
            yield CounterMetricFamily(f"hf_recurrent_{name}", text, value)
        gauges = [
            ("sessions", "Sessions, in memory or on disk.", len(store)),
            ("resident_sessions", "Sessions in memory.", store.resident),
            ("stored_prefixes", "Stored states of texts that are no sessions.", len(reuse.store) if reuse else 0),
            ("waiting_jobs", "Jobs that wait for a row.", counts.waiting),
            ("reading_jobs", "Jobs whose text is being read.", counts.reading),
            ("generating_jobs", "Rows of the batch.", counts.generating),
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
        responses = CounterMetricFamily("hf_recurrent_responses", "Responses.", labels=("method", "path", "status"))
        for (method, path, status), count in list(self._guards.responses.items()):
            responses.add_metric((method, path, str(status)), count)
        yield responses
