"""Backup and restore of a database, also into a PostgreSQL of another major version.

PostgreSQL's own `pg_dump` and `pg_restore` do the work: those of the embedded PostgreSQL, or else those on PATH. A
backup is consistent while the service runs. Passwords go to them through the environment, which no other user can read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from time import monotonic, sleep

import psycopg

from api.errors import DatabaseGoneError
from api.jobs.database import CONNECT_S, sqlalchemy_url
from api.jobs.embedded import earlier_postgresql, embedded_postgresql, postgresql_program, version_of_files
from api.jobs.migrate import check_revision, migrate
from optpipe.errors import InputError, Issue


def backup(url: str, file: Path) -> int:
    """Write all that a database holds to a file that only its owner may read; its size in bytes.

    A file of that name is replaced once the new one is whole. Raises InputError where the database is none of ours, or
    the file cannot be written; DatabaseGoneError.
    """
    _refuse_folder(file)
    check_revision(url)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.touch(mode=0o600)
        _run("pg_dump", url, "--format=custom", "--no-owner", "--no-privileges", f"--file={partial}")
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(file)
    except OSError as error:
        detail = f"is {file}, which cannot be written: {error.strerror}"
        raise InputError([Issue("file", "unwritable", f"{detail}. Maybe choose another folder.")]) from None
    finally:
        partial.unlink(missing_ok=True)
    return file.stat().st_size


def restore(url: str, file: Path, replace: bool = False) -> None:
    """Fill a database from a backup, and bring its tables to this program's revision.

    It is all restored or nothing. Raises InputError where the database is not empty, unless `replace`; where a service
    or a worker uses it; and where the file is no backup.
    """
    _refuse_folder(file)
    if not file.is_file():
        raise InputError([Issue("file", "not_found", f"is {file}, which is not there. Maybe the path is misspelt.")])
    listed = subprocess.run(
        [postgresql_program("pg_restore"), "--list", file], capture_output=True, text=True, check=False
    )
    if listed.returncode or "alembic_version" not in listed.stdout:
        detail = f"is {file}, which is no backup of 'optpipe database backup'. Maybe it is another file."
        raise InputError([Issue("file", "no_backup", detail)])
    with _connected(url) as connection:
        _check_unused(connection)
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
        if tables != (0,) and not replace:
            detail = "names a database that is not empty. Maybe take an empty one, or --replace what it holds."
            raise InputError([Issue("database_url", "not_empty", detail)])
    # All in one transaction, which is committed once the whole file was read: one that fails leaves what was there.
    psql = [postgresql_program("psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1"]
    address, environment = _address(url)
    with (
        subprocess.Popen(
            [postgresql_program("pg_restore"), "--no-owner", "--no-privileges", "--file=-", file], stdout=PIPE
        ) as reading,
        subprocess.Popen(
            [*psql, f"--dbname={address}"], stdin=PIPE, stdout=DEVNULL, stderr=PIPE, env=environment
        ) as writing,
    ):
        assert reading.stdout is not None
        assert writing.stdin is not None
        with suppress(BrokenPipeError), writing.stdin:
            writing.stdin.write(b"BEGIN;\n" + (EMPTIED if replace else b""))
            shutil.copyfileobj(reading.stdout, writing.stdin)
            if reading.wait() == 0:
                writing.stdin.write(b"COMMIT;\n")
        reading.stdout.close()
        assert writing.stderr is not None
        said = writing.stderr.read()
    if reading.returncode or writing.returncode:
        raise DatabaseGoneError(_failure("psql", said.decode(errors="replace")))
    migrate(url)


def _refuse_folder(file: Path) -> None:
    if file.is_dir():
        raise InputError([Issue("file", "folder", f"is {file}, which is a folder. Maybe name a file in it.")])


def upgrade(data_folder: Path) -> tuple[int, int]:
    """Bring an embedded PostgreSQL to the installed major version by a backup; the version before, and now.

    The old files stay next to the new ones, as ``postgresql.old``; where anything fails they are put back. Raises
    InputError where a service uses the folder, or the old version is not installed too; DatabaseGoneError.
    """
    before, now = version_of_files(data_folder)
    if before == now:
        return before, now
    files = data_folder.expanduser().absolute() / "postgresql"
    old, file = files.with_name("postgresql.old"), files.with_name("upgrade.backup")
    if old.exists():
        detail = f"is {data_folder}, where {old.name} is left of another upgrade. Maybe move it elsewhere."
        raise InputError([Issue("data_folder", "in_the_way", detail)])
    with earlier_postgresql(data_folder) as url:
        migrate(url)
        backup(url, file)
    files.rename(old)
    try:
        with embedded_postgresql(data_folder) as url:
            restore(url, file)
    except BaseException:
        shutil.rmtree(files, ignore_errors=True)
        old.rename(files)
        raise
    finally:
        file.unlink(missing_ok=True)
    return before, now


EMPTIED = b"DROP SCHEMA IF EXISTS public CASCADE; CREATE SCHEMA public;\n"


ENDING_S = 1.0
"""Time in which PostgreSQL forgets a connection that has been closed."""


def _check_unused(connection: psycopg.Connection) -> None:
    """Raise InputError where a service or a worker has connections to the database."""
    used = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name ^@ 'optpipe'"
    until = monotonic() + ENDING_S
    while (in_use := connection.execute(used).fetchone() != (0,)) and monotonic() < until:
        sleep(ENDING_S / 20)
    if in_use:
        detail = "names a database that a service or a worker uses. Maybe stop them first."
        raise InputError([Issue("database_url", "in_use", detail)])


def _connected(url: str) -> psycopg.Connection:
    address, _ = _address(url, with_password=True)
    try:
        return psycopg.connect(address, connect_timeout=CONNECT_S, autocommit=True)
    except psycopg.OperationalError as error:
        raise DatabaseGoneError.unreachable(error) from None


def _address(url: str, with_password: bool = False) -> tuple[str, dict[str, str]]:
    """Address for PostgreSQL's programs, and the environment with the password that it lacks."""
    parsed = sqlalchemy_url(url).set(drivername="postgresql")
    environment = dict(os.environ)
    if parsed.password is not None and not with_password:
        environment["PGPASSWORD"] = str(parsed.password)
        parsed = parsed._replace(password=None)
    return parsed.render_as_string(hide_password=False), environment


def _run(program: str, url: str, *options: str) -> None:
    """Run one of PostgreSQL's programs on a database. Raises DatabaseGoneError with what it said."""
    address, environment = _address(url)
    command = [postgresql_program(program), *options, f"--dbname={address}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise DatabaseGoneError(_failure(program, done.stderr))


def _failure(program: str, said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()] or ["no reason given"]
    return f"{program} failed: {lines[0].strip().rstrip('.')}. Maybe it is older than the server, or the disk is full."
