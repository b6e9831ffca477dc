"""Jobs and events as they are read from the tables; a job of another owner is not there."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, bindparam, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs import queue, totals
from api.jobs.config import JobConfig
from api.jobs.direct import Statement
from api.jobs.errors import BadCursorError, NotFoundError
from api.jobs.records import STATUSES, Counts, Event, Job, Page, Status
from api.jobs.tables import AnyRow, events, jobs

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
    return job_of(row, row.queue_place)


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
    found = [job_of(row, row.queue_place) for row in await connection.execute(query)]
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


def job_of(row: AnyRow, queue_place: int | None = None) -> Job:
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
    age_s, silence_s = await queue.ages_s(connection)
    return Counts(
        {status: found.get(status, 0) for status in STATUSES}, age_s, silence_s, workers, await totals.read(connection)
    )
