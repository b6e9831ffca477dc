"""Answers: a problem that comes again word for word has the document that was verified and written before."""

from __future__ import annotations

import hashlib
from typing import Any

import psycopg
import pytest

from api.jobs import leases, submit
from api.jobs.database import make_engine
from api.jobs.queries import remove_old
from api.jobs.records import Job, JobConfig
from api.jobs.store import Store
from api.settings import Settings
from instances import uniform
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.verify import verify
from solver.build import build_schedule
from tests.api.jobs.stand_in import StandIn

PROBLEM = uniform(2, 4, name="mine")
RENAMED = PROBLEM.model_copy(update={"name": "yours"})


async def _solved(store: Store, method: str = "1f1b", time_limit_s: float = 1) -> None:
    """Solve PROBLEM as a worker would, and remember it."""
    await store.submit(PROBLEM, JobConfig(time_limit_s=time_limit_s, seed=int(time_limit_s)))
    async with StandIn(store.settings) as worker:
        await worker.claim()
        await worker.solve(method)


async def _again(store: Store, problem: Problem = PROBLEM, **config: Any) -> Job:
    return (await store.submit(problem, JobConfig(time_limit_s=1, **config))).job


def _rows(settings: Settings, query: str) -> list[Any]:
    assert settings.database_url is not None
    with psycopg.connect(settings.database_url.get_secret_value()) as connection:
        return [row[0] for row in connection.execute(query.encode()).fetchall()]


async def test_the_same_words_have_the_same_document(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _solved(store)
    first = await _again(store)  # timed, verified and written
    monkeypatch.setattr(submit, "rebuild_schedule", None)  # nothing is made any more
    again = [await _again(store, name=f"again {k}", tags=["t"]) for k in range(3)]
    texts = [await store.best_schedule(job.id) for job in (first, *again)]
    assert len({text.text for text in texts}) == 1
    schedule = Schedule.from_json(texts[0].text)
    assert verify(schedule).ok
    for job in again:
        assert job == await store.get(job.id)
        assert (job.status, job.reason, job.stop_reason, job.revision) == ("succeeded", "feasible", "time", 1)
        assert (job.value_us, job.bound_us) == (schedule.value_us, schedule.bound_us)
        (event,) = await store.events(job.id)
        assert (event.kind, event.status, event.value_us) == ("status", "succeeded", schedule.value_us)
        assert (event.method, event.seconds) == (schedule.method, schedule.solve_seconds)
    digests = _rows(settings, "SELECT DISTINCT document FROM schedules")
    texts = _rows(settings, "SELECT text FROM documents")
    assert sorted(digests) == sorted(hashlib.sha256(text.encode()).digest() for text in texts)


async def test_other_words_have_a_document_of_their_own(store: Store) -> None:
    await _solved(store)
    for problem in (PROBLEM, RENAMED, PROBLEM):
        job = await _again(store, problem)
        schedule = Schedule.from_json((await store.best_schedule(job.id)).text)
        assert (job.status, job.problem_name, schedule.problem) == ("succeeded", problem.name, problem)


async def test_who_asks_for_more_is_not_put_off(store: Store) -> None:
    await _solved(store)
    await _again(store)
    more = await store.submit(PROBLEM, JobConfig(time_limit_s=2))
    assert more.job.status == "queued"


async def test_a_better_schedule_is_the_answer_from_then_on(store: Store) -> None:
    await _solved(store, "gpipe", time_limit_s=1)
    before = await _again(store)
    await _solved(store, "zb-h1", time_limit_s=2)
    after = await _again(store)
    assert after.value_us is not None
    assert before.value_us is not None
    assert after.value_us < before.value_us
    methods = [Schedule.from_json((await store.best_schedule(job.id)).text).method for job in (before, after)]
    assert methods == ["gpipe", "zb-h1"]


async def test_a_better_bound_makes_another_document(store: Store, settings: Settings) -> None:
    """Callers tell documents apart by the revision, which is in the ETag."""
    job = (await store.submit(PROBLEM, JobConfig())).job
    async with StandIn(settings) as worker:
        await worker.claim()
        await worker.find("1f1b")
        before = await store.best_schedule(job.id)
        found = worker.schedule("1f1b")
        proved = build_schedule(PROBLEM, found.orders, 5.0, found.method, found.solve_seconds)
        await leases.beat(worker.engine, worker.mine, proved)
    after = await store.best_schedule(job.id)
    assert [Schedule.from_json(best.text).bound_us for best in (before, after)] == [0.0, 5.0]
    assert before.revision.revision < after.revision.revision == (await store.get(job.id)).revision


async def test_it_can_be_tried_again_from_its_schedule(store: Store, settings: Settings) -> None:
    await _solved(store)
    await _again(store)
    job = await _again(store)
    assert (await store.retry(job.id)).job.status == "queued"
    assert (await store.best_schedule(job.id)).revision.final is False
    async with StandIn(settings) as worker:
        lease = await worker.claim()
        assert lease is not None
        assert lease.best is not None
        assert lease.best.method == "1f1b"


async def test_a_schedule_counts_as_stored_with_or_without_a_document(store: Store, settings: Settings) -> None:
    """One that is tried again and cancelled has its schedule still, and would take none of its key's share."""
    counted = "SELECT stored_bytes - octet_length(problem) - 200 * revision FROM jobs"
    orders = "SELECT octet_length(orders) FROM incumbents"
    job = (await store.submit(PROBLEM, JobConfig())).job
    async with StandIn(settings) as worker:
        await worker.claim()
        await worker.find("gpipe")
        assert _rows(settings, counted) == _rows(settings, orders) != []
        await worker.end("zb-h1")
    assert _rows(settings, counted) == [len((await store.best_schedule(job.id)).text.encode())]
    await store.retry(job.id)
    await store.cancel(job.id)
    assert _rows(settings, counted) == _rows(settings, orders)


async def test_a_document_goes_with_the_last_who_needs_it(store: Store, settings: Settings) -> None:
    """A job's own, that of an answer; and one that was just written is let be."""
    assert settings.database_url is not None
    url = settings.database_url.get_secret_value()
    engine = make_engine(url)
    await _solved(store)
    job = await _again(store)
    await _again(store, RENAMED)  # the answer is this one's now
    await store.delete((await store.list_jobs(limit=3)).jobs[2].id)  # the worker's
    await store.delete(job.id)
    await remove_old(engine, settings)
    assert len(_rows(settings, "SELECT digest FROM documents")) == 2
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE documents SET written_at = now() - interval '2 hours'")
    await remove_old(engine, settings)
    (left,) = _rows(settings, "SELECT text FROM documents")
    assert Schedule.from_json(left).problem == RENAMED
    await engine.dispose()
