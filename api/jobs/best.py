"""The best schedule of a job: its orders while the job lives, and the whole document once it has ended."""

from __future__ import annotations

import json
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.errors import NoScheduleError
from api.jobs.reading import not_found, owned
from api.jobs.records import TERMINAL, BestSchedule
from api.jobs.tables import AnyRow, incumbents, jobs, schedules
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.schedule_text import schedule_text
from solver.finish import finish
from solver.orders_text import orders_data, read_orders


async def keep_orders(connection: AsyncConnection, job: AnyRow, schedule: Schedule) -> None:
    """Keep the orders of a verified schedule as the best of a job, whose row this is."""
    values = {
        "revision": job.revision,
        "attempt": job.attempt,
        "value_us": schedule.value_us,
        "bound_us": schedule.bound_us,
        "method": schedule.method,
        "seconds": schedule.solve_seconds,
        "orders": json.dumps(orders_data(schedule.orders), separators=(",", ":")),
    }
    new = insert(incumbents).values(job_id=job.id, **values)
    await connection.execute(new.on_conflict_do_update(index_elements=["job_id"], set_=values))


async def keep_document(connection: AsyncConnection, job: AnyRow, text: str) -> None:
    """Keep the final document of a job."""
    await connection.execute(insert(schedules).values(job_id=job.id, revision=job.revision, document=text))


async def row_of(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> AnyRow:
    """What `best_schedule` needs. Raises NotFoundError, NoScheduleError."""
    query = (
        select(
            jobs.c.status,
            jobs.c.problem,
            incumbents.c.revision,
            incumbents.c.bound_us,
            incumbents.c.method,
            incumbents.c.seconds,
            incumbents.c.orders,
            schedules.c.document,
        )
        .select_from(
            jobs.outerjoin(incumbents, incumbents.c.job_id == jobs.c.id).outerjoin(
                schedules, schedules.c.job_id == jobs.c.id
            )
        )
        .where(owned(job_id, owner))
    )
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise not_found(job_id)
    if row.revision is None:
        raise NoScheduleError(f"job {job_id} is {row.status} and has no schedule. Maybe its events tell why.")
    return row


def best_schedule(row: AnyRow) -> BestSchedule:
    """A row of `row_of` as a document."""
    final = row.status in TERMINAL
    if row.document is not None:
        return BestSchedule(row.revision, final, row.document)
    return BestSchedule(row.revision, final, schedule_text(schedule_of(Problem.from_json(row.problem), row)))


def schedule_of(problem: Problem, row: AnyRow) -> Schedule:
    """The kept orders of a problem, timed and verified anew. `row`: of `incumbents`, or of `row_of`."""
    return finish(problem, read_orders(json.loads(row.orders)), row.bound_us, row.method, row.seconds)
