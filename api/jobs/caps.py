"""How many jobs an owner may have at once, and submit in a minute."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, Double, Text, bindparam, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.direct import Statement
from api.jobs.errors import TooManyError
from api.jobs.records import Job
from api.jobs.tables import jobs
from api.settings import Settings

MINUTE = timedelta(minutes=1)
ASK_AGAIN_S = 5.0
"""When to try again where too many jobs wait: some will have ended."""


@dataclass
class Room:
    """What an owner has."""

    settings: Settings
    waiting: int
    submitted: int
    next_in_s: float
    """When the oldest submission of the last minute no longer counts."""

    def check(self) -> None:
        """Raise TooManyError where there is no room for one more."""
        if self.waiting >= self.settings.max_queued_jobs:
            raise TooManyError(
                "queued_jobs",
                f"{self.settings.max_queued_jobs} jobs of this key wait or run, and no more may. Maybe cancel some.",
                ASK_AGAIN_S,
            )
        if self.submitted >= self.settings.max_submissions_a_minute:
            raise TooManyError(
                "submissions",
                f"this key submitted {self.submitted} jobs in the last minute, and no more are allowed.",
                max(1.0, self.next_in_s),
            )

    def take(self, job: Job) -> None:
        """Count a job that was just taken in."""
        self.submitted += 1
        self.waiting += not job.ended


def _counts(of_owner: ColumnElement[bool]) -> Statement:
    waiting = select(func.count()).select_from(jobs).where(of_owner, jobs.c.queue_id.is_not(None)).scalar_subquery()
    oldest = func.min(jobs.c.submitted_at)
    next_in_s = func.coalesce(cast(func.extract("epoch", oldest + MINUTE - func.now()), Double), 0.0)
    counts = select(waiting.label("waiting"), func.count().label("submitted"), next_in_s.label("next_in_s"))
    return Statement(counts.where(of_owner, jobs.c.submitted_at > func.now() - MINUTE))


_OF_KEY, _OF_NOBODY = _counts(jobs.c.owner == bindparam("owner")), _counts(jobs.c.owner.is_(None))
_LOCK = Statement(select(func.pg_advisory_xact_lock(func.hashtextextended(bindparam("name", type_=Text), 0))))


async def room_of(connection: AsyncConnection, settings: Settings, owner: UUID | None) -> Room:
    """What an owner has now. From here to the end of the transaction nobody else, in no process, submits for it."""
    await _LOCK.all(connection, name=f"submit {owner}")
    (row,) = await (_OF_NOBODY if owner is None else _OF_KEY).all(connection, owner=owner)
    return Room(settings, row.waiting, row.submitted, row.next_in_s)
