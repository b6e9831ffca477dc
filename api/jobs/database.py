"""PostgreSQL connections: addresses, transactions with a deadline, prepared statements, LISTEN.

Frequent statements are built once with SQLAlchemy and sent by its driver, psycopg, itself: to have SQLAlchemy
execute one costs this process seven times as much, and as long as everything else about a request together.
"""

from __future__ import annotations

import asyncio
import select
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

import psycopg
import sqlalchemy.exc
import structlog
from psycopg import sql
from psycopg.pq import ConnStatus
from psycopg.rows import namedtuple_row
from sqlalchemy import URL, Select, event, make_url
from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from api.errors import DatabaseFullError, DatabaseGoneError
from optpipe.errors import InputError, Issue

_log = structlog.get_logger("optpipe.database")

ANSWER_S = 10.0
"""A transaction that takes longer counts as lost."""

WAIT_S = 30.0
"""Longest wait for a connection while others use all of them: that is load, not a database that is down."""

CONNECT_S = 3
POOLED = 10
"""Connections that a process keeps open."""
EXTRA = 10
"""Connections that it may open beyond `POOLED` while many requests wait."""

_KEEP_ALIVE: dict[str, Any] = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""Notice a host that has gone within about ten seconds, not within hours."""


def sqlalchemy_url(url: str) -> URL:
    """Database URL for SQLAlchemy with psycopg. Raises InputError (without the address)."""
    try:
        parsed = make_url(url)
    except sqlalchemy.exc.ArgumentError:
        detail = "is not an address such as postgresql://user:password@host/database."
        raise InputError([Issue("database_url", "bad_url", detail)]) from None
    if parsed.drivername.partition("+")[0] not in ("postgresql", "postgres"):
        detail = f"names {parsed.drivername}, but only PostgreSQL will do: postgresql://user:password@host/database."
        raise InputError([Issue("database_url", "not_postgresql", detail)])
    return parsed.set(drivername="postgresql+psycopg")


def make_engine(url: str) -> AsyncEngine:
    """Connection pool that checks connections before use and connects lazily."""
    engine = create_async_engine(
        sqlalchemy_url(url),
        pool_size=POOLED,
        max_overflow=EXTRA,
        pool_timeout=WAIT_S,
        pool_use_lifo=True,  # few servers that have planned our statements, rather than many that each plan them anew
        connect_args={"connect_timeout": CONNECT_S, "application_name": "optpipe", **_KEEP_ALIVE},
    )
    event.listen(engine.sync_engine, "connect", _use_utc)
    event.listen(engine.sync_engine, "checkout", _replace_if_closed)
    return engine


def for_reading(engine: AsyncEngine) -> AsyncEngine:
    """Use the pool in autocommit mode: one round trip for each statement."""
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def _use_utc(connection: Any, _record: object) -> None:
    """Set the time zone of a new connection to UTC, whatever the server's default."""
    cursor = connection.cursor()
    cursor.execute("SET TIME ZONE 'UTC'")
    cursor.close()
    connection.commit()


def _replace_if_closed(connection: Any, _record: object, _proxy: object) -> None:
    """Reconnect where the server has hung up: then the idle socket is readable.

    SQLAlchemy's own check asks the server, which costs as much as most of our statements.
    """
    server: psycopg.AsyncConnection = connection.driver_connection
    if server.pgconn.status == ConnStatus.OK:
        poll = select.poll()
        poll.register(server.pgconn.socket, select.POLLIN)
        if not poll.poll(0):
            return
    raise sqlalchemy.exc.DisconnectionError


async def listening_connection(url: str) -> psycopg.AsyncConnection:
    """Open a connection for LISTEN, outside the pool. Raises psycopg.OperationalError."""
    return await psycopg.AsyncConnection.connect(
        sqlalchemy_url(url).set(drivername="postgresql").render_as_string(hide_password=False),
        autocommit=True,
        connect_timeout=CONNECT_S,
        application_name="optpipe listener",
        **_KEEP_ALIVE,
    )


class Outage:
    """Outage of the database as this process sees it: logged when it begins and when it ends."""

    def __init__(self) -> None:
        self.error: DatabaseGoneError | None = None
        self.faults: Counter[str] = Counter()
        """Failed transactions so far: `gone` or `full`."""

    def begin(self, error: DatabaseGoneError) -> None:
        """Note a failed transaction."""
        self.faults["full" if isinstance(error, DatabaseFullError) else "gone"] += 1
        if type(error) is not type(self.error):
            _log.error("database fails", error=str(error))
        self.error = error

    def end(self, written: bool) -> None:
        """Note a transaction that succeeded; one that only read says nothing about a full disk."""
        if self.error is not None and (written or not isinstance(self.error, DatabaseFullError)):
            _log.warning("database works again")
            self.error = None


OUTAGE = Outage()
"""State of this process, shared by its pools."""


@asynccontextmanager
async def _checked_out(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection of the pool, which comes back to it whenever this is cancelled, and however often.

    SQLAlchemy loses one to the garbage collector where it is cancelled while it opens the connection or sets its
    isolation level, or where the event loop ends while it gives one back. So both happen in tasks of their own, which
    are waited for.
    """
    checking_out = asyncio.ensure_future(engine.connect().start())
    try:
        await _until_done(checking_out)
    except asyncio.CancelledError:
        if not checking_out.done():  # it waits for others to give theirs back, which may take up to `WAIT_S`
            checking_out.add_done_callback(_give_back)
        elif not checking_out.cancelled() and checking_out.exception() is None:
            await _until_done(asyncio.ensure_future(checking_out.result().close()))
        raise
    connection = checking_out.result()
    try:
        yield connection
    finally:
        closing = asyncio.ensure_future(connection.close())
        await _until_done(closing)
        closing.result()


_GIVEN_BACK: set[asyncio.Future[None]] = set()
"""Connections that return to the pool: the event loop holds its tasks by weak references alone."""


def _give_back(checking_out: asyncio.Future[AsyncConnection]) -> None:
    """Give a connection back that came after it was no longer waited for."""
    if not checking_out.cancelled() and checking_out.exception() is None:
        closing = asyncio.ensure_future(checking_out.result().close())
        _GIVEN_BACK.add(closing)
        closing.add_done_callback(_GIVEN_BACK.discard)


async def _until_done(task: asyncio.Future[Any]) -> None:
    """Wait for a task, after a cancel for at most `ANSWER_S` more; then the cancel is passed on."""
    loop = asyncio.get_running_loop()
    until_s: float | None = None
    while not task.done():
        left_s = None if until_s is None else until_s - loop.time()
        if left_s is not None and left_s <= 0:
            break
        try:
            await asyncio.wait({task}, timeout=left_s)
        except asyncio.CancelledError:
            until_s = until_s or loop.time() + ANSWER_S
    if until_s is not None:
        raise asyncio.CancelledError


@asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """One transaction: committed at the end, undone by an error. Raises DatabaseGoneError where no answer comes.

    What was done when that is raised is unknown: it may have been committed just before.
    """
    try:
        async with _checked_out(engine) as connection, asyncio.timeout(ANSWER_S), connection.begin():
            yield connection
        OUTAGE.end(written=engine.get_execution_options().get("isolation_level") != "AUTOCOMMIT")
    except (
        sqlalchemy.exc.OperationalError,
        sqlalchemy.exc.InterfaceError,
        sqlalchemy.exc.InternalError,  # such as a write to a server that is only a replica until a failover is done
        sqlalchemy.exc.TimeoutError,
        psycopg.OperationalError,
        psycopg.InterfaceError,
        psycopg.InternalError,
        TimeoutError,
        OSError,
    ) as error:
        gone: DatabaseGoneError
        if isinstance(getattr(error, "orig", error), psycopg.errors.DiskFull):
            gone = DatabaseFullError("the disk of the database is full. Maybe lower keep_jobs, or give it more room.")
        else:
            detail = f"the database did not answer ({type(error).__name__})"
            gone = DatabaseGoneError(f"{detail}. Maybe it is being restarted; try again.")
        OUTAGE.begin(gone)
        raise gone from error


class Statement:
    """A statement with its parameters by name."""

    def __init__(self, statement: Select[Any]) -> None:
        compiled = statement.compile(dialect=PGDialectAsync_psycopg())  # type: ignore[no-untyped-call]
        self._text = compiled.string.encode()
        self._own = compiled.params
        """Constants of the statement; the other parameters are given with each execution."""

    async def all(self, connection: AsyncConnection, **values: Any) -> Sequence[Any]:
        """Its rows."""
        return await (await self._executed(connection, values)).fetchall()

    async def one_or_none(self, connection: AsyncConnection, **values: Any) -> Any:
        """Its row; None where there is none."""
        return await (await self._executed(connection, values)).fetchone()

    async def _executed(self, connection: AsyncConnection, values: Mapping[str, Any]) -> psycopg.AsyncCursor[Any]:
        cursor = (await driver_connection(connection)).cursor(row_factory=namedtuple_row)
        return await cursor.execute(self._text, {**self._own, **values}, prepare=True)


async def driver_connection(connection: AsyncConnection) -> psycopg.AsyncConnection:
    """psycopg connection beneath `connection`, in the same transaction."""
    driver = (await connection.get_raw_connection()).driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)
    return driver


PAUSE_S = 0.5
"""Between two tries to connect."""


class Listener:
    """Async context in which each notification on a channel calls its function with the payload.

    `missed` is called after every reconnection, because notifications sent in between are lost.
    """

    def __init__(self, url: str, channels: Mapping[str, Callable[[str], None]], missed: Callable[[], None]) -> None:
        self._url = url
        self._channels = channels
        self._missed = missed
        self._task: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[psycopg.AsyncConnection] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen(), name="listener")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        if self._connecting is not None:
            # A connection whose opening is cancelled stays in PostgreSQL's list until Python collects its garbage.
            await asyncio.wait({self._connecting}, timeout=CONNECT_S)
        await end_tasks(self._task)

    async def _listen(self) -> None:
        while True:
            with suppress(psycopg.Error, OSError):
                self._connecting = asyncio.create_task(listening_connection(self._url))
                async with await self._connecting as connection:
                    for channel in self._channels:
                        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                    self._missed()
                    async for note in connection.notifies():
                        self._channels[note.channel](note.payload)
            await asyncio.sleep(PAUSE_S)


AGAIN_S = 0.2


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end; their results and errors are ignored.

    Once is not enough before Python 3.12: `asyncio.wait_for`, on which psycopg waits, loses a cancel that comes just as
    what it waits for is there.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
