"""Totals: what all workers count, added to in the transactions of what is counted."""

from __future__ import annotations

from uuid import UUID

import pytest
from sqlalchemy import text

from api.errors import LeaseLostError, NotFoundError
from api.jobs import leases, queries
from api.jobs.database import make_engine, transaction
from api.jobs.queries import remove_old
from api.jobs.records import JobConfig, JobResult
from api.jobs.store import Store
from api.metrics import Metrics
from api.settings import Settings
from instances import uniform
from tests.api.jobs.stand_in import StandIn

AT_ONCE_S = 0.0


async def test_they_count_what_was_stored_and_nothing_else(store: Store, settings: Settings) -> None:
    for microbatches in (4, 5):
        await store.submit(uniform(2, microbatches), JobConfig())
    async with StandIn(settings) as lost, StandIn(settings) as worker:
        await lost.claim()
        await worker.claim(AT_ONCE_S)
        with pytest.raises(LeaseLostError):
            await leases.end(lost.engine, lost.mine, JobResult("succeeded", lost.schedule("1f1b"), "feasible", None))
        await leases.beat(worker.engine, worker.mine, count=32)
        found = worker.schedule("zb-h1")
        await leases.end(worker.engine, worker.mine, JobResult("succeeded", found, "feasible", "memory"), 3)
        await worker.claim()
        await leases.end(worker.engine, worker.mine, JobResult("failed", None, None, None, "died", died=True))
    assert (await store.counts()).totals == {
        ("lost", ""): 1,
        ("heartbeats", ""): 35,
        ("ended", "succeeded"): 1,
        ("ended", "failed"): 1,
        ("stopped", "memory"): 1,
        ("died", ""): 1,
        ("solve_seconds", "1.0"): 1,  # the stand-in says 0.5
        ("solve_seconds", "sum"): found.solve_seconds,
        ("final_gap", "1.0"): 1,  # and proves nothing
        ("final_gap", "sum"): 1.0,
    }


async def test_prometheus_is_told_of_all_workers(store: Store, settings: Settings) -> None:
    empty = Metrics().text(await store.counts()).decode().splitlines()
    assert 'optpipe_stopped_total{limit="memory"} 0.0' in empty
    for microbatches, limit in ((4, "memory"), (5, "time")):
        await store.submit(uniform(2, microbatches), JobConfig())
        async with StandIn(settings) as worker:  # another one each time
            await worker.claim()
            outcome = JobResult(
                "succeeded", worker.schedule("zb-h1"), "feasible", "memory" if limit == "memory" else "time"
            )
            await leases.end(worker.engine, worker.mine, outcome, 7)
    told = Metrics().text(await store.counts()).decode().splitlines()
    assert {
        'optpipe_ended_total{status="succeeded"} 2.0',
        'optpipe_stopped_total{limit="memory"} 1.0',
        'optpipe_stopped_total{limit="time"} 1.0',
        "optpipe_heartbeats_total 14.0",
        "optpipe_lost_workers_total 0.0",
        "optpipe_solver_deaths_total 0.0",
        'optpipe_solve_seconds_bucket{le="0.3"} 0.0',
        'optpipe_solve_seconds_bucket{le="1.0"} 2.0',
        'optpipe_solve_seconds_bucket{le="+Inf"} 2.0',
        "optpipe_solve_seconds_sum 1.0",
        "optpipe_solve_seconds_count 2.0",
        'optpipe_final_gap_bucket{le="1.0"} 2.0',
    } <= set(told)
    assert len(told) == len(empty)  # the labels are fixed, however much is counted


@pytest.mark.parametrize(
    ("seconds", "label"), [(0.0, "0.1"), (0.1, "0.1"), (0.11, "0.3"), (3600.0, "3600.0"), (1e5, "+Inf")]
)
async def test_a_bucket_holds_its_upper_end(store: Store, settings: Settings, seconds: float, label: str) -> None:
    await store.submit(uniform(2, 4), JobConfig())
    async with StandIn(settings) as worker:
        await worker.claim()
        schedule = worker.schedule("zb-h1").model_copy(update={"solve_seconds": seconds})
    figures = queries.totals_of_result(JobResult("succeeded", schedule, "feasible", "time"))
    assert figures["solve_seconds", label] == 1
    assert sum(name == "solve_seconds" for name, _ in figures) == 2


async def test_by_age_and_number(store: Store, settings: Settings, database_url: str) -> None:
    engine = make_engine(database_url)
    ids = [(await store.submit(uniform(2, 2), JobConfig(), None, str(k), b"")).job.id for k in range(5)]
    waits, *ended = ids
    for job_id in ended:
        await store.cancel(job_id)
    async with transaction(engine) as connection:
        for k, job_id in enumerate(ids):
            await connection.execute(
                text("UPDATE jobs SET submitted_at = now() - make_interval(days => 10 - :k) WHERE id = :id"),
                {"k": k, "id": job_id},
            )
            await connection.execute(
                text("UPDATE jobs SET finished_at = submitted_at WHERE id = :id AND finished_at IS NOT NULL"),
                {"id": job_id},
            )
    assert await remove_old(engine, settings.model_copy(update={"keep_jobs_days": 8.5})) == 1
    assert await remove_old(engine, settings.model_copy(update={"keep_jobs": 2})) == 1
    assert await _there(store, ids) == [waits, *ended[-2:]]
    assert await remove_old(engine, settings) == 0
    await engine.dispose()


async def _there(store: Store, ids: list[UUID]) -> list[UUID]:
    found = []
    for job_id in ids:
        try:
            found.append((await store.get(job_id)).id)
        except NotFoundError:
            continue
    return found
