"""Taking a job in: an answer that is known already, or a place in the queue; both within caps and once a key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.jobs import arrivals, reading, solved
from api.jobs.arrivals import Request
from api.jobs.caps import Room, room_of
from api.jobs.database import for_reading, transaction
from api.jobs.errors import IdempotencyMismatchError, JobError
from api.jobs.records import Job, Submission
from api.jobs.solved import Answer, Equality
from api.jobs.tables import idempotency_keys
from api.jobs.together import Together
from api.settings import Settings
from optpipe.schedule import Schedule
from optpipe.schedule_text import schedule_text


class Submissions:
    """What takes jobs in, for one process."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._reading = for_reading(engine)
        self._together = Together(self._take_all)

    async def submit(self, request: Request) -> Submission:
        """See `Store.submit`."""
        return await self._together.ask(request.owner, (request, await self._answer(request)))

    async def _answer(self, request: Request) -> Answer | None:
        """What was written for this very problem, or else is written now for an equal one that was solved."""
        async with transaction(self._reading) as connection:
            known = await solved.answer(connection, request.digest, request.config)
        if known is not None:
            return known
        equality = await asyncio.to_thread(Equality.of, request.problem)
        async with transaction(self._reading) as connection:
            row = await solved.lookup(connection, equality.key)
        made = await asyncio.to_thread(_made_of, row, equality, request) if row else None
        if row is None or made is None:
            return None
        async with transaction(self._engine) as connection:
            return await solved.remember(connection, row, request.digest, *made)

    async def _take_all(
        self, owner: UUID | None, asked: Sequence[tuple[Request, Answer | None]]
    ) -> list[Submission | Exception]:
        """Take in some of one owner's: together, or none of them."""
        async with transaction(self._engine) as connection:
            room = await room_of(connection, self._settings, owner)
            return [await _taken_or_refused(connection, room, request, answer) for request, answer in asked]


def _made_of(row: Any, equality: Equality, request: Request) -> tuple[Schedule, str] | None:
    """The schedule of an equal problem for this one, and its document; None where it was not solved well enough."""
    schedule = solved.schedule_of(row, request.problem, equality, request.config)
    return (schedule, schedule_text(schedule)) if schedule else None


async def _taken_or_refused(
    connection: AsyncConnection, room: Room, request: Request, answer: Answer | None
) -> Submission | Exception:
    try:
        return await _taken(connection, room, request, answer)
    except JobError as error:  # before anything was written
        return error


async def _taken(connection: AsyncConnection, room: Room, request: Request, answer: Answer | None) -> Submission:
    known = await _known(connection, request)
    if known is not None:
        return Submission(known, created=False)
    room.check()
    job = await arrivals.answered(connection, request, answer) if answer else None
    if job is None:
        job = await arrivals.queued(connection, request)
    room.take(job)
    if request.idempotency_key is not None:
        used = {"owner": request.owner, "key": request.idempotency_key, "body_hash": request.body_hash}
        await connection.execute(insert(idempotency_keys).values(job_id=job.id, **used))
    return Submission(job, created=True)


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
