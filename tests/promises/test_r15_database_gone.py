"""R15: the database is down for a time: callers get 503 with Retry-After, workers resume, and no job is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI

from api.app import create_app
from api.jobs.embedded import embedded_postgresql
from api.jobs.migrate import migrate
from api.jobs.store import Store
from api.settings import Settings
from tests.postgresql import server_folder
from tests.promises.harness import submitted, until, workers_on
from tests.sample import FULL

GONE_S = 10.0 if FULL else 6.0
"""Seconds for which the database is down: two heartbeats of a worker."""


class Database:
    """A PostgreSQL that can be away for a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = ExitStack()
        self.url = self.start()

    def start(self) -> str:
        """Let it come (back)."""
        return self._running.enter_context(embedded_postgresql(self._folder))

    def stop(self) -> None:
        """Let it go; all connections break."""
        self._running.close()


@pytest.fixture
def database() -> Iterator[Database]:
    with server_folder() as folder:
        database = Database(folder)
        yield database
        database.stop()


async def test_all_go_on(database: Database, tmp_path: Path) -> None:
    migrate(database.url)
    settings = Settings.load(database_url=database.url, solves=2, heartbeat_s=GONE_S / 2)
    meanwhile, afterwards = tmp_path / "meanwhile", tmp_path / "afterwards"
    with workers_on(settings) as workers:
        async with Store(settings) as store:
            for _ in range(2):
                workers.start()
            end_meanwhile = [await submitted(store, "meanwhile", 600, file=meanwhile) for _ in range(2)]
            end_afterwards = [await submitted(store, "afterwards", 600, file=afterwards) for _ in range(2)]
            for job_id in (*end_meanwhile, *end_afterwards):
                await until(store, job_id, lambda job: job.value_us is not None)
            waits = await submitted(store, "waits", seconds=0.1)
            app = create_app(settings)
            async with app.router.lifespan_context(app), _client(app) as client:
                path = f"/v1/schedules/{waits}"
                assert (await client.get(path)).json()["status"] == "queued"
                await asyncio.to_thread(database.stop)
                meanwhile.touch()
                await _told_to_come_back(client, path)
                await asyncio.to_thread(database.start)
                assert (await client.get(path)).status_code == HTTPStatus.OK
            for job_id in (*end_meanwhile, waits):
                await _succeeded_at_once(store, job_id)
            assert [(await store.get(job_id)).status for job_id in end_afterwards] == ["running"] * 2
            afterwards.touch()
            for job_id in end_afterwards:
                await _succeeded_at_once(store, job_id)


async def _succeeded_at_once(store: Store, job_id: UUID) -> None:
    """It was never begun again."""
    done = await until(store, job_id, lambda job: job.ended)
    assert (done.status, done.attempt) == ("succeeded", 1)


def _client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def _told_to_come_back(client: httpx.AsyncClient, path: str) -> None:
    """Each second that the database is away."""
    for _ in range(round(GONE_S)):
        answer = await client.get(path)
        assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) >= 1
        await asyncio.sleep(1)
