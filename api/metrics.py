"""Prometheus metrics: requests of this process, and jobs of the whole service read at each scrape.

Labels take values from short fixed lists alone, whatever clients send: a route's template, a method, a status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from api.jobs import queries
from api.jobs.database import Outage
from api.jobs.records import TERMINAL, Counts, StopReason

LIMITS: tuple[str, ...] = get_args(StopReason)
FAULTS = ("gone", "full")
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30)


class Metrics:
    """The figures of one process; each application has its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "optpipe_http_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "optpipe_http_request_seconds",
            "Seconds from a request to the end of its answer, event streams apart.",
            ("method", "route"),
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._connections = Gauge(
            "optpipe_http_open_connections", "Event streams and waiting requests.", registry=self.registry
        )

    def count_database_faults(self, outage: Outage) -> None:
        """Read the outage of the database as this process sees it at each scrape."""
        self.registry.register(_DatabaseFigures(outage))

    def count_open_connections(self, count: Callable[[], int]) -> None:
        """Read the number of open connections from `count`."""
        self._connections.set_function(count)

    def count_request(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """Count a response; `seconds` is None for an event stream, which lasts as long as the client likes."""
        self._requests.labels(method, route, str(status)).inc()
        if seconds is not None:
            self._seconds.labels(method, route).observe(seconds)

    def text(self, counts: Counts | None) -> bytes:
        """All figures in Prometheus' text format, those of the jobs as they stand in the database, if it answers."""
        if counts is None:
            return generate_latest(self.registry)
        jobs = CollectorRegistry()
        jobs.register(_JobFigures(counts))
        return generate_latest(self.registry) + generate_latest(jobs)


class _DatabaseFigures(Collector):
    def __init__(self, outage: Outage) -> None:
        self.outage = outage

    def collect(self) -> Iterable[Metric]:
        """State of the database, and failed transactions since the process began."""
        yield GaugeMetricFamily("optpipe_database_works", "0 during an outage.", float(self.outage.error is None))
        faults = CounterMetricFamily("optpipe_database_faults", "Failed transactions.", labels=["kind"])
        for kind in FAULTS:
            faults.add_metric([kind], self.outage.faults[kind])
        yield faults


class _JobFigures(Collector):
    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def collect(self) -> Iterable[Metric]:
        """Current figures, then totals counted since the tables were created."""
        counts = self.counts
        jobs = GaugeMetricFamily("optpipe_jobs", "Jobs on record by status.", labels=["status"])
        for status, count in counts.jobs.items():
            jobs.add_metric([status], count)
        yield jobs
        yield GaugeMetricFamily("optpipe_queue_age_seconds", "How long the first job has waited.", counts.queue_age_s)
        yield GaugeMetricFamily(
            "optpipe_heartbeat_age_seconds", "Silence of the quietest running job.", counts.heartbeat_age_s
        )
        yield GaugeMetricFamily("optpipe_busy_workers", "Workers that run a job.", counts.workers)
        yield GaugeMetricFamily("optpipe_workers", "Workers that live.", counts.alive_workers)
        yield GaugeMetricFamily("optpipe_places", "Jobs that all workers can solve at a time.", counts.places)
        yield self._counter("optpipe_heartbeats", "Heartbeats of all workers.", queries.HEARTBEATS)
        yield self._counter("optpipe_lost_workers", "Workers lost, once for each job they solved.", queries.LOST)
        yield self._counter("optpipe_solver_deaths", "Solves whose process ended by itself.", queries.DIED)
        yield self._counter("optpipe_ended", "Jobs that workers ended.", queries.ENDED, ("status", TERMINAL))
        stopped = "Solves stopped by a limit; memory: their process was killed."
        yield self._counter("optpipe_stopped", stopped, queries.STOPPED, ("limit", LIMITS))
        yield self._histogram("optpipe_solve_seconds", "Seconds of a solve.", "solve_seconds", queries.SOLVE_SECONDS)
        yield self._histogram("optpipe_final_gap", "Gap at the end of a solve.", "final_gap", queries.FINAL_GAP)

    def _counter(self, metric: str, text: str, name: str, label: tuple[str, Sequence[str]] | None = None) -> Metric:
        if label is None:
            return CounterMetricFamily(metric, text, self._total(name, ""))
        family = CounterMetricFamily(metric, text, labels=[label[0]])
        for value in label[1]:
            family.add_metric([value], self._total(name, value))
        return family

    def _histogram(self, metric: str, text: str, name: str, ends: Sequence[float]) -> Metric:
        labels = [*map(str, ends), queries.ABOVE]
        up_to = accumulate(self._total(name, label) for label in labels)
        buckets = list(zip(labels, up_to, strict=True))
        return HistogramMetricFamily(metric, text, buckets, self._total(name, queries.SUM))

    def _total(self, name: str, label: str) -> float:
        return self.counts.totals.get((name, label), 0.0)
