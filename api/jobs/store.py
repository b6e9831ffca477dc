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
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Double, bindparam, cast, func, insert, literal, select, text, tuple_, update

from api.errors import BadCursorError, ConflictError, DatabaseGoneError, KeyEndedError, NotFoundError
from api.jobs import feed, queries, queue, results
from api.jobs.database import OUTAGE, Listener, Statement, for_reading, make_engine, transaction
from api.jobs.feed import FeedBatch, FeedPosition
from api.jobs.migrate import head_revision
from api.jobs.queries import CANCEL, CHANGED, change_job, notify
from api.jobs.records import (
    STATUSES,
    ApiKey,
    BestRevision,
    BestSchedule,
    Counts,
    Event,
    Job,
    JobConfig,
    JobKind,
    JobLabels,
    NewApiKey,
    Page,
    Scope,
    Sort,
    Status,
    Submission,
    is_printable,
)
from api.jobs.rounds import Rounds
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
        """Waiters for a change of a job, by its id, or of any job of an owner, by the owner's."""
        self._job_events = Rounds(self._read_job_events)
        self._owner_events = Rounds(self._read_owner_events)
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
        return await self.submit_request(Request(submitted, config, owner, idempotency_key, body_hash))

    async def submit_request(self, request: Request) -> Submission:
        """See `submit`."""
        submission = await self._submissions.submit(request)
        if submission.created:
            self._changed(str(request.owner))
        return submission

    async def submit_all(self, requests: Sequence[Request]) -> list[Submission]:
        """Like `submit` for several jobs of one owner, all or none of which are submitted."""
        submissions = await self._submissions.submit_all(requests)
        if any(submission.created for submission in submissions):
            self._changed(str(requests[0].owner))
        return submissions

    async def owner_of(self, job_id: UUID) -> UUID | None:
        """The owner of a job, whoever asks. Raises NotFoundError."""
        async with transaction(self._reading) as connection:
            row = (await connection.execute(select(jobs.c.owner).where(jobs.c.id == job_id))).one_or_none()
        if row is None:
            raise queries.not_found(job_id)
        owner: UUID | None = row.owner
        return owner

    async def get(self, job_id: UUID, owner: UUID | None = None) -> Job:
        """The job. Raises NotFoundError."""
        async with transaction(self._reading) as connection:
            return await queries.job(connection, job_id, owner)

    async def problem_text(self, job_id: UUID, owner: UUID | None = None, kind: JobKind = "solve") -> str:
        """The problem of a job as it was submitted (`optpipe.problem/1`), or the request of a plan.

        Raises NotFoundError, also for a job of the other kind.
        """
        async with transaction(self._reading) as connection:
            query = select(jobs.c.problem).where(queries.OWNED, jobs.c.kind == kind)
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
        *,
        kind: JobKind | None = None,
        name: str = "",
        submitted_after: datetime | None = None,
        submitted_before: datetime | None = None,
        sort: Sort = "-submitted_at",
        count: bool = False,
        all_keys: bool = False,
    ) -> Page:
        """At most `limit` jobs in the order of `sort`, from where the cursor's page ended. Raises BadCursorError.

        `kind`: of this one alone. `name`: part of it, in either case. `count`: also how many
        there are on all pages. `all_keys`: of all owners.
        """
        places = queue.places()
        query = (
            select(*queries.SHOWN, places.c.place.label("queue_place"))
            .select_from(jobs.outerjoin(places, places.c.id == jobs.c.queue_id))
            .limit(limit + 1)
        )
        if not is_printable(tag or "") or not is_printable(name):
            return Page([], None, 0 if count else None)  # no job can have it, and PostgreSQL refuses such text
        wanted = [] if all_keys else [queries.of_owner(owner)]
        if kind is not None:
            wanted.append(jobs.c.kind == kind)
        if status is not None:
            wanted.append(jobs.c.status == status)
        if tag is not None:
            wanted.append(jobs.c.tags.contains([tag]))
        if name:
            wanted.append(func.strpos(func.lower(_NAME), name.lower()) > 0)
        if submitted_after is not None:
            wanted.append(jobs.c.submitted_at >= submitted_after)
        if submitted_before is not None:
            wanted.append(jobs.c.submitted_at < submitted_before)
        descending = sort.startswith("-")
        key, is_type = _SORTED_BY[sort.removeprefix("-")]
        if key is not jobs.c.submitted_at and key is not _NAME:  # jobs that have none come last
            key = func.coalesce(key, literal(float("-inf" if descending else "inf"), Double))
        order = (key.desc(), jobs.c.id.desc()) if descending else (key, jobs.c.id)
        query = query.add_columns(key.label("sort_key")).where(*wanted).order_by(*order)
        if cursor is not None:
            place = tuple_(*(literal(value) for value in _read_cursor(cursor, sort, is_type)))
            here = tuple_(key, jobs.c.id)
            query = query.where(here < place if descending else here > place)
        async with transaction(self._reading) as connection:
            rows = (await connection.execute(query)).all()
            total = (await connection.execute(select(func.count()).where(*wanted))).scalar_one() if count else None
        listed = [queries.job_from_row(row, row.queue_place) for row in rows[:limit]]
        if len(rows) <= limit:
            return Page(listed, None, total)
        last = rows[limit - 1]
        value = last.sort_key.isoformat() if is_type is datetime else last.sort_key
        text = json.dumps([sort, value, str(last.id)])
        return Page(listed, base64.urlsafe_b64encode(text.encode()).decode(), total)

    async def rename(self, job_id: UUID, labels: JobLabels, owner: UUID | None = None) -> Job:
        """Change name, tags and note of a job, where given. Raises NotFoundError."""
        async with transaction(self._engine) as connection:
            job = await queries.locked(connection, job_id, owner)
            given = {"name": labels.name, "tags": labels.tags}
            config = job.config | {field: value for field, value in given.items() if value is not None}
            changed = update(jobs).where(jobs.c.id == job_id).values(config=config, tags=config["tags"])
            if labels.note is not None:
                changed = changed.values(note=labels.note)
            await connection.execute(changed)
            return await queries.job(connection, job_id, owner)

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

    async def retry(self, job_id: UUID, owner: UUID | None = None) -> Submission:
        """Queue an ended job again; it begins from its best schedule, and counts as a submission.

        Raises NotFoundError, TooManyError; ConflictError where it has not ended.
        """
        async with transaction(self._engine) as connection:
            job = await queries.locked(connection, job_id, owner)
            if job.finished_at is None:
                raise ConflictError(f"job {job_id} is {job.status}, and only one that has ended can be tried again.")
            usage = await load_usage(connection, self.settings, owner)
            usage.check()
            await connection.execute(schedules.delete().where(schedules.c.job_id == job_id))
            queue_id = await queue.enqueue(connection, job_id, owner, job.config["priority"])
            await change_job(connection, job_id, "status", queue_id=queue_id, **queries.AS_NEW)
            usage.add(waits=True)
            await usage.store(connection)
            return Submission(await queries.job(connection, job_id, owner), created=False, rate=usage.rate())

    async def best_plan(self, job_id: UUID, owner: UUID | None = None, part: int = 0) -> BestSchedule:
        """The document of the best plan so far, or its schedule number `part` from 1. Raises NotFoundError,
        NoScheduleError."""
        async with transaction(self._reading) as connection:
            return await results.best_plan(connection, job_id, owner, part)

    async def best_revision(self, job_id: UUID, owner: UUID | None = None) -> BestRevision:
        """Revision of the best schedule so far. Raises NotFoundError, NoScheduleError."""
        async with transaction(self._reading) as connection:
            return await results.best_revision(connection, job_id, owner)

    async def best_schedule(
        self, job_id: UUID, owner: UUID | None = None, build: results.Build = results.build_in_thread
    ) -> BestSchedule:
        """The best schedule so far, verified; `build` makes one that is not kept. Raises NotFoundError,
        NoScheduleError."""
        async with transaction(self._reading) as connection:
            row = await results.best_row(connection, job_id, owner)
        return await results.best_schedule(row, job_id, build)

    async def events(
        self, job_id: UUID, owner: UUID | None = None, after: int = 0, wait_s: float = 0, key: UUID | None = None
    ) -> list[Event]:
        """The events with a revision above `after`, in order; where there is none yet, wait up to `wait_s` for one.

        The last event of a job that has ended is a terminal `status`. Raises NotFoundError (also for a job that is
        removed meanwhile, or where `key`, with which they are read, is revoked or expired).
        """
        until = time.monotonic() + wait_s
        with self._notified(str(job_id), _revocation(key)) as changed:
            while True:
                changed.clear()
                newer = await self._job_events.ask((job_id, owner, key), after)
                left_s = until - time.monotonic()
                if newer or left_s <= 0:
                    return newer
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_AGAIN_S)):
                        await changed.wait()

    async def _read_job_events(
        self, subject: tuple[UUID, UUID | None, UUID | None], revisions: Collection[int]
    ) -> dict[int, list[Event]]:
        """The events of a job above each revision. Raises NotFoundError."""
        job_id, owner, key = subject
        async with transaction(self._reading) as connection:
            rows = await _EVENTS.all(connection, job_id=job_id, owner=owner, after=min(revisions), key=key)
        if not rows:
            raise queries.not_found(job_id)
        found = [Event(**row._asdict()) for row in rows if row.revision is not None]
        return {after: [event for event in found if event.revision > after] for after in revisions}

    async def _read_owner_events(
        self, subject: tuple[UUID | None, UUID | None], positions: Collection[FeedPosition]
    ) -> dict[FeedPosition, FeedBatch]:
        """The events of an owner after each position, all up to the same one. Raises NotFoundError."""
        async with transaction(self._reading) as connection:
            return await feed.read(connection, *subject, positions)

    async def newest_position(self) -> FeedPosition:
        """Position after all events so far, for `all_events`."""
        async with transaction(self._reading) as connection:
            return await feed.newest(connection)

    async def all_events(
        self, owner: UUID | None, after: FeedPosition, wait_s: float = 0, key: UUID | None = None
    ) -> FeedBatch:
        """The events of all jobs of an owner after a position; where there is none yet, wait up to `wait_s` for one.

        Raises NotFoundError where `key`, with which they are read, is revoked or expired.
        """
        until = time.monotonic() + wait_s
        with self._notified(str(owner), _revocation(key)) as changed:
            while True:
                changed.clear()
                batch = await self._owner_events.ask((owner, key), after)
                left_s = until - time.monotonic()
                if batch.events or left_s <= 0:
                    return batch
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_SOON_S if batch.more else LOOK_AGAIN_S)):
                        await changed.wait()

    async def wait_until_ended(
        self, job_id: UUID, owner: UUID | None = None, wait_s: float = 0, key: UUID | None = None
    ) -> Job:
        """The job once it has ended, or as it stands after `wait_s`.

        Raises NotFoundError; KeyEndedError where `key`, with which it is waited for, is revoked or expires.
        """
        until = time.monotonic() + wait_s
        job = await self.get(job_id, owner)
        while not job.ended and (left_s := until - time.monotonic()) > 0:
            try:
                await self.events(job_id, owner, job.revision, left_s, key)
            except NotFoundError:
                await self.get(job_id, owner)  # raises where it is the job that is gone
                raise KeyEndedError(
                    f"this key was revoked or expired while the call waited for job {job_id}. Maybe ask with another."
                ) from None
            job = await self.get(job_id, owner)
        return job

    async def ping(self) -> int:
        """The number of workers that live, if the database answers and its tables are at this program's revision.

        Raises DatabaseGoneError.
        """
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
        async with transaction(self._reading) as connection:
            alive, _ = await queries.count_alive(connection)
        return alive

    async def counts(self) -> Counts:
        """Figures for metrics."""
        async with transaction(self._reading) as connection:
            by_status = await connection.execute(select(jobs.c.status, func.count()).group_by(jobs.c.status))
            counts: dict[Status, int] = {row[0]: row[1] for row in by_status}
            workers = (await connection.execute(select(func.count(jobs.c.worker.distinct())))).scalar_one()
            alive = await queries.count_alive(connection)
            queue_age_s, heartbeat_age_s = await queue.ages_s(connection)
            added = {(row.name, row.label): row.value for row in await connection.execute(select(totals))}
        all_statuses = {status: counts.get(status, 0) for status in STATUSES}
        return Counts(all_statuses, queue_age_s, heartbeat_age_s, workers, *alive, added)

    async def create_key(
        self, name: str, scope: Scope = "submit", owner: UUID | None = None, expires_at: datetime | None = None
    ) -> NewApiKey:
        """A new bearer key; only a hash of it is stored. `owner`: the key whose jobs it is for, by default its own.

        Raises InputError for a name that cannot be shown, NotFoundError for an owner that is none.
        """
        if not is_printable(name) or not 1 <= len(name) <= LONGEST_NAME:
            detail = f"is {name!r:.80} but must be 1 to {LONGEST_NAME} characters that can be shown."
            raise InputError([Issue("name", "bad_name", detail)])
        key_id = uuid4()
        secret = f"optpipe_{key_id.hex}_{secrets.token_urlsafe(32)}"
        values = {"id": key_id, "name": name, "hash": _hash(secret), "scope": scope, "expires_at": expires_at}
        async with transaction(self._engine) as connection:
            if owner is not None:
                first = select(func.coalesce(api_keys.c.owner, api_keys.c.id)).where(api_keys.c.id == owner)
                values["owner"] = (await connection.execute(first)).scalar_one_or_none()
                if values["owner"] is None:
                    raise _no_such_key(owner)
            new = insert(api_keys).values(values).returning(api_keys)
            return NewApiKey(_key((await connection.execute(new)).one()), secret)

    async def list_keys(self) -> list[ApiKey]:
        """All keys, oldest first, revoked ones too."""
        async with transaction(self._reading) as connection:
            return [_key(row) for row in await connection.execute(select(api_keys).order_by(api_keys.c.created_at))]

    async def revoke_key(self, key_id: UUID) -> ApiKey:
        """Revoke a key: its event streams end. Its jobs stay. Raises NotFoundError."""
        ended = func.coalesce(api_keys.c.revoked_at, func.now())
        revoked = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=ended).returning(api_keys)
        async with transaction(self._engine) as connection:
            row = (await connection.execute(revoked)).one_or_none()
            await notify(connection, CHANGED, _revocation(key_id))
        if row is None:
            raise _no_such_key(key_id)
        return _key(row)

    async def verify_key(self, secret: str) -> ApiKey | None:
        """Key of a secret, None if there is none, or it is revoked or expired; its use is noted once a minute.

        The time it takes reveals nothing of the secret.
        """
        match = _SECRET.fullmatch(secret)
        key_id = UUID(match[1]) if match else UUID(int=0)
        async with transaction(self._reading) as connection:
            row = await _KEY.one_or_none(connection, key_id=key_id)
        same = hmac.compare_digest(row.hash if row else _NO_HASH, _hash(secret))
        if row is None or not same or row.ended:
            return None
        if row.last_used_at is None or datetime.now(UTC) - row.last_used_at > NOTED_EVERY:
            used = update(api_keys).where(api_keys.c.id == key_id).values(last_used_at=func.now())
            with suppress(DatabaseGoneError):  # such as a full disk: reading goes on
                async with transaction(self._engine) as connection:
                    await connection.execute(used)
        return _key(row)

    @contextmanager
    def _notified(self, *subjects: str) -> Iterator[asyncio.Event]:
        """An event that is set by every change of a job, or of any job of an owner, or when a key is revoked."""
        changed = asyncio.Event()
        for subject in subjects:
            self._waiting[subject].add(changed)
        try:
            yield changed
        finally:
            for subject in subjects:
                self._waiting[subject].discard(changed)
                if not self._waiting[subject]:
                    del self._waiting[subject]

    def _changed(self, payload: str) -> None:
        for subject in payload.split():
            for changed in self._waiting.get(subject, ()):
                changed.set()

    def _anything_changed(self) -> None:
        for waiting in self._waiting.values():
            for changed in waiting:
                changed.set()


_EVENTS = Statement(
    select(*(events.c[name] for name in Event.__dataclass_fields__))
    .select_from(jobs.outerjoin(events, (events.c.job_id == jobs.c.id) & (events.c.revision > bindparam("after"))))
    .where(queries.OWNED, queries.NOT_ENDED)
    .order_by(events.c.revision)
)
"""Events of a job above a revision: one row of NULLs if there are none, no row if there is no such job."""


def _read_cursor(cursor: str, sort: Sort, is_type: type[Any]) -> tuple[Any, UUID]:
    """Sort value and id of the last job of the page before. Raises BadCursorError."""
    try:
        given_sort, value, job_id = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        value = datetime.fromisoformat(value) if is_type is datetime else value
        last = value, UUID(job_id)
    except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error):
        raise BadCursorError("invalid cursor. Maybe it was truncated.") from None
    if given_sort != sort:
        raise BadCursorError("invalid cursor: it is of a list in another order. Maybe sort was changed between pages.")
    if not isinstance(value, is_type) or (isinstance(value, datetime) and value.tzinfo is None):
        raise BadCursorError("invalid cursor.")
    if isinstance(value, str) and not is_printable(value):
        raise BadCursorError("invalid cursor.")
    return last


_NAME = func.coalesce(func.nullif(jobs.c.config["name"].astext, ""), jobs.c.problem_name)
"""The name that a job is shown with."""


def _epoch_s(time: ColumnElement[Any]) -> ColumnElement[float]:
    return cast(func.extract("epoch", time), Double)


_SORTED_BY: dict[str, tuple[ColumnElement[Any], type[Any]]] = {
    "submitted_at": (jobs.c.submitted_at, datetime),
    "finished_at": (_epoch_s(jobs.c.finished_at), float),
    "duration": (_epoch_s(jobs.c.finished_at - jobs.c.started_at), float),
    "gap": ((jobs.c.value_us - jobs.c.bound_us) / func.nullif(jobs.c.value_us, 0), float),
    "name": (_NAME, str),
}
"""Columns that jobs are sorted by, and the type of each in a cursor."""


_SECRET = re.compile(r"optpipe_([0-9a-f]{32})_[A-Za-z0-9_-]{43}", re.ASCII)
_NO_HASH = bytes(32)

LONGEST_NAME = 200


NOTED_EVERY = timedelta(minutes=1)

_KEY = Statement(select(api_keys, queries.ENDED_KEY.label("ended")).where(api_keys.c.id == bindparam("key_id")))


def _revocation(owner: UUID | None) -> str:
    """Channel on which those who wait on behalf of a key hear that it is revoked."""
    return f"key:{owner}"


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def _key(row: Any) -> ApiKey:
    times = row.created_at, row.expires_at, row.last_used_at, row.revoked_at
    return ApiKey(row.id, row.name, row.scope, row.owner or row.id, *times)


def _no_such_key(key_id: UUID) -> NotFoundError:
    return NotFoundError(f"there is no key {key_id}. Maybe see 'optpipe keys list'.")
