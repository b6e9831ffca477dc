"""Queries on jobs and events: reads with access control, updates with their events, totals, retention.

Each total is updated in the transaction of the event that it counts, so none is lost and none is counted twice.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, bindparam, delete, exists, func, insert, select, text, tuple_, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.errors import BadCursorError, NotFoundError
from api.jobs import queue
from api.jobs.database import Statement, transaction
from api.jobs.records import STATUSES, Counts, Event, EventKind, Job, JobConfig, JobResult, Page, Status
from api.jobs.tables import AnyRow, answers, documents, events, jobs, schedules, solved_problems, totals
from api.settings import Settings
from optpipe.schedule import Schedule

OWNED = (jobs.c.id == bindparam("job_id")) & jobs.c.owner.is_not_distinct_from(bindparam("owner"))
"""The condition for the job `job_id` of `owner`."""


def of_owner(owner: UUID | None) -> ColumnElement[bool]:
    """The condition for all jobs of this owner."""
    return jobs.c.owner.is_(None) if owner is None else jobs.c.owner == owner


def not_found(job_id: UUID) -> NotFoundError:
    """What is said for a job that is not there, or not for this owner."""
    return NotFoundError(f"there is no job {job_id}. Maybe it was removed after its time, or belongs to another key.")


SHOWN = [column for column in jobs.c if column.name != "problem"]
"""A problem may be large, and is not shown."""


def _some_jobs() -> Select[Any]:
    places = queue.places()
    with_places = jobs.outerjoin(places, places.c.id == jobs.c.queue_id)
    return select(*SHOWN, places.c.place.label("queue_place")).select_from(with_places)


_JOB = Statement(select(*SHOWN, queue.place()).where(OWNED))


async def job(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> Job:
    """One job. Raises NotFoundError."""
    row = await _JOB.one_or_none(connection, job_id=job_id, owner=owner)
    if row is None:
        raise not_found(job_id)
    return job_from_row(row, row.queue_place)


async def locked(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> AnyRow:
    """The row of a job, which nobody else changes until the end of the transaction. Raises NotFoundError."""
    which = {"job_id": job_id, "owner": owner}
    queue_id = (await connection.execute(select(jobs.c.queue_id).where(OWNED), which)).scalar_one_or_none()
    if queue_id is not None:
        await queue.lock(connection, queue_id)
    row = (await connection.execute(select(jobs).where(OWNED).with_for_update(), which)).one_or_none()
    if row is None:
        raise not_found(job_id)
    return row


def cancelled(job: AnyRow) -> dict[str, Any]:
    """What becomes of a job that is cancelled while nobody solves it."""
    return {
        "status": "cancelled",
        "queue_id": None,
        "worker": None,
        "finished_at": func.now(),
        "reason": "no_solution" if job.value_us is None else "feasible",
        "stopped_by": "interrupted",
    }


AS_NEW: dict[str, Any] = {
    "status": "queued",
    "started_at": None,
    "finished_at": None,
    "lost": 0,
    "cancel_requested": False,
    "reason": None,
    "stopped_by": None,
    "error": None,
}
"""What becomes of an ended job that is queued again, besides its place in the queue."""


async def page(
    connection: AsyncConnection,
    owner: UUID | None,
    status: Status | None,
    tag: str | None,
    limit: int,
    cursor: str | None,
) -> Page:
    """Some jobs, newest first. Raises BadCursorError."""
    query = _some_jobs().where(of_owner(owner)).order_by(jobs.c.submitted_at.desc(), jobs.c.id.desc()).limit(limit + 1)
    if status is not None:
        query = query.where(jobs.c.status == status)
    if tag is not None and not tag.isprintable():
        return Page([], None)  # no job can have it, and PostgreSQL takes no such text
    if tag is not None:
        query = query.where(jobs.c.tags.contains([tag]))
    if cursor is not None:
        query = query.where(tuple_(jobs.c.submitted_at, jobs.c.id) < _place_of(cursor))
    found = [job_from_row(row, row.queue_place) for row in await connection.execute(query)]
    more = len(found) > limit
    return Page(found[:limit], _cursor_of(found[limit - 1]) if more else None)


def _cursor_of(last: Job) -> str:
    return base64.urlsafe_b64encode(f"{last.submitted_at.isoformat()} {last.id}".encode()).decode()


def _place_of(cursor: str) -> tuple[datetime, UUID]:
    try:
        at, _, job_id = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().partition(" ")
        place = datetime.fromisoformat(at), UUID(job_id)
    except (ValueError, binascii.Error):
        raise BadCursorError("the cursor is none of this list. Maybe it was cut short.") from None
    if place[0].tzinfo is None:
        raise BadCursorError("the cursor is none of this list.")
    return place


def job_from_row(row: AnyRow, queue_place: int | None = None) -> Job:
    """A row of `jobs` as the store answers with it."""
    return Job(
        id=row.id,
        status=row.status,
        config=JobConfig.from_data(row.config),
        problem_name=row.problem_name,
        objective=row.objective,
        value_us=row.value_us,
        bound_us=row.bound_us,
        reason=row.reason,
        limit=row.stopped_by,
        error=row.error,
        revision=row.revision,
        attempt=row.attempt,
        queue_place=queue_place,
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


async def problem_text(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> str:
    """The problem of a job as JSON. Raises NotFoundError."""
    query = select(jobs.c.problem).where(OWNED)
    text = (await connection.execute(query, {"job_id": job_id, "owner": owner})).scalar_one_or_none()
    if text is None:
        raise not_found(job_id)
    return str(text)


_EVENTS = Statement(
    select(*(events.c[name] for name in Event.__dataclass_fields__))
    .select_from(jobs.outerjoin(events, (events.c.job_id == jobs.c.id) & (events.c.revision > bindparam("after"))))
    .where(OWNED)
    .order_by(events.c.revision)
)


async def events_after(connection: AsyncConnection, job_id: UUID, owner: UUID | None, after: int) -> list[Event]:
    """The events of higher revisions. Raises NotFoundError."""
    found = await _EVENTS.all(connection, job_id=job_id, owner=owner, after=after)
    if not found:
        raise not_found(job_id)
    return [Event(**row._asdict()) for row in found if row.revision is not None]


async def counts(connection: AsyncConnection) -> Counts:
    """Figures over all jobs."""
    by_status = await connection.execute(select(jobs.c.status, func.count()).group_by(jobs.c.status))
    found: dict[Status, int] = {row[0]: row[1] for row in by_status}
    workers = (await connection.execute(select(func.count(jobs.c.worker.distinct())))).scalar_one()
    age_s, heartbeat_age_s = await queue.ages_s(connection)
    return Counts(
        {status: found.get(status, 0) for status in STATUSES},
        age_s,
        heartbeat_age_s,
        workers,
        await read_totals(connection),
    )


CHANGED = "optpipe_changed"
"""The channel of new events; the payload is the job's id."""

CANCEL = "optpipe_cancel"
"""The channel of cancel requests for running jobs; the payload is the job's id."""


async def change_job(
    connection: AsyncConnection, job_id: UUID, kind: EventKind, found: Schedule | None = None, **values: Any
) -> AnyRow:
    """Set `values` of a job and append the event; the changed row. `found`: the schedule that it is about."""
    changing = update(jobs).where(jobs.c.id == job_id).values(revision=jobs.c.revision + 1, **values)
    changed: AnyRow = (await connection.execute(changing.returning(jobs))).one()
    await record_event(connection, changed, kind, found)
    return changed


async def record_event(
    connection: AsyncConnection, job: AnyRow, kind: EventKind, found: Schedule | None = None
) -> None:
    """Append the event that made the job what it is now."""
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
    await notify(connection, CHANGED, job.id)


async def notify(connection: AsyncConnection, channel: str, job_id: UUID) -> None:
    """Tell whoever listens, once this transaction is committed."""
    await connection.execute(select(func.pg_notify(channel, str(job_id))))


Totals = Mapping[tuple[str, str], float]
"""Figures by name and label; one that is not there is 0. Both come from short fixed lists."""

SOLVE_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
FINAL_GAP = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper ends of the buckets of a histogram, which are its labels; what lies above has the label ABOVE."""
ABOVE, SUM = "+Inf", "sum"

ENDED, STOPPED, DIED, LOST, HEARTBEATS = "ended", "stopped", "died", "lost", "heartbeats"


def totals_of_result(outcome: JobResult) -> Totals:
    """What the end of a job counts for."""
    figures = Counter[tuple[str, str]]({(ENDED, outcome.status): 1})
    if outcome.limit is not None:
        figures[STOPPED, outcome.limit] = 1
    if outcome.died:
        figures[DIED, ""] = 1
    if outcome.schedule is None:
        return figures
    seconds = _observed("solve_seconds", SOLVE_SECONDS, outcome.schedule.solve_seconds)
    return {**figures, **seconds, **_observed("final_gap", FINAL_GAP, outcome.schedule.gap)}


def _observed(name: str, ends: Sequence[float], value: float) -> Totals:
    index = bisect_left(ends, value)
    label = str(ends[index]) if index < len(ends) else ABOVE
    return {(name, label): 1, (name, SUM): value}


async def add_totals(connection: AsyncConnection, figures: Totals) -> None:
    """Add to the totals. It comes last in a transaction, because every worker writes the same rows."""
    rows = [{"name": n, "label": label, "value": value} for (n, label), value in sorted(figures.items()) if value]
    if not rows:
        return
    new = upsert(totals).values(rows)
    more = {"value": totals.c.value + new.excluded.value}
    await connection.execute(new.on_conflict_do_update(index_elements=["name", "label"], set_=more))


async def read_totals(connection: AsyncConnection) -> Totals:
    """All of them."""
    return {(row.name, row.label): row.value for row in await connection.execute(select(totals))}


RETENTION_LOCK = 0x6F70747069706532
"""Key of the advisory lock under which one worker at a time removes."""

REMOVED_AT_ONCE = 500
"""Jobs removed in one transaction: the rest follows the next time."""

KEEP_DOCUMENTS = timedelta(hours=1)
"""So long after it was written, whoever wrote a document has said whose it is."""

KEEP_ANSWERS = timedelta(days=90)
MOST_ANSWERS = 10_000


async def remove_old(engine: AsyncEngine, settings: Settings) -> int:
    """Remove ended jobs beyond the age and the number that are kept, with all that belongs to them; how many."""
    async with transaction(engine) as connection:
        free = await connection.execute(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": RETENTION_LOCK})
        if not free.scalar():
            return 0
        ended = select(jobs.c.id).where(jobs.c.finished_at.is_not(None))
        too_old = ended.where(jobs.c.finished_at < func.now() - timedelta(days=settings.keep_jobs_days))
        too_many = ended.order_by(jobs.c.finished_at.desc(), jobs.c.id).offset(settings.keep_jobs)
        removed = 0
        for which in (too_old, too_many):
            result = await connection.execute(delete(jobs).where(jobs.c.id.in_(which.limit(REMOVED_AT_ONCE))))
            removed += result.rowcount
        await _remove_answers(connection)
        await _remove_documents(connection)
        await queue.forget(connection)
    return removed


async def _remove_answers(connection: AsyncConnection) -> None:
    used = solved_problems.c.used_at
    beyond = select(solved_problems.c.key).order_by(used.desc()).offset(MOST_ANSWERS)
    old = used < func.now() - KEEP_ANSWERS
    await connection.execute(delete(solved_problems).where(old | solved_problems.c.key.in_(beyond)))


async def _remove_documents(connection: AsyncConnection) -> None:
    old = documents.c.written_at < func.now() - KEEP_DOCUMENTS
    used = [exists().where(table.c.document == documents.c.digest) for table in (schedules, answers)]
    await connection.execute(delete(documents).where(old, *(~each for each in used)))
