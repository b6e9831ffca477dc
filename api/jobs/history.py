"""Changes of a job, each with its event: one revision a change, and everyone who follows the job is told."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.records import EventKind
from api.jobs.tables import AnyRow, events, jobs
from optpipe.schedule import Schedule

CHANGED = "optpipe_changed"
"""The channel of new events; the payload is the job's id."""

CANCEL = "optpipe_cancel"
"""The channel of cancel requests for running jobs; the payload is the job's id."""


async def change(
    connection: AsyncConnection, job_id: UUID, kind: EventKind, found: Schedule | None = None, **values: Any
) -> AnyRow:
    """Set `values` of a job and append the event; the changed row. `found`: the schedule that it is about."""
    changing = update(jobs).where(jobs.c.id == job_id).values(revision=jobs.c.revision + 1, **values)
    changed: AnyRow = (await connection.execute(changing.returning(jobs))).one()
    await record(connection, changed, kind, found)
    return changed


async def record(connection: AsyncConnection, job: AnyRow, kind: EventKind, found: Schedule | None = None) -> None:
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
