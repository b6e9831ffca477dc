"""Queries on jobs and events: reads with access control, updates with their events, totals, retention.

Each total is updated in the transaction of the event that it counts, so none is lost and none is counted twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, bindparam, delete, exists, false, func, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.errors import NotFoundError
from api.jobs import queue
from api.jobs.database import Statement, transaction
from api.jobs.records import EventKind, Found, Job, JobConfig, JobResult
from api.jobs.tables import (
    AnyRow,
    answers,
    api_keys,
    documents,
    events,
    incumbents,
    jobs,
    schedules,
    solved_problems,
    submissions,
    totals,
    workers,
)
from api.settings import Settings

OWNED = (jobs.c.id == bindparam("job_id")) & jobs.c.owner.is_not_distinct_from(bindparam("owner"))
"""The condition for the job `job_id` of `owner`."""


ENDED_KEY = api_keys.c.revoked_at.is_not(None) | func.coalesce(api_keys.c.expires_at <= func.now(), false())
"""The condition that a key no longer opens anything."""

NOT_ENDED = ~exists().where(api_keys.c.id == bindparam("key"), ENDED_KEY)
"""The condition that `key` is neither revoked nor expired; true where there is none."""


def of_owner(owner: UUID | None) -> ColumnElement[bool]:
    """The condition for all jobs of this owner."""
    return jobs.c.owner.is_(None) if owner is None else jobs.c.owner == owner


def not_found(job_id: UUID) -> NotFoundError:
    """Error for a job that does not exist or belongs to another owner."""
    return NotFoundError(f"there is no job {job_id}. Maybe it was removed after its time, or belongs to another key.")


SHOWN = [column for column in jobs.c if column.name != "problem"]
"""A problem may be large, and is not shown."""


_JOB = Statement(select(*SHOWN, queue.place()).where(OWNED))


async def job(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> Job:
    """One job. Raises NotFoundError."""
    row = await _JOB.one_or_none(connection, job_id=job_id, owner=owner)
    if row is None:
        raise not_found(job_id)
    return job_from_row(row, row.queue_place)


async def locked(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> AnyRow:
    """Row of a job, locked until the end of the transaction. Raises NotFoundError."""
    which = {"job_id": job_id, "owner": owner}
    queue_id = (await connection.execute(select(jobs.c.queue_id).where(OWNED), which)).scalar_one_or_none()
    if queue_id is not None:
        await queue.lock(connection, queue_id)
    row = (await connection.execute(select(jobs).where(OWNED).with_for_update(), which)).one_or_none()
    if row is None:
        raise not_found(job_id)
    return row


def cancelled(job: AnyRow) -> dict[str, Any]:
    """New values of a job that is cancelled while no worker solves it."""
    return {
        "status": "cancelled",
        "queue_id": None,
        "worker": None,
        "finished_at": func.now(),
        "reason": "no_solution" if job.value_us is None else "feasible",
        "stopped_by": "interrupted",
    }


_ORDERS_BYTES = select(func.octet_length(incumbents.c.orders)).where(incumbents.c.job_id == jobs.c.id).scalar_subquery()

AS_NEW: dict[str, Any] = {
    "status": "queued",
    "started_at": None,
    "finished_at": None,
    "lost": 0,
    "leader": None,
    "held_at": None,
    "cancel_requested": False,
    "reason": None,
    "stopped_by": None,
    "error": None,
    "budgets_bytes": None,
    "schedule_bytes": func.coalesce(_ORDERS_BYTES, 0),
}
"""New values of an ended job that is queued again, apart from `queue_id`: of its best schedule the orders are left."""


_COLUMNS = [field.name for field in fields(Job) if field.name in jobs.c and field.name != "config"]
"""Fields of a job that are columns as they are."""


def job_from_row(row: AnyRow, queue_place: int | None = None) -> Job:
    """Build a Job from a row of `jobs`."""
    values = {name: getattr(row, name) for name in _COLUMNS}
    return Job(config=JobConfig.from_data(row.config), stop_reason=row.stopped_by, queue_place=queue_place, **values)


CHANGED = "optpipe_changed"
"""The channel of new events; the payload is the job's id and its owner's."""

CANCEL = "optpipe_cancel"
"""The channel of cancel requests for running jobs; the payload is the job's id."""


async def change_job(
    connection: AsyncConnection, job_id: UUID, kind: EventKind, found: Found | None = None, **values: Any
) -> AnyRow:
    """Update a job and append the matching event (revision + 1, NOTIFY); the changed row.

    `found`: what the event is about.
    """
    changing = update(jobs).where(jobs.c.id == job_id).values(revision=jobs.c.revision + 1, **values)
    job: AnyRow = (await connection.execute(changing.returning(jobs))).one()
    await connection.execute(
        insert(events).values(
            job_id=job.id,
            revision=job.revision,
            kind=kind,
            attempt=job.attempt,
            status=job.status,
            value_us=job.value_us,
            bound_us=job.bound_us,
            method=found.method if found else None,
            seconds=found.solve_seconds if found else None,
        )
    )
    await notify(connection, CHANGED, f"{job.id} {job.owner}")
    return job


async def notify(connection: AsyncConnection, channel: str, payload: str) -> None:
    """Notify a channel when this transaction is committed."""
    await connection.execute(select(func.pg_notify(channel, payload)))


Totals = Mapping[tuple[str, str], float]
"""Figures by name and label; one that is not there is 0. Both come from short fixed lists."""

SOLVE_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
FINAL_GAP = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper ends of the histogram buckets, which are their labels; values above have the label ABOVE."""
ABOVE, SUM = "+Inf", "sum"

ENDED, STOPPED, DIED, LOST, HEARTBEATS = "ended", "stopped", "died", "lost", "heartbeats"


def totals_of_result(result: JobResult) -> Totals:
    """Totals to add for a job that has ended."""
    figures = Counter[tuple[str, str]]({(ENDED, result.status): 1})
    if result.stop_reason is not None:
        figures[STOPPED, result.stop_reason] = 1
    if result.died:
        figures[DIED, ""] = 1
    if result.found is None:
        return figures
    seconds = _observed("solve_seconds", SOLVE_SECONDS, result.found.solve_seconds)
    return {**figures, **seconds, **_observed("final_gap", FINAL_GAP, result.found.gap)}


def _observed(name: str, ends: Sequence[float], value: float) -> Totals:
    index = bisect_left(ends, value)
    label = str(ends[index]) if index < len(ends) else ABOVE
    return {(name, label): 1, (name, SUM): value}


async def add_totals(connection: AsyncConnection, figures: Totals) -> None:
    """Add to the totals. Call it last in a transaction, because every worker updates the same rows."""
    rows = [{"name": n, "label": label, "value": value} for (n, label), value in sorted(figures.items()) if value]
    if not rows:
        return
    new = upsert(totals).values(rows)
    more = {"value": totals.c.value + new.excluded.value}
    await connection.execute(new.on_conflict_do_update(index_elements=["name", "label"], set_=more))


SEEN_EVERY_S = 2.0
"""Interval between two heartbeats of a worker."""
ALIVE_S = 10.0
"""A worker that was not seen for so long does not count as alive; the heartbeats of its jobs are another matter."""


async def say_alive(engine: AsyncEngine, worker: UUID, solves: int) -> None:
    """Note that a worker lives, with room for `solves` jobs at a time."""
    new = upsert(workers).values(id=worker, solves=solves)
    async with transaction(engine) as connection:
        await connection.execute(new.on_conflict_do_update(index_elements=["id"], set_={"seen_at": func.now()}))


async def say_goodbye(engine: AsyncEngine, worker: UUID) -> None:
    """Note that a worker has ended in order."""
    async with transaction(engine) as connection:
        await connection.execute(delete(workers).where(workers.c.id == worker))


async def count_alive(connection: AsyncConnection) -> tuple[int, int]:
    """Workers that live, and the jobs that they can solve at a time, all together."""
    alive = workers.c.seen_at > func.now() - timedelta(seconds=ALIVE_S)
    figures = select(func.count(), func.coalesce(func.sum(workers.c.solves), 0)).where(alive)
    count, solves = (await connection.execute(figures)).one()
    return count, solves


RETENTION_LOCK = 0x6F70747069706532
"""Key of the advisory lock that one worker at a time takes to remove rows."""

REMOVED_AT_ONCE = 500
"""Jobs removed in one transaction for each limit; the rest follows in the next pass."""

KEEP_DOCUMENTS = timedelta(hours=1)
"""Age at which a document without a link is an orphan: its writer has linked it long before."""

KEEP_ANSWERS = timedelta(days=90)
KEEP_WORKERS = timedelta(days=1)
KEEP_SUBMISSIONS = timedelta(hours=1)
MOST_ANSWERS = 10_000
MOST_ANSWER_BYTES = 2**30
"""Solutions kept of the problems that one key was the first to have solved."""


async def remove_old(engine: AsyncEngine, settings: Settings) -> int:
    """Remove ended jobs beyond the retention limits with all their rows, and unused solutions; the number of jobs.

    What exceeds a number is counted for each key, so that none pushes out what is another's.
    """
    async with transaction(engine) as connection:
        free = await connection.execute(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": RETENTION_LOCK})
        if not free.scalar():
            return 0
        ended = select(jobs.c.id).where(jobs.c.finished_at.is_not(None))
        too_old = ended.where(jobs.c.finished_at < func.now() - timedelta(days=settings.keep_jobs_days))
        newest_jobs = (jobs.c.finished_at.desc(), jobs.c.id)
        place = func.row_number().over(partition_by=jobs.c.owner, order_by=newest_jobs)
        places = ended.add_columns(place.label("place")).subquery()
        too_many = select(places.c.id).where(places.c.place > settings.keep_jobs)
        removed = 0
        for which in (too_old, too_many):
            result = await connection.execute(delete(jobs).where(jobs.c.id.in_(which.limit(REMOVED_AT_ONCE))))
            removed += result.rowcount
        used = solved_problems.c.used_at
        newest: dict[str, Any] = {"partition_by": solved_problems.c.owner, "order_by": used.desc()}
        size_bytes = func.octet_length(solved_problems.c.orders)
        figures = func.row_number().over(**newest).label("place"), func.sum(size_bytes).over(**newest).label("bytes")
        kept = select(solved_problems.c.key, *figures).subquery()
        beyond = select(kept.c.key).where((kept.c.place > MOST_ANSWERS) | (kept.c.bytes > MOST_ANSWER_BYTES))
        unused = (used < func.now() - KEEP_ANSWERS) | solved_problems.c.key.in_(beyond)
        await connection.execute(delete(solved_problems).where(unused))
        old = documents.c.written_at < func.now() - KEEP_DOCUMENTS
        links = [exists().where(table.c.document == documents.c.digest) for table in (schedules, answers)]
        await connection.execute(delete(documents).where(old, *(~link for link in links)))
        await connection.execute(delete(workers).where(workers.c.seen_at < func.now() - KEEP_WORKERS))
        await connection.execute(delete(submissions).where(submissions.c.at < func.now() - KEEP_SUBMISSIONS))
        await queue.forget(connection)
    return removed
