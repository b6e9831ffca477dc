"""Job store of the routes: one object per process, safe for concurrent tasks of its event loop.

Every method raises DatabaseGoneError if the database does not answer within seconds. `owner` is the id of the caller's
key, None where keys are not required; a job of another owner is not found.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from types import TracebackType
from typing import Any, Self
from uuid import UUID, uuid4

from sqlalchemy import bindparam, func, insert, select, text, tuple_, update

from api.errors import BadCursorError, ConflictError, DatabaseGoneError, NotFoundError
from api.jobs import feed, queries, queue, results
from api.jobs.database import OUTAGE, Listener, Statement, for_reading, make_engine, transaction
from api.jobs.feed import FeedBatch, FeedPosition
from api.jobs.migrate import head_revision
from api.jobs.queries import CANCEL, CHANGED, change_job, notify
from api.jobs.records import (
    STATUSES,
    ApiKey,
    BestSchedule,
    Counts,
    Event,
    Job,
    JobConfig,
    NewApiKey,
    Page,
    Status,
    Submission,
)
from api.jobs.submit import ParsedProblem, Request, Submissions, SubmittedProblem, load_usage
from api.jobs.tables import api_keys, events, jobs, schedules, totals
from api.settings import Settings
from optpipe.errors import InputError, Issue
from optpipe.problem import Problem

LOOK_AGAIN_S = 5.0
"""Polling interval of those who wait for an event, for the case that a notification was lost."""

LOOK_SOON_S = 0.05
"""The same for an event that is written, while a transaction that began before it is still running."""


class Store:
    """Access to the jobs in a database. As an async context it connects when needed and closes at the end."""

    def __init__(self, settings: Settings) -> None:
        """`settings.database_url` must be set; an embedded PostgreSQL is started before."""
        assert settings.database_url is not None
        url = settings.database_url.get_secret_value()
        self.settings = settings
        self._engine = make_engine(url)
        self._reading = for_reading(self._engine)
        self._submissions = Submissions(self._engine, settings)
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        """Those who wait for a job to change, by its id, or for any job of an owner, by the owner's."""
        self._listener = Listener(url, {CHANGED: self._changed}, self._anything_changed)

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._listener.__aexit__(kind, error, trace)
        await self._engine.dispose()

    async def submit(
        self,
        problem: Problem | SubmittedProblem,
        config: JobConfig,
        owner: UUID | None = None,
        idempotency_key: str | None = None,
        body_hash: bytes = b"",
    ) -> Submission:
        """Queue a job; or, where an equal problem was solved at least as well, record it as done with that schedule.

        The same `idempotency_key` (at most 200 characters, of one owner) gives the same job. `body_hash` is a digest
        of the parsed body. Raises IdempotencyMismatchError, TooManyError.
        """
        submitted = problem if isinstance(problem, SubmittedProblem) else ParsedProblem(problem)
        submission = await self._submissions.submit(Request(submitted, config, owner, idempotency_key, body_hash))
        if submission.created:
            self._changed(str(owner))
        return submission

    async def get(self, job_id: UUID, owner: UUID | None = None) -> Job:
        """The job. Raises NotFoundError."""
        async with transaction(self._reading) as connection:
            return await queries.job(connection, job_id, owner)

    async def problem_text(self, job_id: UUID, owner: UUID | None = None) -> str:
        """The problem of a job as it was submitted: `optpipe.problem/1`. Raises NotFoundError."""
        async with transaction(self._reading) as connection:
            query = select(jobs.c.problem).where(queries.OWNED)
            problem: str | None = (
                await connection.execute(query, {"job_id": job_id, "owner": owner})
            ).scalar_one_or_none()
        if problem is None:
            raise queries.not_found(job_id)
        return problem

    async def list_jobs(
        self,
        owner: UUID | None = None,
        status: Status | None = None,
        tag: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """At most `limit` jobs, newest first, from where the cursor's page ended. Raises BadCursorError."""
        places = queue.places()
        query = (
            select(*queries.SHOWN, places.c.place.label("queue_place"))
            .select_from(jobs.outerjoin(places, places.c.id == jobs.c.queue_id))
            .where(jobs.c.owner.is_(None) if owner is None else jobs.c.owner == owner)
            .order_by(jobs.c.submitted_at.desc(), jobs.c.id.desc())
            .limit(limit + 1)
        )
        if status is not None:
            query = query.where(jobs.c.status == status)
        if tag is not None and not tag.isprintable():
            return Page([], None)  # no job can have it, and PostgreSQL refuses such text
        if tag is not None:
            query = query.where(jobs.c.tags.contains([tag]))
        if cursor is not None:
            query = query.where(tuple_(jobs.c.submitted_at, jobs.c.id) < _read_cursor(cursor))
        async with transaction(self._reading) as connection:
            rows = (await connection.execute(query)).all()
        listed = [queries.job_from_row(row, row.queue_place) for row in rows[:limit]]
        if len(rows) <= limit:
            return Page(listed, None)
        last = f"{listed[-1].submitted_at.isoformat()} {listed[-1].id}"
        return Page(listed, base64.urlsafe_b64encode(last.encode()).decode())

    async def cancel(self, job_id: UUID, owner: UUID | None = None) -> Job:
        """Cancel a job: at once where it waits, by its worker within a second where it runs; keeps its best schedule.

        The job as it stands is returned (perhaps still running); one that has ended stays as it is.
        Raises NotFoundError.
        """
        async with transaction(self._engine) as connection:
            job = await queries.locked(connection, job_id, owner)
            if job.status == "queued":
                await queue.remove(connection, job.queue_id, "canceled")
                await change_job(connection, job_id, "status", **queries.cancelled(job))
            elif job.status == "running":
                await connection.execute(jobs.update().where(jobs.c.id == job_id).values(cancel_requested=True))
                await notify(connection, CANCEL, str(job_id))
            return await queries.job(connection, job_id, owner)

    async def delete(self, job_id: UUID, owner: UUID | None = None) -> None:
        """Remove a job with all that belongs to it. Raises NotFoundError; ConflictError while it runs."""
        async with transaction(self._engine) as connection:
            job = await queries.locked(connection, job_id, owner)
            if job.status == "running":
                raise ConflictError(f"job {job_id} is running. Maybe cancel it first.")
            if job.queue_id is not None:
                await queue.remove(connection, job.queue_id, "canceled")
            await connection.execute(jobs.delete().where(jobs.c.id == job_id))
            await notify(connection, CHANGED, str(job_id))

    async def retry(self, job_id: UUID, owner: UUID | None = None) -> Job:
        """Queue an ended job again; it begins from its best schedule. Raises NotFoundError, TooManyError;
        ConflictError where it has not ended."""
        async with transaction(self._engine) as connection:
            job = await queries.locked(connection, job_id, owner)
            if job.finished_at is None:
                raise ConflictError(f"job {job_id} is {job.status}, and only one that has ended can be tried again.")
            (await load_usage(connection, self.settings, owner)).check()
            await connection.execute(schedules.delete().where(schedules.c.job_id == job_id))
            queue_id = await queue.enqueue(connection, job_id, owner, job.config["priority"])
            await change_job(connection, job_id, "status", queue_id=queue_id, **queries.AS_NEW)
            return await queries.job(connection, job_id, owner)

    async def best_schedule(self, job_id: UUID, owner: UUID | None = None) -> BestSchedule:
        """The best schedule so far, verified. Raises NotFoundError, NoScheduleError."""
        async with transaction(self._reading) as connection:
            row = await results.best_row(connection, job_id, owner)
        return results.best_schedule(row) if row.document else await asyncio.to_thread(results.best_schedule, row)

    async def events(self, job_id: UUID, owner: UUID | None = None, after: int = 0, wait_s: float = 0) -> list[Event]:
        """The events with a revision above `after`, in order; where there is none yet, wait up to `wait_s` for one.

        The last event of a job that has ended is a terminal `status`. Raises NotFoundError (also for a job that is
        removed meanwhile).
        """
        until = time.monotonic() + wait_s
        with self._told(str(job_id)) as told:
            while True:
                told.clear()
                async with transaction(self._reading) as connection:
                    rows = await _EVENTS.all(connection, job_id=job_id, owner=owner, after=after)
                if not rows:
                    raise queries.not_found(job_id)
                newer = [Event(**row._asdict()) for row in rows if row.revision is not None]
                left_s = until - time.monotonic()
                if newer or left_s <= 0:
                    return newer
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_AGAIN_S)):
                        await told.wait()

    async def newest_position(self) -> FeedPosition:
        """Position after all events so far, for `all_events`."""
        async with transaction(self._reading) as connection:
            return await feed.newest(connection)

    async def all_events(self, owner: UUID | None, after: FeedPosition, wait_s: float = 0) -> FeedBatch:
        """The events of all jobs of an owner after a position; where there is none yet, wait up to `wait_s` for one."""
        until = time.monotonic() + wait_s
        with self._told(str(owner)) as told:
            while True:
                told.clear()
                async with transaction(self._reading) as connection:
                    batch = await feed.read(connection, owner, after)
                left_s = until - time.monotonic()
                if batch.events or left_s <= 0:
                    return batch
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_SOON_S if batch.more else LOOK_AGAIN_S)):
                        await told.wait()

    async def wait_until_ended(self, job_id: UUID, owner: UUID | None = None, wait_s: float = 0) -> Job:
        """The job once it has ended, or as it stands after `wait_s`. Raises NotFoundError."""
        until = time.monotonic() + wait_s
        job = await self.get(job_id, owner)
        while not job.ended and (left_s := until - time.monotonic()) > 0:
            await self.events(job_id, owner, job.revision, left_s)
            job = await self.get(job_id, owner)
        return job

    async def ping(self) -> None:
        """Return if the database answers and its tables are at this program's revision. Raises DatabaseGoneError."""
        async with transaction(self._reading) as connection:
            exists = await connection.execute(text("SELECT to_regclass('alembic_version') IS NOT NULL"))
            revision = None
            if exists.scalar():
                revision = (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar()
        if revision != head_revision():
            raise DatabaseGoneError(
                f"the database is at revision {revision}, and this program needs {head_revision()}. "
                "Maybe another version of the service has just been started on it."
            )
        if OUTAGE.error is not None:  # such as a full disk, which only a write shows
            async with transaction(self._engine) as connection:
                await queries.add_totals(connection, {("probe", ""): 1.0})

    async def counts(self) -> Counts:
        """Figures for metrics."""
        async with transaction(self._reading) as connection:
            by_status = await connection.execute(select(jobs.c.status, func.count()).group_by(jobs.c.status))
            counts: dict[Status, int] = {row[0]: row[1] for row in by_status}
            workers = (await connection.execute(select(func.count(jobs.c.worker.distinct())))).scalar_one()
            queue_age_s, heartbeat_age_s = await queue.ages_s(connection)
            added = {(row.name, row.label): row.value for row in await connection.execute(select(totals))}
        all_statuses = {status: counts.get(status, 0) for status in STATUSES}
        return Counts(all_statuses, queue_age_s, heartbeat_age_s, workers, added)

    async def create_key(self, name: str) -> NewApiKey:
        """A new bearer key; only a hash of it is stored. Raises InputError for a name that cannot be shown."""
        if not name.isprintable() or not 1 <= len(name) <= LONGEST_NAME:
            detail = f"is {name!r:.80} but must be 1 to {LONGEST_NAME} characters that can be shown."
            raise InputError([Issue("name", "bad_name", detail)])
        key_id = uuid4()
        secret = f"optpipe_{key_id.hex}_{secrets.token_urlsafe(32)}"
        new = insert(api_keys).values(id=key_id, name=name, hash=_hash(secret)).returning(api_keys)
        async with transaction(self._engine) as connection:
            return NewApiKey(_key((await connection.execute(new)).one()), secret)

    async def list_keys(self) -> list[ApiKey]:
        """All keys, oldest first, revoked ones too."""
        async with transaction(self._reading) as connection:
            return [_key(row) for row in await connection.execute(select(api_keys).order_by(api_keys.c.created_at))]

    async def revoke_key(self, key_id: UUID) -> ApiKey:
        """Revoke a key. Its jobs stay. Raises NotFoundError."""
        ended = func.coalesce(api_keys.c.revoked_at, func.now())
        revoked = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=ended).returning(api_keys)
        async with transaction(self._engine) as connection:
            row = (await connection.execute(revoked)).one_or_none()
        if row is None:
            raise NotFoundError(f"there is no key {key_id}. Maybe see 'optpipe keys list'.")
        return _key(row)

    async def verify_key(self, secret: str) -> ApiKey | None:
        """Key of a secret, None if there is none or it is revoked. The time it takes reveals nothing of the secret."""
        match = _SECRET.fullmatch(secret)
        key_id = UUID(match[1]) if match else UUID(int=0)
        async with transaction(self._reading) as connection:
            row = await _KEY.one_or_none(connection, key_id=key_id)
        same = hmac.compare_digest(row.hash if row else _NO_HASH, _hash(secret))
        return _key(row) if row is not None and same and row.revoked_at is None else None

    @contextmanager
    def _told(self, subject: str) -> Iterator[asyncio.Event]:
        """An event that is set by every change of a job, or of any job of an owner."""
        told = asyncio.Event()
        self._waiting[subject].add(told)
        try:
            yield told
        finally:
            self._waiting[subject].discard(told)
            if not self._waiting[subject]:
                del self._waiting[subject]

    def _changed(self, payload: str) -> None:
        for subject in payload.split():
            for told in self._waiting.get(subject, ()):
                told.set()

    def _anything_changed(self) -> None:
        for waiting in self._waiting.values():
            for told in waiting:
                told.set()


_EVENTS = Statement(
    select(*(events.c[name] for name in Event.__dataclass_fields__))
    .select_from(jobs.outerjoin(events, (events.c.job_id == jobs.c.id) & (events.c.revision > bindparam("after"))))
    .where(queries.OWNED)
    .order_by(events.c.revision)
)
"""Events of a job above a revision: one row of NULLs if there are none, no row if there is no such job."""


def _read_cursor(cursor: str) -> tuple[datetime, UUID]:
    """Time and id of the last job of the page before. Raises BadCursorError."""
    try:
        at, _, job_id = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().partition(" ")
        last = datetime.fromisoformat(at), UUID(job_id)
    except (ValueError, binascii.Error):
        raise BadCursorError("invalid cursor. Maybe it was truncated.") from None
    if last[0].tzinfo is None:
        raise BadCursorError("invalid cursor.")
    return last


_SECRET = re.compile(r"optpipe_([0-9a-f]{32})_[A-Za-z0-9_-]{43}", re.ASCII)
_NO_HASH = bytes(32)

LONGEST_NAME = 200


_KEY = Statement(select(api_keys).where(api_keys.c.id == bindparam("key_id")))


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def _key(row: Any) -> ApiKey:
    return ApiKey(row.id, row.name, row.created_at, row.revoked_at)
