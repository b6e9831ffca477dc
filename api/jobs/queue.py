"""Job queue: pgqueuer's tables and statements, used within our own transactions.

A job waits or runs if and only if it has a row there. Order, priorities, locks and the finding of silent workers'
jobs are pgqueuer's; its loop (`QueueManager`) is not used, because its writes do not ask whose a job is now, it does
not count lost workers, and it ends where the database is away for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

import psycopg
from pgqueuer.adapters.drivers.psycopg import PsycopgDriver
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.domain.settings import db_settings
from pgqueuer.domain.types import JobId, QueueEntrypoint, QueueManagerId
from pgqueuer.ports.repository import EntrypointExecutionParameter
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    FromClause,
    Integer,
    Subquery,
    and_,
    case,
    cast,
    column,
    delete,
    func,
    literal_column,
    or_,
    select,
    table,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.database import driver_connection
from api.jobs.tables import jobs

ENTRYPOINT = QueueEntrypoint("solve")

NEW_WORK = str(db_settings().channel)
"""The channel on which PostgreSQL tells of new rows."""

Outcome = Literal["successful", "canceled", "exception"]

_rows = table(
    db_settings().queue_table,
    column("id", BigInteger),
    column("priority", Integer),
    column("status"),
    column("updated"),
    column("heartbeat"),
)
_QUEUED: ColumnElement[str] = literal_column("'queued'")
_PICKED: ColumnElement[str] = literal_column("'picked'")
_log = table(db_settings().queue_table_log, column("created"))

KEEP_LOG = timedelta(days=1)


class _InTransaction(PsycopgDriver):
    """pgqueuer's driver on a connection that has a transaction open. It refuses those, for its listeners' sake: there
    are none here."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection


async def _queries(connection: AsyncConnection) -> Queries:
    return Queries(_InTransaction(await driver_connection(connection)))


async def enqueue(connection: AsyncConnection, job_id: UUID, priority: int) -> int:
    """Append a job; its place among those of its priority is kept until it ends. Returns the id of its row."""
    (queue_id,) = await (await _queries(connection)).enqueue(str(ENTRYPOINT), job_id.bytes, priority)
    return int(queue_id)


async def pick(
    connection: AsyncConnection, worker: UUID, free: int, slots: int, heartbeat_timeout_s: float
) -> list[tuple[int, UUID]]:
    """Take at most `free` jobs for a worker, which has at most `slots`: rows and jobs, those of highest priority first.

    Jobs of a worker without a heartbeat for `heartbeat_timeout_s` are taken like those that wait.
    """
    picked = await (await _queries(connection)).dequeue(
        batch_size=free,
        entrypoints={ENTRYPOINT: EntrypointExecutionParameter(concurrency_limit=0)},
        queue_manager_id=QueueManagerId(worker),
        global_concurrency_limit=slots,
        heartbeat_timeout=timedelta(seconds=heartbeat_timeout_s),
    )
    return [(int(row.id), UUID(bytes=row.payload)) for row in picked]


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
    priority = job.c.config["priority"].astext.cast(Integer)
    before = or_(_rows.c.priority > priority, and_(_rows.c.priority == priority, _rows.c.id <= job.c.queue_id))
    in_order = (
        select(func.count())
        .select_from(_rows)
        .where(_rows.c.status == _QUEUED, before)
        .correlate(job)
        .scalar_subquery()
    )
    return case((job.c.status == "queued", in_order), else_=None).label("queue_place")


def places() -> Subquery:
    """Subquery for a join to many of `jobs`: `id` and `place` of every waiting row, counted in one pass."""
    place = func.row_number().over(order_by=(_rows.c.priority.desc(), _rows.c.id))
    return select(_rows.c.id, place.label("place")).where(_rows.c.status == _QUEUED).subquery("places")


async def ages_s(connection: AsyncConnection) -> tuple[float, float]:
    """Longest wait in the queue and oldest heartbeat of a running job, in seconds (0: there is none)."""
    row = await connection.execute(
        select(
            _longest_s(_rows.c.updated, _rows.c.status == _QUEUED),
            _longest_s(_rows.c.heartbeat, _rows.c.status == _PICKED),
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
        self._away = False

    @property
    def active(self) -> bool:
        """True while jobs of silent workers must be left alone."""
        now_s = self._clock()
        late = now_s - self._seen_s > self._heartbeat_s / 2  # a worker polls twice as often, unless it is held up
        if late and now_s > self._until_s + self._heartbeat_s:
            self._until_s = now_s + self._heartbeat_s
        return self._away or now_s < self._until_s

    def database_answered(self) -> None:
        """Note that the database has answered."""
        self._seen_s = self._clock()
        if self._away:
            self._away = False
            self._until_s = self._seen_s + self._heartbeat_s

    def database_lost(self) -> None:
        """Note that the database has not answered."""
        self._away = True
