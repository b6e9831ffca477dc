"""S15: nothing that one key does takes results or room from another: whatever is limited is counted by key."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from uuid import UUID

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from api.app import create_app
from api.errors import KeyEndedError, NotFoundError, TooManyError
from api.jobs import queries
from api.jobs.database import make_engine, transaction
from api.jobs.queries import remove_old
from api.jobs.records import JobConfig, JobLabels
from api.jobs.store import Store
from api.jobs.tables import jobs, solved_problems
from api.service import MOST_CONNECTIONS_OF_ONE, Service
from api.settings import Settings
from instances import uniform
from tests.api.harness import body, client_of, listening
from tests.api.jobs.stand_in import StandIn

PROBLEM = uniform(2, 4)


async def new_owner(store: Store, name: str = "one") -> UUID:
    return (await store.create_key(name)).key.id


async def submit(store: Store, owner: UUID | None, microbatches: int = 4) -> UUID:
    return (await store.submit(uniform(2, microbatches), JobConfig(), owner)).job.id


@pytest.fixture
async def engine(settings: Settings) -> AsyncEngine:
    assert settings.database_url is not None
    return make_engine(settings.database_url.get_secret_value())


async def test_ended_jobs_of_one_key_push_out_none_of_another(
    store: Store, settings: Settings, engine: AsyncEngine
) -> None:
    owners = [await new_owner(store, "one"), await new_owner(store, "other"), None]
    for owner, count in zip(owners, (2, 5, 1), strict=True):  # the oldest are those of the first one
        for _ in range(count):
            await store.cancel(await submit(store, owner), owner)
    assert await remove_old(engine, settings.model_copy(update={"keep_jobs": 2})) == 3
    assert [len((await store.list_jobs(owner)).jobs) for owner in owners] == [2, 2, 1]
    await engine.dispose()


@pytest.mark.parametrize("limit", ["MOST_ANSWERS", "MOST_ANSWER_BYTES"])
async def test_solutions_of_one_key_push_out_none_of_another(
    store: Store, settings: Settings, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    one, other = await new_owner(store, "one"), await new_owner(store, "other")
    async with StandIn(settings) as worker:
        for owner, microbatches in ((one, 2), (other, 3), (other, 4), (other, 5)):
            await submit(store, owner, microbatches)
            await worker.claim()
            await worker.solve("1f1b")
    longest = 0
    async with transaction(engine) as connection:
        for orders in (await connection.execute(select(solved_problems.c.orders))).scalars():
            longest = max(longest, len(orders))
    monkeypatch.setattr(queries, limit, 1 if limit == "MOST_ANSWERS" else longest)
    await remove_old(engine, settings)
    known = [(await store.submit(uniform(2, n), JobConfig(time_limit_s=1), one)).job.ended for n in (2, 3, 4, 5)]
    assert known == [True, False, False, True]
    await engine.dispose()


async def test_what_was_submitted_counts_though_it_is_removed_or_tried_again(settings: Settings) -> None:
    async with Store(settings.model_copy(update={"max_submissions_a_minute": 4})) as store:
        one, other = await new_owner(store, "one"), await new_owner(store, "other")
        removed, again = await submit(store, one), await submit(store, one)
        await store.delete(removed, one)
        for left in (1, 0):
            await store.cancel(again, one)
            assert (await store.retry(again, one)).rate.left == left
        await store.cancel(again, one)
        for refused in (store.retry(again, one), submit(store, one)):
            with pytest.raises(TooManyError, match="submitted 4 jobs"):
                await refused
        assert (await store.get(again, one)).status == "cancelled"
        assert (await store.get(await submit(store, other), other)).status == "queued"


async def test_what_is_stored_counts_for_its_key(settings: Settings, engine: AsyncEngine) -> None:
    room = 3 * len(PROBLEM.to_json())
    async with Store(settings.model_copy(update={"max_stored_bytes": room})) as store:
        one, other = await new_owner(store, "one"), await new_owner(store, "other")
        first, second = await submit(store, one), await submit(store, one)
        await store.rename(first, JobLabels(note="n" * room), one)
        with pytest.raises(TooManyError, match=r"max_stored_bytes\)\. Maybe remove"):
            await submit(store, one)
        await submit(store, other)
        await store.delete(first, one)
        async with StandIn(settings) as worker:
            await worker.claim()
            await worker.end("1f1b")
        schedule = (await store.best_schedule(second, one)).text
        async with transaction(engine) as connection:
            stored = (await connection.execute(select(jobs.c.stored_bytes).where(jobs.c.id == second))).scalar_one()
        assert stored >= len(PROBLEM.to_json()) + len(schedule)
        with pytest.raises(TooManyError, match="max_stored_bytes"):
            await submit(store, one)
    await engine.dispose()


async def test_a_key_waits_for_its_jobs_whatever_became_of_their_first_key(store: Store) -> None:
    """The caller's own key decides: the first one of the same jobs may be revoked long before."""
    first = (await store.create_key("first")).key
    second = (await store.create_key("second", owner=first.id)).key
    job = await submit(store, first.id)
    position = await store.newest_position()
    await store.revoke_key(first.id)
    waited = await store.wait_until_ended(job, second.owner, 0.1, second.id)
    assert (waited.id, waited.status) == (job, "queued")
    assert len(await store.events(job, second.owner, key=second.id)) == 1
    assert (await store.all_events(second.owner, position, key=second.id)).events == []
    with pytest.raises(KeyEndedError, match="revoked or expired"):
        await store.wait_until_ended(job, first.id, 60, first.id)
    await store.delete(job, second.owner)
    with pytest.raises(NotFoundError):
        await store.wait_until_ended(job, second.owner, 60, second.id)


def test_over_http_too(settings: Settings) -> None:
    keyed = settings.model_copy(update={"require_keys": True, "max_submissions_a_minute": 3})
    app = create_app(keyed)
    with listening(app) as url:
        service: Service = app.state.service
        first, second, other = _keys(keyed)
        with client_of(url, second) as client, client_of(url, other) as stranger:
            assert client.post("/v1/schedules", params={"wait": 0.1}, json=body()).status_code == 202
            solving = client.post("/v1/solve", params={"wait": 0.1}, json=body(seed=1))
            assert solving.status_code == 202
            path = solving.headers["location"]
            assert client.get(path, params={"wait": 0.1}).json()["status"] == "queued"
            assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
            again = client.post(f"{path}/retry")
            assert (again.status_code, again.headers["ratelimit"].split(";")[1]) == (202, "r=0")
            client.post(f"{path}/cancel")
            refused = client.post(f"{path}/retry")
            assert (refused.status_code, refused.json()["errors"][0]["code"]) == (429, "submissions")
            assert stranger.post("/v1/schedules", json=body()).status_code == 202
            theirs = f"/v1/schedules/{stranger.get('/v1/schedules').json()['jobs'][0]['id']}"
            with ExitStack() as waiting:
                for _ in range(MOST_CONNECTIONS_OF_ONE):  # whichever key of these jobs it is that waits
                    waiting.enter_context(service.connections.taken(UUID(hex=first.split("_")[1])))
                assert client.get(path, params={"wait": 0.1}).status_code == 429
                assert stranger.get(theirs, params={"wait": 0.1}).status_code == 200


def _keys(settings: Settings) -> list[str]:
    """Secrets of a key that is revoked, of one for its jobs, and of another one."""

    async def make() -> list[str]:
        async with Store(settings) as store:
            first = await store.create_key("first")
            second, other = await store.create_key("second", owner=first.key.id), await store.create_key("other")
            await store.revoke_key(first.key.id)
            return [first.secret, second.secret, other.secret]

    return asyncio.run(make())
