"""What a worker tells Prometheus of itself. What its jobs came to is told by the API, for all workers: `totals`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server


class WorkerMetrics:
    """The figures of one worker."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.heartbeats = Counter("optpipe_worker_heartbeats", "Heartbeats stored.", registry=registry)
        self.refused = Counter("optpipe_worker_refused", "Jobs that were no longer this worker's.", registry=registry)
        self.solving = Gauge("optpipe_worker_solving", "Jobs that it solves now.", registry=registry)

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
