"""Job store of the routes: one object per process, safe for concurrent tasks of its event loop.

Every method raises DatabaseGoneError where the database does not answer within seconds. `owner` is the id of the
caller's key, None where none is asked for; a job of another owner is not there.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self
from uuid import UUID, uuid4

from sqlalchemy import bindparam, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from api.errors import ConflictError, DatabaseGoneError, NotFoundError
from api.jobs import queries, queue, results
from api.jobs.database import Listener, Statement, for_reading, make_engine, transaction
from api.jobs.migrate import head_revision
from api.jobs.queries import CANCEL, CHANGED, change_job, notify
from api.jobs.records import ApiKey, BestSchedule, Counts, Event, Job, JobConfig, NewApiKey, Page, Status, Submission
from api.jobs.submit import Request, Submissions, load_usage
from api.jobs.tables import api_keys, jobs, schedules
from api.settings import Settings
from optpipe.errors import InputError, Issue
from optpipe.problem import Problem

LOOK_AGAIN_S = 5.0
"""Those who wait for an event look by themselves so often, in case that nobody could tell them."""


class Store:
    """Access to the jobs in a database. As an async context it connects when needed and closes at the end."""

    def __init__(self, settings: Settings) -> None:
        """`settings.database_url` must be given: whoever starts the service has an embedded server running by now."""
        assert settings.database_url is not None
        url = settings.database_url.get_secret_value()
        self.settings = settings
        self._engine = make_engine(url)
        self._reading = for_reading(self._engine)
        self._submissions = Submissions(self._engine, settings)
        self._waiting: defaultdict[UUID, set[asyncio.Event]] = defaultdict(set)
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
        problem: Problem,
        config: JobConfig,
        owner: UUID | None = None,
        idempotency_key: str | None = None,
        body_hash: bytes = b"",
    ) -> Submission:
        """Queue a job; or, where an equal problem was solved at least as well, record it as done with that schedule.

        The same `idempotency_key` (at most 200 characters, of one owner) gives the same job. `body_hash` is a digest
        of the parsed body. Raises IdempotencyMismatchError, TooManyError.
        """
        return await self._submissions.submit(Request(problem, config, owner, idempotency_key, body_hash))

    async def get(self, job_id: UUID, owner: UUID | None = None) -> Job:
        """The job. Raises NotFoundError."""
        async with transaction(self._reading) as connection:
            return await queries.job(connection, job_id, owner)

    async def problem(self, job_id: UUID, owner: UUID | None = None) -> Problem:
        """The problem of a job. Raises NotFoundError."""
        async with transaction(self._reading) as connection:
            found = await queries.problem_text(connection, job_id, owner)
        return await asyncio.to_thread(Problem.from_json, found)

    async def list_jobs(
        self,
        owner: UUID | None = None,
        status: Status | None = None,
        tag: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """At most `limit` jobs, newest first, from where the cursor's page ended. Raises BadCursorError."""
        async with transaction(self._reading) as connection:
            return await queries.page(connection, owner, status, tag, limit, cursor)

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
                await notify(connection, CANCEL, job_id)
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
            await notify(connection, CHANGED, job_id)

    async def retry(self, job_id: UUID, owner: UUID | None = None) -> Job:
        """Queue an ended job again; it begins from its best schedule. Raises NotFoundError, TooManyError;
        ConflictError where it has not ended."""
        async with transaction(self._engine) as connection:
            job = await queries.locked(connection, job_id, owner)
            if job.finished_at is None:
                raise ConflictError(f"job {job_id} is {job.status}, and only one that has ended can be tried again.")
            (await load_usage(connection, self.settings, owner)).check()
            await connection.execute(schedules.delete().where(schedules.c.job_id == job_id))
            queue_id = await queue.enqueue(connection, job_id, job.config["priority"])
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
        with self._told(job_id) as told:
            while True:
                told.clear()
                async with transaction(self._reading) as connection:
                    found = await queries.events_after(connection, job_id, owner, after)
                left_s = until - time.monotonic()
                if found or left_s <= 0:
                    return found
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_AGAIN_S)):
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
        """Return once the database has answered, at this program's revision of the tables."""
        async with transaction(self._reading) as connection:
            there = await connection.execute(text("SELECT to_regclass('alembic_version') IS NOT NULL"))
            found = (
                await connection.execute(text("SELECT version_num FROM alembic_version")) if there.scalar() else None
            )
            revision = found.scalar() if found else None
        if revision != head_revision():
            raise DatabaseGoneError(
                f"the database is at revision {revision}, and this program needs {head_revision()}. "
                "Maybe another version of the service has just been started on it."
            )

    async def counts(self) -> Counts:
        """Figures for metrics."""
        async with transaction(self._reading) as connection:
            return await queries.counts(connection)

    async def create_key(self, name: str) -> NewApiKey:
        """A new bearer key; only a hash of it is stored. Raises InputError for a name that cannot be shown."""
        async with transaction(self._engine) as connection:
            return await create_key(connection, name)

    async def list_keys(self) -> list[ApiKey]:
        """All keys, oldest first, revoked ones too."""
        async with transaction(self._reading) as connection:
            return await list_keys(connection)

    async def revoke_key(self, key_id: UUID) -> ApiKey:
        """Make a key useless from now on. Its jobs stay. Raises NotFoundError."""
        async with transaction(self._engine) as connection:
            return await revoke_key(connection, key_id)

    async def verify_key(self, secret: str) -> ApiKey | None:
        """The key that a caller sent, if it is one and is not revoked; compared in constant time."""
        async with transaction(self._reading) as connection:
            return await verify_key(connection, secret)

    @contextmanager
    def _told(self, job_id: UUID) -> Iterator[asyncio.Event]:
        """An event that is set whenever something happens to the job."""
        told = asyncio.Event()
        self._waiting[job_id].add(told)
        try:
            yield told
        finally:
            self._waiting[job_id].discard(told)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    def _changed(self, payload: str) -> None:
        for told in self._waiting.get(UUID(payload), ()):
            told.set()

    def _anything_changed(self) -> None:
        for waiting in self._waiting.values():
            for told in waiting:
                told.set()


_SECRET = re.compile(r"optpipe_([0-9a-f]{32})_[A-Za-z0-9_-]{43}", re.ASCII)
_NO_HASH = bytes(32)

LONGEST_NAME = 200


async def create_key(connection: AsyncConnection, name: str) -> NewApiKey:
    """Make a key and store its hash. Raises InputError for a name that cannot be shown."""
    if not name.isprintable() or not 1 <= len(name) <= LONGEST_NAME:
        detail = f"is {name!r:.80} but must be 1 to {LONGEST_NAME} characters that can be shown."
        raise InputError([Issue("name", "bad_name", detail)])
    key_id = uuid4()
    secret = f"optpipe_{key_id.hex}_{secrets.token_urlsafe(32)}"
    made = insert(api_keys).values(id=key_id, name=name, hash=_hash(secret)).returning(api_keys)
    return NewApiKey(_key((await connection.execute(made)).one()), secret)


async def list_keys(connection: AsyncConnection) -> list[ApiKey]:
    """All keys, oldest first."""
    return [_key(row) for row in await connection.execute(select(api_keys).order_by(api_keys.c.created_at))]


async def revoke_key(connection: AsyncConnection, key_id: UUID) -> ApiKey:
    """End a key. Raises NotFoundError."""
    ended = func.coalesce(api_keys.c.revoked_at, func.now())
    revoked = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=ended).returning(api_keys)
    row = (await connection.execute(revoked)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no key {key_id}. Maybe see 'optpipe keys list'.")
    return _key(row)


_KEY = Statement(select(api_keys).where(api_keys.c.id == bindparam("key_id")))


async def verify_key(connection: AsyncConnection, secret: str) -> ApiKey | None:
    """The key of a secret, if there is one that is not revoked. How long it takes says nothing about the secret."""
    match = _SECRET.fullmatch(secret)
    key_id = UUID(match[1]) if match else UUID(int=0)
    row = await _KEY.one_or_none(connection, key_id=key_id)
    same = hmac.compare_digest(row.hash if row else _NO_HASH, _hash(secret))
    return _key(row) if row is not None and same and row.revoked_at is None else None


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def _key(row: Any) -> ApiKey:
    return ApiKey(row.id, row.name, row.created_at, row.revoked_at)
