"""Events of all jobs of one owner as one sequence that can be resumed at any place.

Revisions order the events of one job. Across jobs there is no such number: one that is drawn when an event is written
is seen late where its transaction commits late, after a reader has passed it. So a reader takes events in batches of
whole transactions: those below a horizon, under which no transaction of this database is still running. Within a batch
the running number orders them, and with it the revisions of each job, which are written under the lock of its row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from uuid import UUID

from sqlalchemy import ColumnElement, bindparam, exists, false, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from api.errors import NotFoundError
from api.jobs.database import Statement
from api.jobs.queries import NOT_ENDED, of_owner
from api.jobs.records import Event
from api.jobs.tables import events, jobs

MOST_AT_ONCE = 500
"""Events of one read; the rest follows with the next."""


@dataclass(frozen=True)
class FeedPosition:
    """Place in the sequence of an owner's events.

    All events of transactions below `low` have been read, and those from `low` to below `high` up to `number`.
    """

    low: int
    high: int
    number: int

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """Parse what `str` wrote; None for anything else."""
        match = _POSITION.fullmatch(text)
        if match is None:
            return None
        position = cls(*map(int, match.groups()))
        return position if position.low <= position.high else None

    def __str__(self) -> str:
        return f"{self.low}-{self.high}-{self.number}"


_POSITION = re.compile(r"([0-9]{1,18})-([0-9]{1,18})-([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True)
class FeedEvent:
    """An event with the position that follows it."""

    position: FeedPosition
    event: Event


@dataclass(frozen=True)
class FeedBatch:
    """Some events in order, and the position after them.

    `more`: others are written already, and can be read at once or as soon as a running transaction ends.
    """

    events: Sequence[FeedEvent]
    position: FeedPosition
    more: bool


_HORIZON = text(
    """
    WITH snapshot AS (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next),
    running AS (
        SELECT next - ((next - transactionid::text::bigint) & 4294967295) AS id, next FROM pg_locks AS its, snapshot
        WHERE locktype = 'transactionid' AND granted AND mode = 'ExclusiveLock' AND EXISTS (
            SELECT FROM pg_locks AS other
            WHERE other.pid = its.pid AND other.locktype = 'relation'
            AND other.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        )
    )
    SELECT coalesce((SELECT min(id) FROM running WHERE id > next - 2147483648), (SELECT next FROM snapshot))
    """
)
"""The first transaction of this database that is still running, or else the next one.

Not `pg_snapshot_xmin`, which a long transaction in another database of the same server holds back. A lock on one's own
transaction is held from its first write to its end; its number has 32 bits, of which `next` supplies the others. One
that began after the snapshot has a number above `next`, and comes out of the subtraction far below.
"""


def _events(owned: bool) -> Statement:
    mine = jobs.c.owner == bindparam("owner") if owned else of_owner(None)
    return Statement(
        select(*(events.c[name] for name in Event.__dataclass_fields__), events.c.number)
        .join(jobs, jobs.c.id == events.c.job_id)
        .where(
            mine,
            events.c.transaction >= bindparam("low"),
            events.c.transaction < bindparam("high"),
            events.c.number > bindparam("number"),
        )
        .order_by(events.c.number, events.c.revision)
        .limit(MOST_AT_ONCE)
    )


def _pending(owned: bool) -> Statement:
    mine = jobs.c.owner == bindparam("owner") if owned else of_owner(None)
    later = select(events.c.number).join(jobs, jobs.c.id == events.c.job_id)
    pending = exists(later.where(mine, events.c.transaction >= bindparam("high"))).label("pending")
    ended = ~NOT_ENDED if owned else false()
    flags: list[ColumnElement[Any]] = [pending, ended.label("ended")]
    return Statement(select(*flags))


_EVENTS = {owned: _events(owned) for owned in (True, False)}
_PENDING = {owned: _pending(owned) for owned in (True, False)}


async def newest(connection: AsyncConnection) -> FeedPosition:
    """The position after everything that has happened so far."""
    horizon = int((await connection.execute(_HORIZON)).scalar_one())
    return FeedPosition(horizon, horizon, 0)


async def read(
    connection: AsyncConnection, owner: UUID | None, key: UUID | None, positions: Collection[FeedPosition]
) -> dict[FeedPosition, FeedBatch]:
    """The next events of an owner after each position. `connection` is in autocommit mode: each statement sees what is
    committed by then.

    A position beyond the newest one, which another database gave out, is read as the newest. Raises NotFoundError where
    `key`, with which they are read, is revoked or expired.
    """
    horizon = int((await connection.execute(_HORIZON)).scalar_one())
    mine = {"owner": owner} if owner is not None else {}
    found = {after: await _read_below(connection, mine, after, horizon) for after in positions}
    reader = {"key": key} if owner is not None else {}
    (row,) = await _PENDING[owner is not None].all(connection, **mine, **reader, high=horizon)
    if row.ended:
        raise NotFoundError("this key is revoked or has expired.")
    return {after: replace(batch, more=batch.more or row.pending) for after, batch in found.items()}


async def _read_below(
    connection: AsyncConnection, mine: dict[str, UUID], after: FeedPosition, horizon: int
) -> FeedBatch:
    """The next events after a position and below the horizon; `more`: there are others below it."""
    if after.high > horizon:
        after = FeedPosition(horizon, horizon, 0)
    found: list[FeedEvent] = []
    for batch in (after, FeedPosition(after.high, horizon, 0)):
        if batch.low < batch.high:
            rows = await _EVENTS[bool(mine)].all(
                connection, **mine, low=batch.low, high=batch.high, number=batch.number
            )
            for row in rows:
                *fields, number = row
                found.append(FeedEvent(replace(batch, number=number), Event(*fields)))
            if len(rows) == MOST_AT_ONCE:
                return FeedBatch(found, found[-1].position, more=True)
    return FeedBatch(found, FeedPosition(horizon, horizon, 0), more=False)
