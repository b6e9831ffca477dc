"""What a worker tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from api.jobs.leases import Outcome

SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)
GAPS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class WorkerMetrics:
    """The figures of one worker."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.heartbeats = Counter("optpipe_heartbeats", "Heartbeats stored.", registry=registry)
        self.refused = Counter("optpipe_refused", "Jobs that were no longer this worker's.", registry=registry)
        self.solving = Gauge("optpipe_solving", "Jobs that it solves now.", registry=registry)
        self._ended = Counter("optpipe_ended", "Jobs ended, by status.", ("status",), registry=registry)
        self._stopped = Counter("optpipe_stopped", "Solves stopped by a limit.", ("limit",), registry=registry)
        self._seconds = Histogram("optpipe_solve_seconds", "Seconds of a solve.", buckets=SECONDS, registry=registry)
        self._gap = Histogram("optpipe_final_gap", "Gap at the end of a solve.", buckets=GAPS, registry=registry)

    def count_end(self, outcome: Outcome) -> None:
        """Note how a job ended."""
        self._ended.labels(outcome.status).inc()
        if outcome.limit is not None:
            self._stopped.labels(outcome.limit).inc()
        if outcome.schedule is not None:
            self._seconds.observe(outcome.schedule.solve_seconds)
            self._gap.observe(outcome.schedule.gap)

    @contextmanager
    def served(self, host: str, port: int | None) -> Iterator[None]:
        """Answer on a port of its own within this context; None: nowhere."""
        if port is None:
            yield
            return
        server, thread = start_http_server(port, host, self.registry)
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
