"""Fixtures: one PostgreSQL for all tests of a process, a fresh migrated database for each test.

database_url   its address
settings       settings of a service on it
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from api.jobs.embedded import embedded_postgresql
from api.jobs.migrate import migrate
from api.jobs.store import Store
from api.settings import Settings

TEMPLATE = "migrated"
IN_MEMORY = Path("/dev/shm")
ROOM_BYTES = 2**30
_numbers = count()


@contextmanager
def server_folder() -> Iterator[Path]:
    """A folder for a PostgreSQL: in memory where there is room, because writing through to a disk takes seconds."""
    # Not in pytest's own folder: for root PostgreSQL runs as another user, who may not enter there.
    roomy = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > ROOM_BYTES
    folder = Path(tempfile.mkdtemp(prefix="optpipe-tests-", dir=IN_MEMORY if roomy else None))
    os.chmod(folder, 0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """A PostgreSQL with an empty, migrated database to copy."""
    with server_folder() as folder, embedded_postgresql(folder) as url:
        _run(url, "ALTER SYSTEM SET synchronous_commit = off")
        _run(url, "SELECT pg_reload_conf()")
        _run(url, f"CREATE DATABASE {TEMPLATE}")
        migrate(_named(url, TEMPLATE))
        yield url


@pytest.fixture
def database_url(postgresql: str) -> Iterator[str]:
    """The address of a database of this test alone."""
    name = f"test_{next(_numbers)}"
    _run(postgresql, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    yield _named(postgresql, name)
    _run(postgresql, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def settings(database_url: str) -> Settings:
    """Settings of a service on that database."""
    return Settings.load(database_url=database_url, heartbeat_s=1.0)


def with_store(settings: Settings, scenario: Callable[[Store], Awaitable[None]]) -> None:
    """Run a scenario on an open store."""

    async def run() -> None:
        async with Store(settings) as store:
            await scenario(store)

    asyncio.run(run())


def _run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def _named(url: str, database: str) -> str:
    return make_url(url).set(database=database).render_as_string(hide_password=False)
