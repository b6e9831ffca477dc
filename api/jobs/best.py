"""The best schedule of a job: its orders while the job lives, and the whole document once it has ended.

Every schedule that is written here comes from `solver.finish`, which verifies it. A document lies under the digest of
its text and is never changed, so what is read later, for whichever job, is what was verified then.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.direct import Statement
from api.jobs.errors import NoScheduleError
from api.jobs.reading import OWNED, not_found
from api.jobs.records import TERMINAL, BestSchedule
from api.jobs.tables import AnyRow, documents, incumbents, jobs, schedules
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
    digest = await write_document(connection, text)
    await connection.execute(insert(schedules).values(job_id=job.id, revision=job.revision, document=digest))


async def write_document(connection: AsyncConnection, text: str) -> bytes:
    """Write a document unless it is there; its digest. `retention` leaves what was written in the last hour alone."""
    digest = hashlib.sha256(text.encode()).digest()
    new = insert(documents).values(digest=digest, text=text)
    await connection.execute(new.on_conflict_do_update(index_elements=["digest"], set_={"written_at": func.now()}))
    return digest


_BEST = Statement(
    select(
        jobs.c.status,
        jobs.c.problem,
        incumbents.c.revision,
        incumbents.c.bound_us,
        incumbents.c.method,
        incumbents.c.seconds,
        incumbents.c.orders,
        documents.c.text.label("document"),
    )
    .select_from(
        jobs.outerjoin(incumbents, incumbents.c.job_id == jobs.c.id)
        .outerjoin(schedules, schedules.c.job_id == jobs.c.id)
        .outerjoin(documents, documents.c.digest == schedules.c.document)
    )
    .where(OWNED)
)


async def row_of(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> Any:
    """What `best_schedule` needs. Raises NotFoundError, NoScheduleError."""
    row = await _BEST.one_or_none(connection, job_id=job_id, owner=owner)
    if row is None:
        raise not_found(job_id)
    if row.revision is None:
        raise NoScheduleError(f"job {job_id} is {row.status} and has no schedule. Maybe its events tell why.")
    return row


def best_schedule(row: Any) -> BestSchedule:
    """A row of `row_of` as a document."""
    final = row.status in TERMINAL
    if row.document is not None:
        return BestSchedule(row.revision, final, row.document)
    return BestSchedule(row.revision, final, schedule_text(schedule_of(Problem.from_json(row.problem), row)))


def schedule_of(problem: Problem, row: Any) -> Schedule:
    """The kept orders of a problem, timed and verified anew. `row`: of `incumbents`, or of `row_of`."""
    return finish(problem, read_orders(json.loads(row.orders)), row.bound_us, row.method, row.seconds)
