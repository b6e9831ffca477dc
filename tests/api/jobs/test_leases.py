"""Leases: who may write what, and what the tables refuse whoever writes it."""

from __future__ import annotations

import asyncio
from itertools import count

import psycopg
import pytest
from psycopg.errors import CheckViolation, RaiseException, UniqueViolation

from api.errors import LeaseLostError
from api.jobs import leases
from api.jobs.leases import MOST_LOST
from api.jobs.records import JobConfig, JobResult
from api.jobs.store import Store
from api.settings import Settings
from instances import uniform
from optpipe.schedule import Schedule
from tests.api.jobs.stand_in import StandIn

_seeds = count()

AT_ONCE_S = 0.0
"""A silence that everybody keeps."""


async def submit(store: Store, priority: int = 0) -> None:
    """A job that no other one equals: its seed is its own."""
    await store.submit(uniform(4, 8), JobConfig(priority=priority, seed=next(_seeds)))


async def test_a_lost_lease_writes_nothing(store: Store, settings: Settings) -> None:
    await submit(store)
    async with StandIn(settings) as lost, StandIn(settings) as other:
        await lost.claim()
        await lost.find("gpipe")
        assert await other.claim() is None  # not silent for long enough
        taken = await other.claim(AT_ONCE_S)
        assert taken is not None
        assert (taken.attempt, taken.best and taken.best.method) == (2, "gpipe")
        before = await store.get(taken.job_id), await store.events(taken.job_id)
        for write in (lost.find("zb-h2"), lost.end("zb-h2"), leases.give_back(lost.engine, lost.mine, None)):
            with pytest.raises(LeaseLostError):
                await write
        assert (await store.get(taken.job_id), await store.events(taken.job_id)) == before
        await other.end("1f1b")
        with pytest.raises(LeaseLostError):
            await other.end("zb-h2")


async def test_a_worse_schedule_replaces_nothing(store: Store, settings: Settings) -> None:
    await submit(store)
    async with StandIn(settings) as worker:
        job_id = (await worker.claim() or worker.mine).job_id
        await worker.find("zb-h2")
        best = await store.best_schedule(job_id)
        await worker.find("gpipe")
        assert await store.best_schedule(job_id) == best
        assert Schedule.from_json(best.text).method == "zb-h2"


async def test_given_back_it_keeps_its_place_and_its_best(store: Store, settings: Settings) -> None:
    await submit(store)
    await submit(store)
    async with StandIn(settings) as worker:
        job_id = (await worker.claim() or worker.mine).job_id
        await leases.give_back(worker.engine, worker.mine, worker.schedule("1f1b"))
        waits = await store.get(job_id)
        assert (waits.status, waits.queue_place, waits.attempt) == ("queued", 1, 1)
        again = await worker.claim()
        assert again is not None
        assert (again.job_id, again.attempt) == (job_id, 2)
        assert again.best is not None
        assert again.best.method == "1f1b"


async def test_urgent_jobs_come_first_and_a_full_worker_gets_none(store: Store, settings: Settings) -> None:
    for priority in (0, 5):
        await submit(store, priority)
    async with StandIn(settings) as worker:
        lease = await worker.claim()
        assert lease is not None
        assert lease.config().priority == 5
        assert await worker.claim() is None


async def test_many_workers_share_the_jobs(store: Store, settings: Settings) -> None:
    for _ in range(4):
        await submit(store)
    workers = [StandIn(settings) for _ in range(8)]
    taken = [lease for lease in await asyncio.gather(*(worker.claim() for worker in workers)) if lease]
    assert len({lease.job_id for lease in taken}) == len(taken) == 4
    for worker in workers:
        await worker.engine.dispose()


async def test_a_cancelled_job_is_not_tried_again(store: Store, settings: Settings) -> None:
    await submit(store)
    async with StandIn(settings) as lost, StandIn(settings) as other:
        job_id = (await lost.claim() or lost.mine).job_id
        assert not await lost.find("gpipe")
        assert (await store.cancel(job_id)).status == "running"
        assert await lost.find("gpipe")  # the heartbeat brings it back
        assert await other.claim(AT_ONCE_S) is None
        cancelled = await store.get(job_id)
        assert (cancelled.status, cancelled.reason, cancelled.stop_reason) == ("cancelled", "feasible", "interrupted")


async def test_cancelled_while_they_are_taken_up(store: Store, settings: Settings) -> None:
    for _ in range(12):
        await submit(store)
    workers = [StandIn(settings) for _ in range(6)]
    jobs = [job.id for job in (await store.list_jobs()).jobs]
    await asyncio.gather(*(store.cancel(job) for job in jobs), *(worker.claim() for worker in workers))
    for worker in workers:
        if worker.lease and await worker.find("gpipe"):
            await leases.end(worker.engine, worker.mine, JobResult("cancelled", None, "no_solution", "interrupted"))
        await worker.engine.dispose()
    assert {(await store.get(job)).status for job in jobs} == {"cancelled"}


async def test_lost_too_often(store: Store, settings: Settings) -> None:
    await submit(store)
    async with StandIn(settings) as worker:
        job_id = (await worker.claim() or worker.mine).job_id
        await worker.find("gpipe")
        for _ in range(MOST_LOST - 1):
            assert (await StandInTwin(settings).claim_once()) is not None
        assert await StandInTwin(settings).claim_once() is None
        assert (await store.get(job_id)).status == "failed"
        assert Schedule.from_json((await store.best_schedule(job_id)).text).method == "gpipe"
        assert (await store.retry(job_id)).job.status == "queued"  # a person may try again
        assert await worker.claim() is not None


class StandInTwin(StandIn):
    """One that claims once and is never heard of again."""

    async def claim_once(self) -> leases.Lease | None:
        async with self:
            return await self.claim(AT_ONCE_S)


REFUSED: list[tuple[str, type[psycopg.Error]]] = [
    ("UPDATE jobs SET status = 'gone'", CheckViolation),
    ("UPDATE jobs SET status = 'running'", CheckViolation),
    ("UPDATE jobs SET status = 'cancelled'", CheckViolation),
    ("UPDATE jobs SET status = 'succeeded', queue_id = NULL, finished_at = now()", CheckViolation),
    ("UPDATE jobs SET queue_id = NULL", CheckViolation),
    ("UPDATE jobs SET lost = 1", CheckViolation),
    ("UPDATE events SET status = 'failed'", RaiseException),
    ("INSERT INTO events SELECT * FROM events", UniqueViolation),
    ("INSERT INTO idempotency_keys SELECT NULL, 'key', '', id FROM jobs, generate_series(1, 2)", UniqueViolation),
]


async def test_the_tables_refuse(store: Store, database_url: str) -> None:
    await submit(store)
    with psycopg.connect(database_url, autocommit=True) as connection:
        for statement, error in REFUSED:
            with pytest.raises(error):
                connection.execute(statement.encode())
