"""The embedded PostgreSQL: one owner a folder, data that stay, and folders that cannot do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from api.jobs.embedded import embedded_postgresql, shared_postgresql
from optpipe.errors import InputError
from tests.postgresql import server_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with server_folder() as folder:
        yield folder


def test_one_owner_and_data_that_stay(folder: Path) -> None:
    with embedded_postgresql(folder) as url:
        _run(url, "CREATE TABLE kept (n integer)")
        _check_only_its_user_may_enter(folder, url)
        with pytest.raises(InputError, match=f"process {os.getpid()} uses"), embedded_postgresql(folder):
            pass
        with shared_postgresql(folder) as same:
            assert same == url
        _run(url, "INSERT INTO kept VALUES (1)")  # the one that shared it did not stop it
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    with shared_postgresql(folder) as url, psycopg.connect(url) as connection:
        assert connection.execute("SELECT n FROM kept").fetchall() == [(1,)]


def _check_only_its_user_may_enter(folder: Path, url: str) -> None:
    assert (folder / "postgresql").stat().st_mode & 0o077 == 0
    with psycopg.connect(url) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)


def test_it_is_started_again_where_it_dies(folder: Path) -> None:
    with embedded_postgresql(folder) as url:
        os.kill(int((folder / "postgresql" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        patience_s = time.monotonic() + 120
        while True:
            try:
                _run(url, "SELECT 1")
                break
            except psycopg.OperationalError:
                assert time.monotonic() < patience_s
                time.sleep(0.1)


def _run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def test_folders_that_cannot_do(folder: Path) -> None:
    with pytest.raises(InputError, match="socket path of"), embedded_postgresql(folder / ("x" * 100)):
        pass
    (folder / "file").touch()
    with pytest.raises(InputError, match="cannot be made"), embedded_postgresql(folder / "file" / "below"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="PostgreSQL runs as another user for root alone")
def test_root_opens_no_private_folder(folder: Path) -> None:
    os.chmod(folder, 0o700)
    with pytest.raises(InputError, match="who may not enter"), embedded_postgresql(folder / "data"):
        pass
    assert folder.stat().st_mode & 0o777 == 0o700
