"""Connections to the database: tasks that end, outages that are named."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import event

from api.app import create_app
from api.jobs import database
from api.jobs.database import Listener, end_tasks, for_reading, make_engine, transaction
from api.settings import Settings
from tests.api.harness import body, listening

FULL = """
CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON jobs EXECUTE FUNCTION full_disk();
CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON totals EXECUTE FUNCTION full_disk();
"""
"""Every write fails with the error that PostgreSQL raises on a full disk."""


@contextmanager
def full_disk(database_url: str) -> Iterator[None]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(FULL)
        yield
        connection.execute("DROP FUNCTION full_disk CASCADE")


def test_a_full_disk_is_named(settings: Settings, database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening(create_app(settings)) as url, httpx.Client(base_url=url, timeout=90) as client:
        with full_disk(database_url):
            refused = client.post("/v1/schedules", json=body())
            assert (refused.status_code, refused.json()["errors"][0]["code"]) == (503, "database_full")
            assert "disk of the database is full" in refused.json()["detail"]
            assert int(refused.headers["retry-after"]) >= 10
            assert client.get("/v1/schedules").status_code == 200  # what only reads goes on
            unready = client.get("/readyz")
            assert (unready.status_code, unready.json()["errors"][0]["code"]) == (503, "database_full")
        assert client.get("/readyz").status_code == 200
        assert client.post("/v1/schedules", json=body()).status_code == 202
    logged = [record.message for record in caplog.records if record.name == "optpipe.database"]
    assert len(logged) == 2
    assert "database fails" in logged[0]
    assert "database works again" in logged[1]


async def test_a_listener_that_ends_while_it_connects_leaves_no_connection(database_url: str) -> None:
    """Also where the garbage of Python, in which an opening that is cancelled stays, is not collected."""
    used = (
        "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    gc.disable()
    try:
        with psycopg.connect(database_url, autocommit=True) as connection:
            for k in range(40):
                async with Listener(database_url, {}, missed=lambda: None):
                    await asyncio.sleep(k * 0.0005)
                until = monotonic() + 60
                while left := connection.execute(used).fetchall():
                    assert monotonic() < until, left
                    sleep(0.01)  # the loop stands still: what is left is left
    finally:
        gc.enable()


async def test_a_lost_cancel_is_not_the_last() -> None:
    async def loses_one() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    tasks = [asyncio.create_task(loses_one()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    await end_tasks(*tasks)
    assert all(task.cancelled() for task in tasks)
    await end_tasks(*tasks)


@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("reading", [True, False], ids=["reading", "writing"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "new"])
async def test_a_cancel_loses_no_connection(
    database_url: str, monkeypatch: pytest.MonkeyPatch, *, reading: bool, pooled: bool, cancels: int
) -> None:
    """Also where it comes while the connection is opened, or its isolation level set, and again and again."""
    gc.freeze()  # or the collection at the end looks at all that other tests have loaded, for a second
    engine = make_engine(database_url)
    if pooled:
        async with transaction(engine):
            pass
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def use() -> None:
        async with transaction(for_reading(engine) if reading else engine):
            reached.set()
            await asyncio.sleep(60)

    def slowly(name: str) -> None:
        real = getattr(psycopg.AsyncConnection, name)

        async def slow(*arguments: Any, **keywords: Any) -> Any:
            result = await real(*arguments, **keywords)
            reached.set()
            await go_on.wait()
            return result

        monkeypatch.setattr(psycopg.AsyncConnection, name, slow)

    slowly("set_autocommit")
    slowly("commit")
    task = asyncio.create_task(use())
    await asyncio.wait_for(reached.wait(), 60)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    await engine.dispose()
    del task
    gc.collect()  # a connection that is lost is a warning, and warnings are errors


async def test_a_cancel_loses_no_connection_that_comes_late(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all were in use for longer than a cancelled one waits."""
    for name, value in {"POOLED": 1, "EXTRA": 0, "ANSWER_S": 0.05}.items():
        monkeypatch.setattr(database, name, value)
    engine = make_engine(database_url)
    pool: Any = engine.pool
    checkouts: list[object] = []
    event.listen(engine.sync_engine, "checkout", lambda _, record, __: checkouts.append(record))
    connection = await engine.connect()

    async def use() -> None:
        async with transaction(engine):
            raise AssertionError("there is none")

    task = asyncio.create_task(use())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    gc.disable()
    try:
        await connection.close()
        until = monotonic() + 60
        while len(checkouts) < 2 or pool.checkedout():
            assert monotonic() < until, "it is lost"
            await asyncio.sleep(0.01)
    finally:
        gc.enable()
    await engine.dispose()
