"""The connection to PostgreSQL: addresses, transactions with an end in time, and what a lost connection looks like."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import sqlalchemy.exc
from psycopg.pq import ConnStatus
from sqlalchemy import URL, event, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from api.jobs.errors import DatabaseGoneError
from optpipe.errors import InputError, Issue

ANSWER_S = 10.0
"""A transaction that takes longer counts as lost."""

WAIT_S = 30.0
"""How long to wait for a connection while others use all of them: that is load, not a database that is away."""

CONNECT_S = 3
POOLED = 10
"""Connections that a process keeps, and"""
EXTRA = 10
"""that it may open beyond these while many wait."""

_KEEP_ALIVE: dict[str, Any] = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""Notice a host that has gone within about ten seconds, not within hours."""


def sqlalchemy_url(url: str) -> URL:
    """The address of a PostgreSQL as SQLAlchemy with psycopg wants it. Raises InputError (without the address)."""
    try:
        parsed = make_url(url)
    except sqlalchemy.exc.ArgumentError:
        detail = "is not an address such as postgresql://user:password@host/database."
        raise InputError([Issue("database_url", "bad_url", detail)]) from None
    if parsed.drivername.partition("+")[0] not in ("postgresql", "postgres"):
        detail = f"names {parsed.drivername}, but only PostgreSQL will do: postgresql://user:password@host/database."
        raise InputError([Issue("database_url", "not_postgresql", detail)])
    return parsed.set(drivername="postgresql+psycopg")


def psycopg_url(url: str) -> str:
    """The same address as psycopg alone wants it."""
    return sqlalchemy_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def make_engine(url: str) -> AsyncEngine:
    """A pool of connections that are looked at before use; it connects when it is first used."""
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
    """The same pool, of which each statement is a transaction of its own: one way to the server and back."""
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def _use_utc(connection: Any, _record: object) -> None:
    """Have times come back as UTC, wherever the server believes it is."""
    cursor = connection.cursor()
    cursor.execute("SET TIME ZONE 'UTC'")
    cursor.close()
    connection.commit()


def _replace_if_closed(connection: Any, _record: object, _proxy: object) -> None:
    """Have the pool connect anew where the server has hung up: then there is something to read, unasked.

    SQLAlchemy's own check asks the server, which costs as much as most of our statements.
    """
    server: psycopg.AsyncConnection = connection.driver_connection
    if server.pgconn.status != ConnStatus.OK or _readable(server.pgconn.socket):
        raise sqlalchemy.exc.DisconnectionError


def _readable(socket: int) -> bool:
    look = select.poll()
    look.register(socket, select.POLLIN)
    return bool(look.poll(0))


async def listening_connection(url: str) -> psycopg.AsyncConnection:
    """A connection of its own for LISTEN. Raises psycopg.OperationalError."""
    return await psycopg.AsyncConnection.connect(
        psycopg_url(url),
        autocommit=True,
        connect_timeout=CONNECT_S,
        application_name="optpipe listener",
        **_KEEP_ALIVE,
    )


@asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """One transaction: committed at the end, undone by an error. Raises DatabaseGoneError where no answer comes.

    What was done when that is raised is unknown: it may have been committed just before.
    """
    try:
        async with engine.connect() as connection, asyncio.timeout(ANSWER_S), connection.begin():
            yield connection
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
        raise DatabaseGoneError(
            f"the database did not answer ({type(error).__name__}). Maybe it is being restarted; try again."
        ) from error
