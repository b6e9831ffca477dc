"""Fairness of the queue: keys take turns, priorities count within a key, and a job that lost its worker runs alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from uuid import UUID, uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from api.jobs import leases
from api.jobs.database import make_engine
from api.jobs.leases import Lease
from api.jobs.queue import FOREVER_S, Picker
from api.jobs.records import JobConfig, JobResult
from api.jobs.store import Store
from api.settings import Settings
from tests.api.harness import PROBLEM

AT_ONCE_S = 0.0
_microbatches = count(1)


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[AsyncEngine]:
    assert settings.database_url is not None
    engine = make_engine(settings.database_url.get_secret_value())
    yield engine
    await engine.dispose()


async def new_owner(store: Store) -> UUID:
    return (await store.create_key("test")).key.id


async def submit(store: Store, owner: UUID | None, *names: str, priority: int = 0) -> None:
    """Jobs of different problems: none waits for the end of another."""
    for name in names:
        problem = PROBLEM.model_copy(update={"microbatches": next(_microbatches)})
        await store.submit(problem, JobConfig(name=name, priority=priority), owner)


def picker(slots: int = 1, free: int | None = None, silent_s: float = FOREVER_S, most: int | None = None) -> Picker:
    """A worker of its own."""
    return Picker(uuid4(), slots, slots if free is None else free, silent_s, most)


async def end(engine: AsyncEngine, lease: Lease) -> None:
    await leases.end(engine, lease, JobResult("failed", None, "no_solution", "time", "nothing was found."))


async def names_in_turn(engine: AsyncEngine) -> list[str]:
    """Names of all jobs in the order in which a worker with one place solves them."""
    names, worker = [], picker()
    while taken := await leases.claim(engine, worker):
        (lease,) = taken
        names.append(lease.config().name)
        await end(engine, lease)
    return names


async def test_keys_take_turns(store: Store, engine: AsyncEngine) -> None:
    one, other = await new_owner(store), await new_owner(store)
    await submit(store, one, "a1", "a2", "a3", "a4")
    await submit(store, other, "b1", "b2")
    await submit(store, None, "c1")
    places = {job.config.name: job.queue_place for owner in (one, other) for job in (await store.list_jobs(owner)).jobs}
    assert places == {"a1": 1, "b1": 2, "a2": 4, "b2": 5, "a3": 6, "a4": 7}
    (b2, *_) = (await store.list_jobs(other)).jobs
    assert (await store.get(b2.id, other)).queue_place == 5
    assert await names_in_turn(engine) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_a_priority_counts_among_the_keys_own_jobs(store: Store, engine: AsyncEngine) -> None:
    one, other = await new_owner(store), await new_owner(store)
    await submit(store, other, "b1", "b2")
    await submit(store, one, "a1", priority=0)
    await submit(store, one, "a2", "a3", priority=100)
    assert await names_in_turn(engine) == ["b1", "a2", "b2", "a3", "a1"]


async def test_a_key_leaves_a_place_of_each_worker_to_others(store: Store, engine: AsyncEngine) -> None:
    one, other = await new_owner(store), await new_owner(store)
    await submit(store, one, *"abcdef")
    worker = picker(slots=3)
    assert len(await leases.claim(engine, worker)) == 2
    assert await leases.claim(engine, Picker(worker.worker, 3, 1, FOREVER_S)) == []
    await submit(store, other, "b1")
    (lease,) = await leases.claim(engine, Picker(worker.worker, 3, 1, FOREVER_S))
    assert lease.config().name == "b1"
    assert await leases.claim(engine, picker(slots=2, most=2)) == []  # two of it run already
    assert len(await leases.claim(engine, picker(slots=2, most=3))) == 1


async def test_who_has_no_key_has_all_places(store: Store, engine: AsyncEngine) -> None:
    await submit(store, None, *"abc")
    assert len(await leases.claim(engine, picker(slots=3, most=1))) == 3


async def test_a_job_that_lost_its_worker_runs_alone(store: Store, engine: AsyncEngine) -> None:
    await submit(store, None, "kills", "innocent", "later")
    lost = await leases.claim(engine, picker(slots=2))
    assert [lease.config().name for lease in lost] == ["kills", "innocent"]
    assert not any(lease.alone for lease in lost)
    busy = picker(slots=2, free=1, silent_s=AT_ONCE_S)
    assert await leases.claim(engine, busy) == []  # it finds that the worker is lost, and takes nothing beside its job
    for name in ("kills", "innocent"):
        idle = picker(slots=2, silent_s=AT_ONCE_S)
        (lease,) = await leases.claim(engine, idle)
        assert (lease.config().name, lease.alone, lease.attempt) == (name, True, 2)
        await end(engine, lease)
    (lease,) = await leases.claim(engine, picker(slots=2))
    assert (lease.config().name, lease.alone) == ("later", False)


async def test_who_kills_three_workers_takes_no_innocent_along(store: Store, engine: AsyncEngine) -> None:
    await submit(store, None, "kills", "innocent")
    await leases.claim(engine, picker(slots=2))
    worker = picker(slots=2, silent_s=AT_ONCE_S)
    for attempt in (2, 3):
        (lease,) = await leases.claim(engine, worker)  # and is lost again
        assert (lease.config().name, lease.attempt) == ("kills", attempt)
        worker = picker(slots=2, silent_s=AT_ONCE_S)
    (lease,) = await leases.claim(engine, worker)
    assert (lease.config().name, lease.alone) == ("innocent", True)
    await end(engine, lease)
    jobs = {job.config.name: job for job in (await store.list_jobs()).jobs}
    assert (jobs["kills"].status, jobs["kills"].attempt, jobs["innocent"].attempt) == ("failed", 3, 2)
