"""Statements that are asked for all the time, on the shortest way to the database.

They are put together once, in SQLAlchemy's words, and sent by its driver, psycopg, itself: SQLAlchemy's own way to have
one executed costs this process seven times as much, and as long as everything else about a request together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy import Select
from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg
from sqlalchemy.ext.asyncio import AsyncConnection


class Statement:
    """A statement with its parameters by name."""

    def __init__(self, statement: Select[Any]) -> None:
        compiled = statement.compile(dialect=PGDialectAsync_psycopg())  # type: ignore[no-untyped-call]
        self._text = compiled.string.encode()
        self._own = compiled.params
        """Those that are a part of the statement; the others are given each time."""

    async def all(self, connection: AsyncConnection, **values: Any) -> Sequence[Any]:
        """Its rows."""
        return await (await self._executed(connection, values)).fetchall()

    async def one_or_none(self, connection: AsyncConnection, **values: Any) -> Any:
        """Its row; None where there is none."""
        return await (await self._executed(connection, values)).fetchone()

    async def _executed(self, connection: AsyncConnection, values: Mapping[str, Any]) -> psycopg.AsyncCursor[Any]:
        cursor = (await driver_of(connection)).cursor(row_factory=namedtuple_row)
        return await cursor.execute(self._text, {**self._own, **values}, prepare=True)


async def driver_of(connection: AsyncConnection) -> psycopg.AsyncConnection:
    """The connection as psycopg knows it; the transaction is the same one."""
    driver = (await connection.get_raw_connection()).driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)
    return driver
