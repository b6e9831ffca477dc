"""Parts shared by all routes, created at startup and closed at shutdown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from api.jobs.database import OUTAGE
from api.jobs.store import Store
from api.metrics import Metrics
from api.models import Caps
from api.process_pool import ProcessPool, Quota
from api.settings import Settings
from solver.limits import available_cores

MOST_CONNECTIONS = 1000
"""Event streams and waiting requests open at once."""
MOST_CONNECTIONS_OF_ONE = 100
"""Event streams and waiting requests of one key open at once."""


MADE_BYTES = 64 * 2**20
"""Documents that are remembered."""


class RecentTexts:
    """The texts that were used last, `most_bytes` of them together at most."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._texts: dict[Hashable, str] = {}

    def get(self, key: Hashable) -> str | None:
        """The text of a key, which is used now."""
        text = self._texts.pop(key, None)
        if text is not None:
            self._texts[key] = text
        return text

    def put(self, key: Hashable, text: str) -> None:
        """Remember a text, and forget those that were used longest ago where there is no room."""
        self._left_bytes += len(self._texts.pop(key, ""))
        self._left_bytes -= len(text)
        self._texts[key] = text
        while self._left_bytes < 0:
            self._left_bytes += len(self._texts.pop(next(iter(self._texts))))


@dataclass(frozen=True)
class Service:
    """The parts of a running service."""

    settings: Settings
    store: Store
    pool: ProcessPool
    metrics: Metrics
    caps: Caps
    connections: Quota
    made: RecentTexts


@asynccontextmanager
async def running_service(settings: Settings, metrics: Metrics) -> AsyncIterator[Service]:
    """Context in which all parts are open."""
    connections = Quota("open_connections", MOST_CONNECTIONS, MOST_CONNECTIONS_OF_ONE)
    metrics.count_open_connections(lambda: connections.held)
    metrics.count_database_faults(OUTAGE)
    pool = ProcessPool(available_cores(), most_seconds_a_minute=settings.max_heavy_seconds_a_minute)
    async with Store(settings) as store, pool:
        yield Service(settings, store, pool, metrics, Caps.of(settings), connections, RecentTexts(MADE_BYTES))


async def current_service(request: Request) -> Service:
    """Service of a request. Async, because FastAPI calls plain functions in a thread."""
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(current_service)]
