"""The store: what routes ask for, each against a PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from api.errors import (
    BadCursorError,
    ConflictError,
    IdempotencyMismatchError,
    NoScheduleError,
    NotFoundError,
    TooManyError,
)
from api.jobs.records import JobConfig
from api.jobs.store import Store
from api.settings import Settings
from instances import uniform
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.verify import verify
from tests.api.jobs.stand_in import StandIn

PROBLEM = uniform(2, 4, name="mine")


async def submit(store: Store, owner: UUID | None = None, **config: Any) -> UUID:
    return (await store.submit(PROBLEM, JobConfig(**config), owner)).job.id


async def test_jobs_wait_in_their_places(store: Store) -> None:
    first, urgent, last = [await submit(store, priority=priority) for priority in (0, 1, 0)]
    assert [(await store.get(job)).queue_place for job in (urgent, first, last)] == [1, 2, 3]
    assert (await store.cancel(urgent)).status == "cancelled"
    assert [job.queue_place for job in (await store.list_jobs()).jobs] == [2, None, 1]
    assert Problem.from_json(await store.problem_text(first)) == PROBLEM


async def test_times_are_utc_wherever_the_server_is(settings: Settings) -> None:
    assert settings.database_url is not None
    with psycopg.connect(settings.database_url.get_secret_value(), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET timezone = 'Asia/Tokyo'".encode())
    async with Store(settings) as store:
        job = await store.get(await submit(store))
        assert job.submitted_at.utcoffset() == timedelta(0)
        (event,) = await store.events(job.id)
        assert event.at.isoformat() == job.submitted_at.isoformat()


async def test_an_idempotency_key_stands_for_one_body(store: Store) -> None:
    first = await store.submit(PROBLEM, JobConfig(), None, "key", b"body")
    again = await store.submit(PROBLEM, JobConfig(), None, "key", b"body")
    assert (first.created, again.created, again.job.id) == (True, False, first.job.id)
    with pytest.raises(IdempotencyMismatchError):
        await store.submit(PROBLEM, JobConfig(), None, "key", b"another")
    owner = (await store.create_key("other")).key.id
    other = await store.submit(PROBLEM, JobConfig(), owner, "key", b"another")
    assert other.created
    await store.delete(first.job.id)
    assert (await store.submit(PROBLEM, JobConfig(), None, "key", b"another")).created


async def test_pages_hold_every_job_once(store: Store) -> None:
    ids = [await submit(store, tags=["odd"] if k % 2 else []) for k in range(5)]
    newest = list(reversed(ids))
    first = await store.list_jobs(limit=2)
    second = await store.list_jobs(limit=2, cursor=first.cursor)
    third = await store.list_jobs(limit=2, cursor=second.cursor)
    assert [job.id for page in (first, second, third) for job in page.jobs] == newest
    assert third.cursor is None
    assert [job.id for job in (await store.list_jobs(tag="odd")).jobs] == newest[1::2]
    assert (await store.list_jobs(status="running")).jobs == []
    for cursor in ("", "x", first.cursor[:-8] if first.cursor else "", "MjAyNi0wMS0wMSB4", "é"):
        with pytest.raises(BadCursorError):
            await store.list_jobs(cursor=cursor)


async def test_another_owners_job_is_not_there(store: Store) -> None:
    mine, other = [(await store.create_key(name)).key.id for name in ("mine", "other")]
    job = await submit(store, mine)
    for owner in (other, None):
        for ask in (store.get, store.problem_text, store.cancel, store.delete, store.retry, store.best_schedule):
            with pytest.raises(NotFoundError):
                await ask(job, owner)
        with pytest.raises(NotFoundError):
            await store.events(job, owner)
        assert (await store.list_jobs(owner)).jobs == []
    assert (await store.get(job, mine)).status == "queued"


async def test_caps_of_a_key(settings: Settings) -> None:
    async with Store(settings.model_copy(update={"max_queued_jobs": 3, "max_submissions_a_minute": 4})) as store:
        owner = (await store.create_key("other")).key.id
        jobs = [await submit(store) for _ in range(3)]
        with pytest.raises(TooManyError) as refused:
            await submit(store)
        assert refused.value.code == "queued_jobs"
        await submit(store, owner)
        for job in jobs:
            await store.cancel(job)
        await submit(store)
        await store.cancel((await store.list_jobs()).jobs[0].id)
        with pytest.raises(TooManyError) as refused:
            await submit(store)
        assert refused.value.code == "submissions"
        assert 0 < refused.value.retry_after_s <= 60


async def test_the_life_of_a_job(store: Store, settings: Settings) -> None:
    job = await submit(store)
    with pytest.raises(NoScheduleError):
        await store.best_schedule(job)
    with pytest.raises(ConflictError):
        await store.retry(job)
    async with StandIn(settings) as worker:
        await worker.claim()
        with pytest.raises(ConflictError):
            await store.delete(job)
        await worker.find("gpipe")
        early = await store.best_schedule(job)
        assert not early.revision.final
        assert verify(Schedule.from_json(early.text)).ok
        await worker.end("zb-h1")
    done = await store.get(job)
    assert (done.status, done.reason, done.stop_reason, done.attempt) == ("succeeded", "feasible", "time", 1)
    final = await store.best_schedule(job)
    assert final.revision.final
    assert Schedule.from_json(final.text).value_us == done.value_us
    told = await store.events(job)
    assert [(event.kind, event.status) for event in told] == [
        ("status", "queued"),
        ("status", "running"),
        ("incumbent", "running"),
        ("incumbent", "running"),
        ("status", "succeeded"),
    ]
    assert await store.events(job, after=3) == told[3:]

    again = (await store.retry(job)).job
    assert (again.status, again.value_us, again.finished_at) == ("queued", done.value_us, None)
    assert Schedule.from_json((await store.best_schedule(job)).text).value_us == done.value_us
    await store.delete(job)
    with pytest.raises(NotFoundError):
        await store.get(job)
    assert (await store.counts()).jobs["queued"] == 0


async def test_an_equal_problem_is_answered_at_once(store: Store, settings: Settings) -> None:
    await submit(store, time_limit_s=1)
    async with StandIn(settings) as worker:
        await worker.claim()
        await worker.solve("1f1b")
    answered = await store.submit(_in_nanoseconds(PROBLEM), JobConfig(time_limit_s=1))
    assert (answered.job.status, answered.job.attempt, answered.created) == ("succeeded", 0, True)
    schedule = Schedule.from_json((await store.best_schedule(answered.job.id)).text)
    assert verify(schedule).ok
    assert schedule.problem.name == "in nanoseconds"
    first = (await store.list_jobs()).jobs[1]
    assert first.value_us is not None
    assert schedule.value_us == 1000 * first.value_us
    assert (await store.submit(PROBLEM, JobConfig(time_limit_s=2))).job.status == "queued"
    assert (await store.submit(PROBLEM, JobConfig(method="milp", time_limit_s=1))).job.status == "queued"


def _in_nanoseconds(problem: Problem) -> Problem:
    """The problem with all times a thousand times as large."""
    data = problem.to_data()
    for stage in data["stages"]:
        for name in ("forward_us", "backward_input_us", "backward_weight_us"):
            stage[name] *= 1000
    return Problem.from_data(data | {"name": "in nanoseconds", "transfer_us": 1000 * data["transfer_us"]})


async def test_who_waits_is_told(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.jobs.store.LOOK_AGAIN_S", 600.0)  # nobody looks without being told
    job = await submit(store)
    assert await store.events(job, after=1) == []
    waiting = asyncio.create_task(store.events(job, after=1, wait_s=60))
    ending = asyncio.create_task(store.wait_until_ended(job, wait_s=60))
    await asyncio.sleep(0.2)
    async with Store(settings) as elsewhere:
        await elsewhere.cancel(job)
    async with asyncio.timeout(50):
        (event,) = await waiting
        assert event.status == "cancelled"
        assert (await ending).status == "cancelled"


async def test_keys(store: Store) -> None:
    made = await store.create_key("ci")
    assert await store.verify_key(made.secret) == made.key
    for wrong in (
        "",
        "optpipe_",
        made.secret[:-1],
        made.secret + "A",
        f"optpipe_{uuid4().hex}_{'A' * 43}",
        "é\ud800",
    ):
        assert await store.verify_key(wrong) is None
    revoked = await store.revoke_key(made.key.id)
    assert revoked.revoked_at is not None
    assert await store.revoke_key(made.key.id) == revoked
    assert await store.verify_key(made.secret) is None
    assert await store.list_keys() == [revoked]
    with pytest.raises(NotFoundError):
        await store.revoke_key(uuid4())
