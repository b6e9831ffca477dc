"""Events of all jobs of an owner: each once, those of a job in order, whichever transaction commits first."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import make_url

from api.jobs import feed
from api.jobs.feed import FeedPosition
from api.jobs.records import JobConfig
from api.jobs.store import Store
from tests.api.harness import PROBLEM

APPEND = "INSERT INTO events (job_id, revision, kind, attempt, status) VALUES (%s, %s, 'status', 0, 'queued')"


async def submitted(store: Store) -> UUID:
    return (await store.submit(PROBLEM, JobConfig())).job.id


async def test_an_event_that_is_committed_late_is_not_passed_over(store: Store, database_url: str) -> None:
    late, early = await submitted(store), await submitted(store)
    after = await store.newest_position()
    with psycopg.connect(database_url) as first, psycopg.connect(database_url, autocommit=True) as second:
        first.execute(APPEND, (late, 2))
        second.execute(APPEND, (early, 2))
        batch = await store.all_events(None, after)
        assert (batch.events, batch.more) == ([], True)  # the second waits for the first
        first.commit()
    batch = await store.all_events(None, batch.position)
    assert [entry.event.job_id for entry in batch.events] == [late, early]
    assert not batch.more
    assert (await store.all_events(None, batch.position)).events == []


async def test_transactions_of_other_databases_hold_nothing_up(
    store: Store, database_url: str, postgresql: str
) -> None:
    after = await store.newest_position()
    other = make_url(postgresql).set(database="postgres").render_as_string(hide_password=False)
    with psycopg.connect(other) as connection:
        connection.execute("CREATE TEMPORARY TABLE held (id integer)")
        job_id = await submitted(store)
        assert [entry.event.job_id for entry in (await store.all_events(None, after)).events] == [job_id]


async def test_read_on_from_every_position(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    start = await store.newest_position()
    for _ in range(3):
        await store.cancel(await submitted(store))
    whole = (await store.all_events(None, start)).events
    assert [entry.event.status for entry in whole] == ["queued", "cancelled"] * 3
    monkeypatch.setattr(feed, "_EVENTS", {owned: _limited(2, owned) for owned in (True, False)})
    monkeypatch.setattr(feed, "MOST_AT_ONCE", 2)
    for k, entry in enumerate(whole):
        position, rest = FeedPosition.from_text(str(entry.position)), []
        assert position == entry.position
        while True:
            batch = await store.all_events(None, position)
            rest += [entry.event for entry in batch.events]
            position = batch.position
            if not batch.more:
                break
        assert rest == [entry.event for entry in whole[k + 1 :]]


async def test_those_who_wait_share_the_reads(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], feed.read

    async def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return await read(*arguments)

    monkeypatch.setattr(feed, "read", counted)
    positions = []
    for _ in range(50):  # each from a place of its own
        await submitted(store)
        positions.append(await store.newest_position())
    assert len(set(positions)) == 50
    for _ in range(3):
        job_id = await submitted(store)
        waiting = [asyncio.create_task(store.all_events(None, after, 30)) for after in positions]
        batches = await asyncio.gather(*waiting)
        assert all(batch.events[-1].event.job_id == job_id for batch in batches)
        (position,) = {batch.position for batch in batches}
        positions = [position] * 50
    assert len(reads) < 10
    reads.clear()
    followed = [asyncio.create_task(store.events(job_id, after=1, wait_s=30)) for _ in range(50)]
    waiting = [asyncio.create_task(store.all_events(None, position, 30)) for _ in range(50)]
    while not reads:
        await asyncio.sleep(0.01)
    await store.cancel(job_id)
    assert [len(found) for found in await asyncio.gather(*followed)] == [1] * 50
    assert [len(batch.events) for batch in await asyncio.gather(*waiting)] == [1] * 50
    assert len(reads) < 10


def _limited(most: int, owned: bool) -> feed.Statement:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "MOST_AT_ONCE", most)
        return feed._events(owned)


@pytest.mark.parametrize("text", ["", "1", "1-2", "2-1-0", "1-2-3-4", "a-b-c", "1-2--3", "٣-٣-٣", f"1-2-{10**18}"])
def test_no_position(text: str) -> None:
    assert FeedPosition.from_text(text) is None
