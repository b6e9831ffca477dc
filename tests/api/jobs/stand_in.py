"""A worker that does what a test tells it, one step at a time."""

from __future__ import annotations

from types import TracebackType
from typing import Self
from uuid import uuid4

from api.jobs import leases, results
from api.jobs.database import make_engine, transaction
from api.jobs.leases import Lease
from api.jobs.queue import FOREVER_S, Picker
from api.jobs.records import JobResult
from api.jobs.results import Equality
from api.settings import Settings
from optpipe.schedule import Schedule
from solver.build import build_schedule
from solver.methods import METHODS, published_orders


class StandIn:
    """Holds at most one lease."""

    def __init__(self, settings: Settings) -> None:
        assert settings.database_url is not None
        self.id = uuid4()
        self.engine = make_engine(settings.database_url.get_secret_value())
        self.lease: Lease | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.engine.dispose()

    @property
    def mine(self) -> Lease:
        assert self.lease is not None
        return self.lease

    async def claim(self, heartbeat_timeout_s: float = FOREVER_S) -> Lease | None:
        """Take up the next job."""
        taken = await leases.claim(self.engine, Picker(self.id, 1, 1, heartbeat_timeout_s))
        self.lease = taken[0] if taken else None
        return self.lease

    async def find(self, method: str) -> bool:
        """A heartbeat with the schedule of a published method; whether to cancel."""
        return (await leases.beat(self.engine, self.mine, self.schedule(method))).cancel_requested

    async def end(self, method: str) -> None:
        """The time is up."""
        await leases.end(self.engine, self.mine, JobResult("succeeded", self.schedule(method), "feasible", "time"))

    async def solve(self, method: str) -> None:
        """End as `end` does, and remember the schedule for equal problems."""
        await self.end(method)
        config, schedule = self.mine.config(), self.schedule(method)
        async with transaction(self.engine) as connection:
            equality = Equality.of(schedule.problem)
            await results.keep_solution(
                connection, schedule, equality, config.method, config.time_limit_s, self.mine.job_id
            )

    def schedule(self, method: str) -> Schedule:
        """The schedule of a published method for the job, which proves nothing."""
        problem = self.mine.problem()
        return build_schedule(problem, published_orders(METHODS[method], problem), 0.0, method, 0.5)
