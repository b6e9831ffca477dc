"""Taking a job in: caps, Idempotency-Keys, answers that are known already, and the queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from uuid import UUID, uuid4

from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.jobs import best, queue, reading, solved
from api.jobs.config import JobConfig
from api.jobs.database import transaction
from api.jobs.errors import IdempotencyMismatchError, TooManyError
from api.jobs.history import record
from api.jobs.records import Job, Limit, Submission
from api.jobs.solved import Equality
from api.jobs.tables import AnyRow, idempotency_keys, jobs
from api.settings import Settings
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.schedule_text import schedule_text
from solver.methods import METHODS

MINUTE = timedelta(minutes=1)
ASK_AGAIN_S = 5.0
"""When to try again where too many jobs wait: some will have ended."""


@dataclass(frozen=True)
class Request:
    """A job to be taken in."""

    problem: Problem
    config: JobConfig
    owner: UUID | None
    idempotency_key: str | None
    body_hash: bytes


async def submit(engine: AsyncEngine, settings: Settings, request: Request) -> Submission:
    """See `Store.submit`."""
    async with transaction(engine) as connection:
        known = await _known(connection, request)
    if known is not None:
        return Submission(known, created=False)
    problem_json = await asyncio.to_thread(request.problem.to_json)
    schedule = await _solved_before(engine, request)
    document = await asyncio.to_thread(schedule_text, schedule) if schedule else ""
    async with transaction(engine) as connection:
        await _one_at_a_time(connection, request.owner)
        known = await _known(connection, request)
        if known is not None:
            return Submission(known, created=False)
        await check_caps(connection, settings, request.owner)
        if schedule is None:
            job_id = await _queue(connection, request, problem_json)
        else:
            job_id = await _end(connection, request, problem_json, schedule, document)
        if request.idempotency_key is not None:
            used = {"owner": request.owner, "key": request.idempotency_key, "body_hash": request.body_hash}
            await connection.execute(insert(idempotency_keys).values(job_id=job_id, **used))
        return Submission(await reading.job(connection, job_id, request.owner), created=True)


async def _one_at_a_time(connection: AsyncConnection, owner: UUID | None) -> None:
    """Submissions of one owner follow one another, so that caps and Idempotency-Keys hold among many at once."""
    await connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"submit {owner}", 0))))


async def _known(connection: AsyncConnection, request: Request) -> Job | None:
    """The job that this Idempotency-Key stands for. Raises IdempotencyMismatchError."""
    if request.idempotency_key is None:
        return None
    same_owner = idempotency_keys.c.owner.is_not_distinct_from(request.owner)
    query = select(idempotency_keys).where(idempotency_keys.c.key == request.idempotency_key, same_owner)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        return None
    if row.body_hash != request.body_hash:
        raise IdempotencyMismatchError(
            "this Idempotency-Key came with another body before. Maybe make a new key for each new job."
        )
    return await reading.job(connection, row.job_id, request.owner)


async def _solved_before(engine: AsyncEngine, request: Request) -> Schedule | None:
    equality = await asyncio.to_thread(Equality.of, request.problem)
    async with transaction(engine) as connection:
        row = await solved.lookup(connection, equality.key)
    if row is None:
        return None
    return await asyncio.to_thread(solved.answer, row, request.problem, equality, request.config)


async def check_caps(connection: AsyncConnection, settings: Settings, owner: UUID | None) -> None:
    """Raise TooManyError where the owner has as many jobs as are allowed, at once or in a minute."""
    of_owner = reading.of_owner(owner)
    waiting = select(func.count()).select_from(jobs).where(of_owner, jobs.c.queue_id.is_not(None))
    if (await connection.execute(waiting)).scalar_one() >= settings.max_queued_jobs:
        raise TooManyError(
            "queued_jobs",
            f"{settings.max_queued_jobs} jobs of this key wait or run, and no more may. Maybe cancel some.",
            ASK_AGAIN_S,
        )
    recent = jobs.c.submitted_at > func.now() - MINUTE
    submitted, now, oldest = (
        await connection.execute(
            select(func.count(), func.now(), func.min(jobs.c.submitted_at)).where(of_owner, recent)
        )
    ).one()
    if submitted >= settings.max_submissions_a_minute:
        raise TooManyError(
            "submissions",
            f"this key submitted {submitted} jobs in the last minute, and no more are allowed.",
            max(1.0, (oldest + MINUTE - now).total_seconds()),
        )


async def _queue(connection: AsyncConnection, request: Request, problem_json: str) -> UUID:
    job_id = uuid4()
    queue_id = await queue.enqueue(connection, job_id, request.config.priority)
    job = await _insert(connection, request, problem_json, id=job_id, status="queued", queue_id=queue_id)
    await record(connection, job, "status")
    return job_id


async def _end(
    connection: AsyncConnection, request: Request, problem_json: str, schedule: Schedule, document: str
) -> UUID:
    """A job that is done as it comes, with a schedule that was known."""
    job = await _insert(
        connection,
        request,
        problem_json,
        id=uuid4(),
        status="succeeded",
        value_us=schedule.value_us,
        bound_us=schedule.bound_us,
        reason=schedule.status,
        stopped_by=_stopped_by(schedule, request.config),
        finished_at=func.now(),
    )
    await record(connection, job, "status", schedule)
    await best.keep_orders(connection, job, schedule)
    await best.keep_document(connection, job, document)
    return cast(UUID, job.id)


def _stopped_by(schedule: Schedule, config: JobConfig) -> Limit | None:
    """What would have ended a solve with this answer."""
    if schedule.status == "optimal" or METHODS[config.method].kind == "published":
        return None
    return "gap" if schedule.gap <= config.gap else "time"


def _shown(name: str) -> str:
    """A name as PostgreSQL can hold it; the problem itself keeps what it was given."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)


async def _insert(connection: AsyncConnection, request: Request, problem_json: str, **state: Any) -> AnyRow:
    """The row of a new job, at its first revision."""
    problem, config = request.problem, request.config
    row = insert(jobs).values(
        owner=request.owner,
        problem=problem_json,
        problem_name=_shown(problem.name),
        objective=problem.objective,
        config=config.model_dump(mode="json"),
        tags=list(config.tags),
        revision=1,
        **state,
    )
    inserted: AnyRow = (await connection.execute(row.returning(jobs))).one()
    return inserted
