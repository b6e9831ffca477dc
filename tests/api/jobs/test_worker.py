"""A worker as a process and in a loop: real children, cancel, SIGTERM, and bugs that are not its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import insert

from api.jobs import leases
from api.jobs.database import make_engine, transaction
from api.jobs.records import JobConfig
from api.jobs.results import Equality
from api.jobs.run import ChildSolver, MakePlan, OnEvent, Solve, SolveRequest
from api.jobs.store import Store
from api.jobs.tables import solved_problems
from api.jobs.worker import Worker
from api.settings import Settings
from instances import HALF, uniform
from optpipe.schedule import Schedule
from optpipe.verify import verify
from solver.process import ChildResult
from tests.promises.harness import PATIENCE_S, job_named, scripted, submitted, until, workers_on


@asynccontextmanager
async def working(settings: Settings, solve: Solve, plan: MakePlan | None = None) -> AsyncIterator[Worker]:
    worker = Worker(settings, solve, plan=plan)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await running


async def test_a_child_solves_it(store: Store, settings: Settings) -> None:
    solver = ChildSolver()
    solver.prepare()
    problem = uniform(3, 6, budget=4, offload=HALF)
    async with working(settings, solver):
        done = await store.wait_until_ended((await store.submit(problem, JobConfig(gap=0.5))).job.id, wait_s=PATIENCE_S)
    solver.close()
    assert done.status == "succeeded"
    assert done.stop_reason in (None, "gap")
    schedule = Schedule.from_json((await store.best_schedule(done.id)).text)
    assert verify(schedule).ok
    assert schedule.problem == problem
    assert (await store.submit(problem, JobConfig(gap=0.5))).job.status == "succeeded"


async def test_a_method_that_cannot_says_why(store: Store, settings: Settings) -> None:
    solver = ChildSolver()
    async with working(settings, solver):
        job = (await store.submit(uniform(2, 2, v_shape=True), JobConfig(method="gpipe"))).job
        done = await store.wait_until_ended(job.id, wait_s=PATIENCE_S)
    assert (done.status, done.reason, done.stop_reason) == ("failed", "no_solution", None)
    assert done.error is not None
    assert "gpipe" in done.error


async def test_cancel(store: Store, settings: Settings) -> None:
    async with working(settings, scripted):
        job_id = await submitted(store, "long", seconds=60)
        await until(store, job_id, lambda job: job.value_us is not None)
        await store.cancel(job_id)
        done = await store.wait_until_ended(job_id, wait_s=PATIENCE_S)
    assert (done.status, done.reason, done.stop_reason) == ("cancelled", "feasible", "interrupted")
    assert (await store.best_schedule(job_id)).revision.final


async def test_a_bug_in_a_solve_ends_the_job_alone(store: Store, settings: Settings) -> None:
    def broken(task: SolveRequest, on_event: OnEvent) -> ChildResult:
        if task.problem.name == "broken":
            raise ZeroDivisionError
        return scripted(task, on_event)

    async with working(settings, broken):
        bad = (await store.submit(job_named("broken"), JobConfig())).job.id
        assert (await store.wait_until_ended(bad, wait_s=PATIENCE_S)).error == (
            "a bug in the service ended the solve (ZeroDivisionError)."
        )
        good = await submitted(store, "good", seconds=0.1)
        assert (await store.wait_until_ended(good, wait_s=PATIENCE_S)).status == "succeeded"


async def test_a_bug_in_a_worker_gives_its_jobs_back(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = settings.model_copy(update={"solves": 2})  # one is free, so that it asks for another job
    running = asyncio.create_task(Worker(two, scripted).run())
    job_id = await submitted(store, "long", seconds=60)
    await until(store, job_id, lambda job: job.value_us is not None)
    monkeypatch.setattr(leases, "claim", None)  # not to be called
    with pytest.raises(TypeError):
        await running
    left = await store.get(job_id)
    assert (left.status, left.attempt) == ("queued", 1)


async def test_a_damaged_answer_of_an_equal_problem_counts_as_absent(store: Store, settings: Settings) -> None:
    row = {"asked": "auto", "worker_s": 0, "value": 1, "bound": 0, "method": "", "solve_seconds": 0, "orders": "{}"}
    problem = job_named("damaged")
    engine = make_engine(store.settings.database_url.get_secret_value())
    async with transaction(engine) as connection:
        await connection.execute(insert(solved_problems).values(key=Equality.of(problem).key, **row))
    await engine.dispose()
    async with working(settings, scripted):
        job_id = (await store.submit(problem, JobConfig(time_limit_s=0.1))).job.id
        assert (await store.wait_until_ended(job_id, wait_s=PATIENCE_S)).status == "succeeded"


async def test_sigterm_gives_jobs_back(store: Store, settings: Settings) -> None:
    with workers_on(settings) as workers:
        leaving = workers.start()
        job_id = await submitted(store, "long", seconds=60)
        found = await until(store, job_id, lambda job: job.value_us is not None)
        leaving.terminate()
        waits = await until(store, job_id, lambda job: job.status == "queued")
        assert waits.value_us == found.value_us
        await asyncio.to_thread(leaving.join, PATIENCE_S)
        assert leaving.exitcode == 0
        async with working(settings, scripted):
            done = await store.wait_until_ended(job_id, wait_s=PATIENCE_S)
        assert (done.status, done.attempt) == ("succeeded", 2)
        assert ("lost", "") not in (await store.counts()).totals
