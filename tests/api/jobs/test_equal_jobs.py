"""Equal problems in flight: one is solved, the others have its schedule; to cancel one job cancels no other."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from api.jobs import leases
from api.jobs.database import transaction
from api.jobs.leases import FOREVER_S
from api.jobs.queue import Picker
from api.jobs.records import Job, JobConfig, JobResult
from api.jobs.store import Store
from api.jobs.submit import ParsedProblem, Request
from api.jobs.tables import jobs
from api.settings import Settings
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.verify import verify
from tests.api.harness import PROBLEM, Stepwise
from tests.api.jobs.stand_in import StandIn
from tests.api.jobs.test_worker import working
from tests.promises.harness import PATIENCE_S, until

RENAMED = PROBLEM.model_copy(update={"name": "another name"})


async def submit(store: Store, owner: UUID | None = None, problem: Problem = PROBLEM, **config: Any) -> UUID:
    return (await store.submit(problem, JobConfig(**config), owner)).job.id


async def claimed(worker: StandIn, slots: int = 4) -> list[UUID]:
    """Take up all jobs that may be taken up, at once."""
    return [lease.job_id for lease in await leases.claim(worker.engine, Picker(worker.id, slots, slots, FOREVER_S))]


async def test_one_is_solved_and_all_have_its_schedule(store: Store, settings: Settings) -> None:
    solved: list[str] = []
    done = False

    def solve(task: Any, on_event: Any) -> Any:
        solved.append(task.config.name)
        return Stepwise(lambda: done)(task, on_event)

    four = settings.model_copy(update={"solves": 4})
    other = (await store.create_key("other")).key.id
    async with working(four, solve):
        first = await submit(store, name="first")
        await until(store, first, lambda job: job.value_us is not None)
        second = await submit(store, problem=RENAMED, name="second")
        foreign = await submit(store, other, name="foreign")
        last = await submit(store, problem=PROBLEM.model_copy(update={"microbatches": 5}), name="last")
        await until(store, last, lambda job: job.status == "running")  # they came before it, and were passed over
        assert [(await store.get(second)).status, (await store.get(foreign, other)).status] == ["queued", "queued"]
        done = True
        jobs = [
            await store.wait_until_ended(job_id, owner, PATIENCE_S)
            for job_id, owner in ((first, None), (second, None), (foreign, other))
        ]
    assert sorted(solved) == ["first", "last"]
    outcomes = {(job.status, job.value_us, job.bound_us, job.reason, job.stop_reason) for job in jobs}
    assert len(outcomes) == 1
    assert jobs[0].status == "succeeded"
    for job, owner, problem in zip(jobs, (None, None, other), (PROBLEM, RENAMED, PROBLEM), strict=True):
        schedule = Schedule.from_json((await store.best_schedule(job.id, owner)).text)
        assert schedule.problem == problem
        assert verify(schedule).ok


async def test_those_that_wait_for_a_place_have_the_schedule_too(store: Store, settings: Settings) -> None:
    """One key has one of two places, so none of its equal jobs ever waits for another that runs."""
    solved: list[str] = []

    def solve(task: Any, on_event: Any) -> Any:
        solved.append(task.config.name)
        return Stepwise(lambda: True)(task, on_event)

    owner = (await store.create_key("one")).key.id
    first, *others = [await submit(store, owner, name=f"job {k}", tags=[f"tag {k}"], gap=1.0) for k in range(4)]
    await store.cancel(others.pop(), owner)
    async with working(settings.model_copy(update={"solves": 2}), solve):
        ended = [await store.wait_until_ended(job_id, owner, PATIENCE_S) for job_id in (first, *others)]
        assert solved == ["job 0"]
        answered = (await store.submit(PROBLEM, JobConfig(name="answered", gap=1.0), owner)).job
        assert (answered.status, answered.attempt) == ("succeeded", 0)
        for job_id in (first, others[0], answered.id):  # what is tried again is searched again
            await store.retry(job_id, owner)
            await store.wait_until_ended(job_id, owner, PATIENCE_S)
        assert solved == ["job 0", "job 0", "job 1", "answered"]
    assert [(job.status, job.value_us) for job in ended] == [("succeeded", ended[0].value_us)] * 3
    assert [(job.config.name, job.config.tags) for job in ended] == [(f"job {k}", [f"tag {k}"]) for k in range(3)]


async def test_a_known_problem_under_many_names_is_answered_at_once(store: Store, settings: Settings) -> None:
    await submit(store)
    async with StandIn(settings) as worker:
        await worker.claim()
        await worker.solve("1f1b")
    named = [ParsedProblem(PROBLEM.model_copy(update={"name": f"name {k}"})) for k in range(5)]
    requests = [Request(problem, JobConfig(), None, None, b"") for problem in named]
    together = await store.submit_all(requests)
    at_once = await asyncio.gather(*(store.submit_request(request) for request in requests))
    for submission in (*together, *at_once):
        assert submission.job.status == "succeeded"
        schedule = Schedule.from_json((await store.best_schedule(submission.job.id)).text)
        assert schedule.problem.name == submission.job.problem_name
        assert verify(schedule).ok


async def test_no_job_is_held_for_longer_than_its_own_time_limit(store: Store, settings: Settings) -> None:
    """It waits for one after the other, and all its waits count."""
    first, second, third = [await submit(store) for _ in range(3)]
    async with StandIn(settings) as worker, StandIn(settings) as twin, StandIn(settings) as late:
        assert await claimed(worker) == [first]
        assert await claimed(twin) == []
        async with transaction(worker.engine) as connection:
            began = update(jobs).where(jobs.c.id == third)
            await connection.execute(began.values(held_at=jobs.c.held_at - timedelta(seconds=10)))
        await store.cancel(first)
        await _end(worker.engine, await store.get(first), worker.id)
        assert await claimed(twin) == [second, third]  # 10 s of its 30 are gone, and the second may take 30
        assert await claimed(late) == []


async def test_of_equal_jobs_one_is_taken_up_and_room_is_left_to_others(store: Store, settings: Settings) -> None:
    first, _second, _third = [await submit(store) for _ in range(3)]
    other = await submit(store, problem=PROBLEM.model_copy(update={"microbatches": 5}))
    async with StandIn(settings) as worker, StandIn(settings) as twin:
        assert await claimed(worker, slots=2) == [first, other]
        assert await claimed(twin) == []


async def test_two_workers_at_once_do_not_both_solve_it(store: Store, settings: Settings) -> None:

    for _ in range(6):
        await submit(store)
    workers = [StandIn(settings) for _ in range(6)]
    taken = await asyncio.gather(*(claimed(worker, slots=1) for worker in workers))
    assert sum(map(len, taken)) == 1
    for worker in workers:
        await worker.engine.dispose()


@pytest.mark.parametrize(
    "config",
    [
        {"method": "search"},
        {"seed": 1},
        {"workers": 2},
        {"gap": 0.01},
        {"time_limit_s": 60.0},
        {"time_limit_s": 5.0},  # the one that runs may take longer than this one is to
    ],
)
async def test_one_that_asks_for_something_else_is_solved_too(
    store: Store, settings: Settings, config: dict[str, Any]
) -> None:
    asked = {"gap": 0.02} | config if "gap" not in config else config
    running = {"gap": 0.05} if "gap" in config else {"gap": 0.02}
    jobs = [await submit(store, **running), await submit(store, **asked)]
    async with StandIn(settings) as worker:
        assert sorted(await claimed(worker)) == sorted(jobs)


async def test_the_cancel_of_one_leaves_the_other_alone(store: Store, settings: Settings) -> None:
    running, waiting, cancelled = [await submit(store) for _ in range(3)]
    async with StandIn(settings) as worker, StandIn(settings) as twin:
        assert await claimed(worker) == [running]
        assert (await store.cancel(cancelled)).status == "cancelled"
        assert (await store.get(running)).status == "running"
        assert (await store.cancel(running)).status == "running"  # until its worker hears of it
        assert await claimed(twin) == []
        await _end(worker.engine, await store.get(running), worker.id)
        (lease,) = await leases.claim(twin.engine, Picker(twin.id, 4, 4, FOREVER_S))
        assert (lease.job_id, lease.attempt) == (waiting, 1)


async def _end(engine: AsyncEngine, job: Job, worker: UUID) -> None:
    """End a job as its worker does that was told to cancel it."""

    async with transaction(engine) as connection:
        row = (await connection.execute(select(jobs).where(jobs.c.id == job.id))).one()
    lease = leases.Lease(job.id, worker, 1, row.queue_id, row.problem, row.config, None, alone=False)
    await leases.end(engine, lease, JobResult("cancelled", None, "no_solution", "interrupted"))


async def test_one_that_cannot_have_the_answer_is_solved(store: Store, settings: Settings) -> None:
    """The job that it waited for was cancelled, and left nothing that would do."""
    async with working(settings.model_copy(update={"solves": 2}), Stepwise(lambda: False)):
        running = await submit(store)
        await until(store, running, lambda job: job.value_us is not None)
        waiting = await submit(store)
        await store.cancel(running)
        taken = await until(store, waiting, lambda job: job.value_us is not None)
        assert (taken.status, taken.attempt) == ("running", 1)
        await store.cancel(waiting)
        await until(store, waiting, lambda job: job.ended)


async def test_what_is_tried_again_is_searched_again(store: Store, settings: Settings) -> None:
    first, second = [await submit(store) for _ in range(2)]
    async with StandIn(settings) as worker, StandIn(settings) as twin:
        assert await claimed(worker) == [first]
        assert await claimed(twin) == []
        await store.cancel(second)
        await store.retry(second)
        assert await claimed(twin) == []  # it has never been tried
        await _end(worker.engine, await store.get(first), worker.id)
        assert await claimed(twin) == [second]
        await store.retry(first)
        assert await claimed(worker) == [first]


async def test_the_place_in_the_queue_tells_nothing_of_others(store: Store, settings: Settings) -> None:
    one, other = [(await store.create_key(name)).key.id for name in ("one", "other")]
    await submit(store, one)
    await submit(store, other)
    await submit(store, other, PROBLEM.model_copy(update={"microbatches": 5}))
    async with StandIn(settings) as worker:
        assert len(await claimed(worker, slots=1)) == 1
        before = [job.queue_place for job in (await store.list_jobs(other)).jobs]
        async with StandIn(settings) as twin:
            assert await claimed(twin, slots=1) == [(await store.list_jobs(other)).jobs[0].id]
        assert before == [2, 1]
        assert [job.queue_place for job in (await store.list_jobs(other)).jobs] == [None, 1]
