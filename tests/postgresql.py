"""One PostgreSQL for all tests of a process (`postgresql` in conftest.py), and fixtures on it.

database_url   the address of a fresh migrated database for each test
settings       settings of a service on it
store          what such a service keeps there
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import psutil
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
PREFIX = "optpipe-tests-"
OWNER = "owner"
"""The file that the process which uses a folder holds locked."""
LONG_AGO_S = 3600.0
END_S = 10.0
_numbers = count()


@contextmanager
def server_folder() -> Iterator[Path]:
    """A folder for a PostgreSQL: in memory where there is room, because writing through to a disk takes seconds."""
    # Not in pytest's own folder: for root PostgreSQL runs as another user, who may not enter there.
    roomy = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > ROOM_BYTES
    parent = IN_MEMORY if roomy else Path(tempfile.gettempdir())
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    os.chmod(folder, 0o755)
    with (folder / OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)  # the kernel lets go of it however this process ends
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of tests that were killed, and end the servers that they left running."""
    for folder in parent.glob(f"{PREFIX}*"):
        if _is_abandoned(folder):
            _end_server(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / OWNER).open("r+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:  # its owner has no lock yet, or ended before it had one
        with suppress(FileNotFoundError):
            return time.time() - folder.stat().st_mtime > LONG_AGO_S
        return False
    except OSError:
        return False


def _end_server(folder: Path) -> None:
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        pid = int((folder / "postgresql" / "postmaster.pid").read_text().split()[0])
        server = psutil.Process(pid)
        if str(folder / "postgresql") in server.cmdline():
            server.send_signal(signal.SIGQUIT)  # at once: nobody needs its data
            server.wait(END_S)


@contextmanager
def migrated_postgresql() -> Iterator[str]:
    """The address of a PostgreSQL with an empty, migrated database to copy."""
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


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    """An open store of that database, in the event loop of the test."""
    async with Store(settings) as store:
        yield store


def _run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def _named(url: str, database: str) -> str:
    return make_url(url).set(database=database).render_as_string(hide_password=False)
