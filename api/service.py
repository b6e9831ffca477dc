"""What the routes share: one of each a process, made when it starts and closed when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from api.jobs.store import Store
from api.metrics import Metrics
from api.models import Caps
from api.process_pool import ProcessPool, Quota
from api.settings import Settings
from solver.limits import available_cores

MOST_CONNECTIONS = 1000
MOST_CONNECTIONS_OF_ONE = 100
"""Event streams and waiting requests that are open at once, in all and of one key."""


@dataclass(frozen=True)
class Service:
    """The parts of a running service."""

    settings: Settings
    store: Store
    pool: ProcessPool
    metrics: Metrics
    caps: Caps
    connections: Quota


@asynccontextmanager
async def running_service(settings: Settings, metrics: Metrics) -> AsyncIterator[Service]:
    """All parts, open within this context."""
    connections = Quota("open_connections", MOST_CONNECTIONS, MOST_CONNECTIONS_OF_ONE)
    metrics.count_open_connections(lambda: connections.held)
    async with Store(settings) as store, ProcessPool(available_cores()) as pool:
        yield Service(settings, store, pool, metrics, Caps.of(settings), connections)


async def current_service(request: Request) -> Service:
    """The service that a request was sent to. Were this a plain function, FastAPI would call it in a thread."""
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(current_service)]
