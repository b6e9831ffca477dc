"""One job searched by several workers: who takes a share, what they share, and what the end of any of them does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from threading import Event
from uuid import UUID, uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from api.errors import LeaseLostError
from api.jobs import leases
from api.jobs.database import make_engine, transaction
from api.jobs.leases import Lease
from api.jobs.queue import FOREVER_S, Picker, ages_s
from api.jobs.records import JobConfig, JobResult
from api.jobs.run import OnEvent, SolveRequest
from api.jobs.store import Store
from api.settings import Settings
from instances import uniform
from optpipe.schedule import Schedule
from solver.build import build_schedule
from solver.methods import METHODS, published_orders
from solver.process import ChildResult
from solver.solution import Progress, Solution
from tests.api.harness import START_S, working

PROBLEM = uniform(4, 8)
THREADS = 2
"""Threads that a worker gives to one job."""


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[AsyncEngine]:
    assert settings.database_url is not None
    engine = make_engine(settings.database_url.get_secret_value())
    yield engine
    await engine.dispose()


def picker(slots: int = 1) -> Picker:
    """A worker of its own."""
    return Picker(uuid4(), slots, slots, FOREVER_S)


def found_by(method: str) -> Schedule:
    """A schedule of the problem, with a bound that proves nothing."""
    return build_schedule(PROBLEM, published_orders(METHODS[method], PROBLEM), 1.0, method, 0.5)


async def primary(store: Store, engine: AsyncEngine, workers: int = 6, method: str = "auto") -> Lease:
    """Submit a job that asks for so many threads, and lease it."""
    await store.submit(PROBLEM, JobConfig(workers=workers, method=method))
    (lease,) = await leases.claim(engine, picker(), threads=THREADS)
    return lease


async def helped(engine: AsyncEngine, busy: UUID | None = None) -> Lease | None:
    """A share, taken by a new worker, which is busy with a job."""
    return await leases.claim_share(engine, picker(), {busy} if busy else set())


async def test_workers_take_the_shares_that_the_primary_has_no_threads_for(store: Store, engine: AsyncEngine) -> None:
    first = await primary(store, engine, workers=5)
    assert await helped(engine, busy=first.job_id) is None
    one, other = await helped(engine), await helped(engine)
    assert one is not None
    assert other is not None
    assert [first.share, one.share, other.share] == [0, 1, 2]
    assert {one.job_id, other.job_id} == {first.job_id}
    assert 0 <= one.begun_s < START_S
    assert await helped(engine) is None


@pytest.mark.parametrize(("workers", "method"), [(2, "auto"), (8, "1f1b")])
async def test_there_is_nothing_to_share(store: Store, engine: AsyncEngine, workers: int, method: str) -> None:
    await primary(store, engine, workers, method)
    assert await helped(engine) is None


async def test_each_hears_what_the_others_have_stored(store: Store, engine: AsyncEngine) -> None:
    first = await primary(store, engine)
    helper = await helped(engine)
    assert helper is not None
    worse, better = found_by("gpipe"), found_by("zb-h2")
    assert (await leases.beat(engine, first, worse)).better is None
    heard = (await leases.beat(engine, helper, None)).better
    assert heard is not None
    assert (heard.method, heard.value_us) == ("gpipe", worse.value_us)
    assert (await leases.beat(engine, helper, better)).better is None
    heard = (await leases.beat(engine, first, worse, stored=True)).better
    assert heard is not None
    assert (heard.method, heard.value_us) == ("zb-h2", better.value_us)
    proved = build_schedule(PROBLEM, worse.orders, better.value_us, "gpipe", 0.5)
    assert (await leases.beat(engine, helper, proved)).better is not None  # a proof for the other's schedule
    heard = (await leases.beat(engine, first, better, stored=True)).better
    assert heard is not None
    assert heard.bound_us == heard.value_us == better.value_us
    kinds = [event.kind for event in await store.events(first.job_id)]
    assert kinds == ["status", "status", "incumbent", "incumbent", "bound"]


async def test_the_leases_of_helpers_end_with_the_primary_ones(store: Store, engine: AsyncEngine) -> None:
    first = await primary(store, engine)
    helper = await helped(engine)
    assert helper is not None
    await leases.end(engine, first, JobResult("succeeded", found_by("gpipe"), "feasible", "time"))
    with pytest.raises(LeaseLostError):
        await leases.beat(engine, helper, found_by("zb-h2"))
    assert await helped(engine) is None  # nor is the share that nobody took still there
    assert (await store.get(first.job_id)).value_us == found_by("gpipe").value_us


async def test_what_a_lost_helper_found_is_kept_and_its_share_is_not_searched_again(
    store: Store, engine: AsyncEngine
) -> None:
    first = await primary(store, engine, workers=4)
    helper = await helped(engine)
    assert helper is not None
    await leases.beat(engine, helper, found_by("zb-h2"))
    at_once = replace(picker(), heartbeat_timeout_s=0.0)
    assert await leases.claim_share(engine, at_once, set()) is None
    heard = (await leases.beat(engine, first, None)).better
    assert heard is not None
    assert heard.method == "zb-h2"


async def test_a_job_whose_primary_worker_is_lost_is_solved_by_one_alone(store: Store, engine: AsyncEngine) -> None:
    first = await primary(store, engine)
    helper = await helped(engine)
    assert helper is not None
    await leases.beat(engine, helper, found_by("zb-h2"))
    (again,) = await leases.claim(engine, replace(picker(), heartbeat_timeout_s=0.0), threads=THREADS)
    assert (again.job_id, again.attempt, again.alone) == (first.job_id, 2, True)
    assert again.best is not None
    assert again.best.method == "zb-h2"
    assert await helped(engine) is None
    with pytest.raises(LeaseLostError):
        await leases.beat(engine, helper, None)


async def test_a_share_that_is_given_back_is_taken_again(store: Store, engine: AsyncEngine) -> None:
    await primary(store, engine, workers=4)
    helper = await helped(engine)
    assert helper is not None
    await leases.give_back(engine, helper, None)
    again = await helped(engine)
    assert again is not None
    assert again.share == helper.share


async def test_shares_are_no_jobs_of_the_queue(store: Store, engine: AsyncEngine) -> None:
    await primary(store, engine)
    job = (await store.submit(PROBLEM, JobConfig(name="waits"))).job
    assert (await store.get(job.id)).queue_place == 1
    async with transaction(engine) as connection:
        assert (await ages_s(connection))[0] < START_S
    (lease,) = await leases.claim(engine, picker(slots=4))
    assert lease.job_id == job.id
    assert await leases.claim(engine, picker(slots=4)) == []


class Shared:
    """Solves: the primary begins with a bad schedule, finds nothing, and waits for what the others find."""

    def __init__(self) -> None:
        self.requests: list[SolveRequest] = []
        self.helped = Event()

    def __call__(self, task: SolveRequest, on_event: OnEvent) -> ChildResult:
        self.requests.append(task)
        if task.share:
            best = build_schedule(task.problem, published_orders(METHODS["zb-h2"], task.problem), 0.0, "zb-h2", 0.1)
            best = build_schedule(task.problem, best.orders, best.value_us, "zb-h2", 0.1)
            self.helped.set()
            return ChildResult(best, "optimal", None)
        poor = found_by("gpipe")
        on_event(Progress(Solution(poor.orders, poor.value_us, 0.0, "gpipe"), 0.1))
        while (fed := task.feed.pop()) is None or fed.gap > 0:
            if task.cancel.requested:
                return ChildResult(poor, "feasible", "interrupted")
            self.helped.wait(0.02)
        return ChildResult(fed.to_schedule(task.problem, 0.2), "optimal", None)


async def test_a_proof_of_a_helper_ends_the_job(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"solves": 1, "threads_per_job": THREADS})
    solve = Shared()
    job = (await store.submit(PROBLEM, JobConfig(workers=3, seed=7))).job
    with working(settings, solve), working(settings, solve):
        ended = await store.wait_until_ended(job.id, wait_s=START_S)
    assert (ended.reason, ended.value_us) == ("optimal", found_by("zb-h2").value_us)
    assert sorted((task.share, task.threads, task.limits().lane) for task in solve.requests) == [(0, 2, 0), (1, 1, 1)]


async def test_a_job_that_waits_gets_the_place_of_a_helper(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"solves": 1, "threads_per_job": THREADS})
    hold, begun = Event(), Event()

    def solve(task: SolveRequest, on_event: OnEvent) -> ChildResult:
        best = found_by("zb-h2")
        if task.config.name == "short":
            return ChildResult(best, "feasible", "time")
        if task.share:
            begun.set()
        while not (task.cancel.requested or hold.is_set()):
            hold.wait(0.02)
        return ChildResult(best, "feasible", "interrupted" if task.cancel.requested else "time")

    long = (await store.submit(PROBLEM, JobConfig(workers=4))).job
    with working(settings, solve), working(settings, solve):
        await asyncio.to_thread(begun.wait, START_S)
        short = (await store.submit(PROBLEM, JobConfig(name="short"))).job
        assert (await store.wait_until_ended(short.id, wait_s=START_S)).status == "succeeded"
        assert (await store.get(long.id)).status == "running"
        hold.set()
        assert (await store.wait_until_ended(long.id, wait_s=START_S)).status == "succeeded"
