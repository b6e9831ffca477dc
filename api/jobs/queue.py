"""Job queue: pgqueuer's tables and statements, used within our own transactions.

A job waits or runs if and only if it has a row there. Order, priorities, locks and the finding of silent workers'
jobs are pgqueuer's; its loop (`QueueManager`) is not used, because its writes do not ask whose a job is now, it does
not count lost workers, and it ends where the database is down for a moment.

Each owner has an entrypoint of pgqueuer, and owners take turns: the next job is one of the owner with the fewest
running jobs, and of these of the one that was served longest ago. So a priority counts among the owner's own jobs only.
A job whose worker was lost is moved to an entrypoint of its own kind, from which only a worker without another job
takes. One that waits for the end of an equal job is moved to its owner's entrypoint of held jobs, from which nobody
takes.

A running job that asks for more threads than its worker gives has further rows, one for each share of the search that
another worker may take: for an idle slot only, which it gives back to a job that waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import psycopg
from pgqueuer.adapters.drivers.psycopg import PsycopgDriver
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.domain.models import Job as QueuedJob
from pgqueuer.domain.settings import db_settings
from pgqueuer.domain.types import JobId, QueueEntrypoint, QueueManagerId
from pgqueuer.ports.repository import EntrypointExecutionParameter
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    FromClause,
    Integer,
    LargeBinary,
    Subquery,
    Text,
    Uuid,
    case,
    cast,
    column,
    delete,
    func,
    literal_column,
    select,
    table,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.database import driver_connection
from api.jobs.tables import jobs

ALONE = QueueEntrypoint("solve alone")
"""The entrypoint of jobs that may be what killed their worker."""


HELD = "held "
"""Prefix of an entrypoint for the jobs that nobody may take at present."""


def entrypoint_of(owner: UUID | None) -> QueueEntrypoint:
    """The entrypoint of an owner's jobs."""
    return QueueEntrypoint(f"solve {owner or ''}")


def help_entrypoint(job_id: UUID) -> QueueEntrypoint:
    """The entrypoint of the rows that ask other workers to help with a job."""
    return QueueEntrypoint(f"{_HELP}{job_id}")


_HELP = "help "

NEW_WORK = str(db_settings().channel)
"""The channel on which PostgreSQL tells of new rows."""

Outcome = Literal["successful", "canceled", "exception"]

_rows = table(
    db_settings().queue_table,
    column("id", BigInteger),
    column("priority", Integer),
    column("entrypoint", Text),
    column("payload", LargeBinary),
    column("queue_manager_id", Uuid),
    column("status"),
    column("created"),
    column("updated"),
    column("heartbeat"),
)
_IS_HELD = _rows.c.entrypoint.startswith(HELD)
_IS_JOB: ColumnElement[bool] = ~_rows.c.entrypoint.startswith(_HELP)
_QUEUED: ColumnElement[str] = literal_column("'queued'")
_PICKED: ColumnElement[str] = literal_column("'picked'")
_log = table(db_settings().queue_table_log, column("created"), column("entrypoint"), column("status"))

FOREVER_S = 10.0 * 365 * 24 * 3600
"""Effectively infinite heartbeat timeout."""

KEEP_LOG = timedelta(days=1)

SERVED_WITHIN = timedelta(minutes=10)
"""Time for which it counts when an owner was last served; jobs that run always count."""


class _InTransaction(PsycopgDriver):
    """pgqueuer's driver on a connection that has a transaction open. It refuses those, for its listeners' sake: there
    are none here."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection


async def _queries(connection: AsyncConnection) -> Queries:
    return Queries(_InTransaction(await driver_connection(connection)))


async def enqueue(connection: AsyncConnection, job_id: UUID, owner: UUID | None, priority: int) -> int:
    """Append a job; its place among its owner's of its priority is kept until it ends. Returns the id of its row."""
    (queue_id,) = await (await _queries(connection)).enqueue(str(entrypoint_of(owner)), job_id.bytes, priority)
    return int(queue_id)


async def ask_for_help(connection: AsyncConnection, job_id: UUID, shares: int) -> None:
    """Append rows for the shares 1, 2, ... of a job's search, which workers with nothing else to do may take."""
    payloads: list[bytes | None] = [job_id.bytes + share.to_bytes(2) for share in range(1, shares + 1)]
    entrypoints = [str(help_entrypoint(job_id))] * shares
    await (await _queries(connection)).enqueue(entrypoints, payloads, [0] * shares)


async def end_help(connection: AsyncConnection, job_id: UUID) -> None:
    """Remove the rows of all shares. Call it before the job's own row is locked, which helpers lock after theirs."""
    rows = select(_rows.c.id).where(_rows.c.entrypoint == str(help_entrypoint(job_id))).with_for_update()
    for queue_id in (await connection.execute(rows)).scalars():
        await remove(connection, queue_id, "successful")


@dataclass(frozen=True)
class Share:
    """A share of a job's search that a worker has taken, `seconds` after the search began."""

    queue_id: int
    job_id: UUID
    number: int
    seconds: float


@dataclass(frozen=True)
class Picker:
    """A worker that takes jobs: it has at most `slots` at a time, `free` of which are free.

    Jobs of a worker without a heartbeat for `heartbeat_timeout_s` are taken like those that wait. A key has at most
    `most_of_key` jobs running, in all workers; None: all places of each worker but one, where it has several.
    `helping`: of the free ones, those in which it helps with jobs of other workers.
    """

    worker: UUID
    slots: int
    free: int
    heartbeat_timeout_s: float
    most_of_key: int | None = None
    helping: int = 0

    async def lost(self, connection: AsyncConnection) -> list[tuple[int, UUID]]:
        """Rows and jobs of other workers that are silent, locked."""
        others = _rows.c.queue_manager_id != self.worker
        silent = select(_rows.c.id, _rows.c.payload).where(_IS_JOB, _rows.c.status == _PICKED)
        silent = silent.where(self._may_be_taken(), others)
        rows = await connection.execute(silent.order_by(_rows.c.id).with_for_update(skip_locked=True))
        return [(int(row.id), UUID(bytes=bytes(row.payload))) for row in rows]

    async def pick(self, connection: AsyncConnection) -> list[tuple[int, UUID]]:
        """Take jobs: rows and jobs, in the order of turns; one that must be alone only if the worker has no other."""
        idle = self.free == self.slots
        if await self._a_suspect_waits(connection):
            # A worker that still has other jobs takes no more of them, or else it might never be idle.
            return await self._take(connection, ALONE) if idle else []
        picked: list[tuple[int, UUID]] = []
        turns = await self._turns(connection)
        while turns and len(picked) < self.free:
            turn = min(turns, key=lambda turn: (turn.running, turn.served_at, turn.first_id))
            taken = [] if self._at_limit(turn) else await self._take(connection, turn.entrypoint)
            picked += taken
            if taken:
                turn.running += 1
                turn.own += 1
                turn.served_at = datetime.now(UTC)
            else:
                turns.remove(turn)
        return picked

    async def pick_share(self, connection: AsyncConnection, busy_ids: Collection[UUID]) -> Share | None:
        """Take a share of the search that waits longest for help, but not of a job that this worker is busy with.

        One whose helper was lost is not taken again: the job may be what ended it, and what it found is kept.
        """
        own = [str(help_entrypoint(job_id)) for job_id in busy_ids]
        waiting = select(_rows.c.entrypoint).where(~_IS_JOB, _rows.c.status == _QUEUED, _rows.c.entrypoint.not_in(own))
        entrypoint = (await connection.execute(waiting.order_by(_rows.c.id).limit(1))).scalar_one_or_none()
        if entrypoint is None:
            return None
        for row in await replace(self, heartbeat_timeout_s=FOREVER_S).dequeue(connection, entrypoint):
            asked = select(func.extract("epoch", func.now() - _rows.c.created)).where(_rows.c.id == row.id)
            seconds = (await connection.execute(asked)).scalar_one()
            payload = row.payload or b""
            return Share(int(row.id), UUID(bytes=payload[:16]), int.from_bytes(payload[16:]), float(seconds))
        return None

    def _at_limit(self, turn: _Turn) -> bool:
        if turn.entrypoint == entrypoint_of(None):
            return False  # callers without a key are nobody's others
        if self.most_of_key is not None:
            return turn.running >= self.most_of_key
        return turn.own >= max(1, self.slots - 1)

    async def _take(self, connection: AsyncConnection, entrypoint: str) -> list[tuple[int, UUID]]:
        rows = await self.dequeue(connection, entrypoint)
        return [(int(row.id), UUID(bytes=row.payload)) for row in rows if row.payload]

    async def dequeue(self, connection: AsyncConnection, entrypoint: str) -> list[QueuedJob]:
        """The next row of an entrypoint, if there is one and it is not locked."""
        return await (await _queries(connection)).dequeue(
            batch_size=1,
            entrypoints={QueueEntrypoint(entrypoint): EntrypointExecutionParameter(concurrency_limit=0)},
            queue_manager_id=QueueManagerId(self.worker),
            global_concurrency_limit=self.slots + self.helping,  # a job takes the slot of a helper, which ends
            heartbeat_timeout=timedelta(seconds=self.heartbeat_timeout_s),
        )

    def _may_be_taken(self) -> ColumnElement[bool]:
        silent = _rows.c.heartbeat < func.now() - timedelta(seconds=self.heartbeat_timeout_s)
        return (_rows.c.status == _QUEUED) | (_rows.c.status == _PICKED) & silent

    async def _a_suspect_waits(self, connection: AsyncConnection) -> bool:
        suspects = select(_rows.c.id).where(_rows.c.entrypoint == str(ALONE), self._may_be_taken())
        return bool((await connection.execute(select(suspects.exists()))).scalar_one())

    async def _turns(self, connection: AsyncConnection) -> list[_Turn]:
        """Owners with a job that may be taken."""
        served = (
            select(_log.c.entrypoint, func.max(_log.c.created).label("at"))
            .where(_log.c.created > func.now() - SERVED_WITHIN, _log.c.status == _PICKED)
            .group_by(_log.c.entrypoint)
            .subquery()
        )
        runs = (_rows.c.status == _PICKED) & ~self._may_be_taken()
        rows = await connection.execute(
            select(
                _rows.c.entrypoint,
                func.count().filter(runs),
                func.count().filter(runs & (_rows.c.queue_manager_id == self.worker)),
                func.max(served.c.at),
                func.min(_rows.c.id).filter(self._may_be_taken()),
            )
            .join(served, served.c.entrypoint == _rows.c.entrypoint, isouter=True)
            .where(_IS_JOB, ~_IS_HELD, _rows.c.entrypoint != str(ALONE))
            .group_by(_rows.c.entrypoint)
        )
        return [
            _Turn(entrypoint, running, own, served_at or LONG_AGO, first_id)
            for entrypoint, running, own, served_at, first_id in rows
            if first_id is not None
        ]


LONG_AGO = datetime.fromtimestamp(0, UTC)


@dataclass
class _Turn:
    """Place of an owner: jobs that run, in all and on this worker, when one was last taken, and the first to wait."""

    entrypoint: str
    running: int
    own: int
    served_at: datetime
    first_id: int


async def set_aside(connection: AsyncConnection, queue_id: int) -> None:
    """Let only a worker without any other job take this row, from now on."""
    await connection.execute(update(_rows).where(_rows.c.id == queue_id).values(entrypoint=str(ALONE)))


async def hold(connection: AsyncConnection, queue_id: int) -> None:
    """Let nobody take this row until `release`."""
    held = update(_rows).where(_rows.c.id == queue_id).values(entrypoint=func.concat(HELD, _rows.c.entrypoint))
    await connection.execute(held)


async def release(connection: AsyncConnection, may_go_on: ColumnElement[bool]) -> None:
    """Let held rows be taken again whose job meets a condition on `jobs`."""
    waiting = select(_rows.c.id).join(jobs, jobs.c.queue_id == _rows.c.id).where(_IS_HELD, may_go_on)
    chosen = waiting.with_for_update(of=_rows, skip_locked=True)
    freely = func.substr(_rows.c.entrypoint, len(HELD) + 1)
    await connection.execute(update(_rows).where(_rows.c.id.in_(chosen)).values(entrypoint=freely))


async def lock(connection: AsyncConnection, queue_id: int) -> None:
    """Hold the row of a job until the end of the transaction.

    Lock order: this row first and the job's own row second, as `pick` does, so that two transactions cannot deadlock.
    """
    await connection.execute(select(_rows.c.id).where(_rows.c.id == queue_id).with_for_update())


async def beat(connection: AsyncConnection, queue_id: int) -> None:
    """Renew the heartbeat of this row."""
    await (await _queries(connection)).update_heartbeat([JobId(queue_id)])


async def give_back(connection: AsyncConnection, queue_id: int) -> None:
    """Let the row wait again, at its old place."""
    queries = await _queries(connection)
    await queries.driver.execute(queries.qbq.build_retry_job_query(), queue_id, timedelta(0), None)


async def remove(connection: AsyncConnection, queue_id: int, outcome: Outcome) -> None:
    """Take a row out, for good."""
    queries = await _queries(connection)
    await queries.driver.execute(queries.qbq.build_log_job_query(), [queue_id], [outcome], [None])


def place(job: FromClause = jobs) -> ColumnElement[int | None]:
    """Column for a select of one of `jobs`: its place in the queue from 1; NULL for one that does not wait."""
    every = places()
    own = select(every.c.place).where(every.c.id == job.c.queue_id).correlate(job).scalar_subquery()
    return case((job.c.status == "queued", own), else_=None).label("queue_place")


def places() -> Subquery:
    """Subquery for a join to many of `jobs`: `id` and `place` of every waiting row, as turns go while nothing comes in
    between: first those that must be alone, then the first job of each owner, then the second of each.

    A held row counts like any other of its owner: that somebody has an equal job running is not for its owner to know.
    """
    owner = case((_IS_HELD, func.substr(_rows.c.entrypoint, len(HELD) + 1)), else_=_rows.c.entrypoint)
    within = func.row_number().over(partition_by=owner, order_by=(_rows.c.priority.desc(), _rows.c.id))
    last = _rows.c.entrypoint != str(ALONE)
    waiting = select(_rows.c.id, within.label("turn"), last.label("last")).where(_IS_JOB, _rows.c.status == _QUEUED)
    turns = waiting.subquery()
    place = func.row_number().over(order_by=(turns.c.last, turns.c.turn, turns.c.id))
    return select(turns.c.id, place.label("place")).subquery("places")


async def ages_s(connection: AsyncConnection) -> tuple[float, float]:
    """Longest wait in the queue and oldest heartbeat of a running job, in seconds (0: there is none)."""
    row = await connection.execute(
        select(
            _longest_s(_rows.c.updated, _IS_JOB & (_rows.c.status == _QUEUED)),
            _longest_s(_rows.c.heartbeat, _IS_JOB & (_rows.c.status == _PICKED)),
        )
    )
    waited_s, silent_s = row.one()
    return waited_s, silent_s


def _longest_s(since: ColumnElement[Any], which: ColumnElement[bool]) -> ColumnElement[float]:
    longest = func.max(func.extract("epoch", func.now() - since)).filter(which)
    return func.coalesce(cast(longest, Double), 0.0)


async def forget(connection: AsyncConnection) -> None:
    """Delete old entries of pgqueuer's own log, which nothing reads: the history of a job is in its events."""
    await connection.execute(delete(_log).where(_log.c.created < func.now() - KEEP_LOG))


class HeartbeatGrace:
    """Grace period before other workers' stale heartbeats count, after an outage of the database or of this worker.

    A worker that could not reach the database, or was itself suspended, finds the heartbeats of all others stale. It
    grants them one heartbeat timeout; a worker that is late all the time only every other one, so that lost jobs are
    found on an overloaded machine too.
    """

    def __init__(self, heartbeat_s: float, clock: Callable[[], float] = time.time) -> None:
        # Wall-clock time: the monotonic clock stops while a machine is suspended.
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._seen_s = clock()
        self._until_s = float("-inf")
        self._is_down = False

    @property
    def active(self) -> bool:
        """True while jobs of silent workers must be left alone."""
        now_s = self._clock()
        late = now_s - self._seen_s > self._heartbeat_s / 2  # a worker polls twice as often, unless it is held up
        if late and now_s > self._until_s + self._heartbeat_s:
            self._until_s = now_s + self._heartbeat_s
        return self._is_down or now_s < self._until_s

    def database_answered(self) -> None:
        """Note that the database has answered."""
        self._seen_s = self._clock()
        if self._is_down:
            self._is_down = False
            self._until_s = self._seen_s + self._heartbeat_s

    def database_lost(self) -> None:
        """Note that the database has not answered."""
        self._is_down = True
