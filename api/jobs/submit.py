"""Job submission: answered from a known solution or queued, within the owner's limits, idempotent by key."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID, uuid4

from psycopg.types.json import Jsonb
from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Double,
    FromClause,
    Insert,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    true,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.errors import DatabaseGoneError, IdempotencyMismatchError, JobError, TooManyError
from api.jobs import queries, queue, results
from api.jobs.database import Statement, for_reading, transaction
from api.jobs.records import Job, JobConfig, JobKind, Submission, SubmissionRate, is_printable
from api.jobs.results import Answer, Built, Equality
from api.jobs.tables import documents, events, idempotency_keys, incumbents, jobs, schedules, submissions
from api.settings import Settings
from optpipe.problem import Objective, Problem
from solver.cache import rebuild_schedule, text_digest
from solver.layout.plan_process import FoundPlan


class Submissions:
    """Submissions of one process, batched by owner."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._reading = for_reading(engine)
        self._commits = GroupCommit(self._insert_all)

    async def submit(self, request: Request) -> Submission:
        """See `Store.submit`."""
        return await self._commits.run(request.owner, await self._prepared(request))

    async def submit_all(self, requests: Sequence[Request]) -> list[Submission]:
        """Submit jobs of one owner, all or none. Raises as `submit`."""
        prepared = [await self._prepared(request) for request in requests]
        async with transaction(self._engine) as connection:
            usage = await load_usage(connection, self._settings, requests[0].owner)
            inserted = [await _insert_job(connection, usage, each) for each in prepared]
            await usage.store(connection)
            return inserted

    async def _prepared(self, request: Request) -> _Prepared:
        """A request with the stored answer to this very problem, or with one written now from the solution of an equal
        problem, if there is any."""
        async with transaction(self._reading) as connection:
            known = await results.find_answer(connection, request.problem.digest, request.config)
        if known is not None:
            return _Prepared(request, known)
        equality = await request.problem.equality()
        async with transaction(self._reading) as connection:
            row = await results.find_solution(connection, equality.key)
        unanswered = _Prepared(request, equality_key=equality.key)
        if row is None:
            return unanswered
        bound_us = row.bound * equality.time_us
        built = await request.problem.build(row.orders, bound_us, row.method, row.solve_seconds)
        if built is None or not results.is_good_enough(built, row, request.config):
            return unanswered
        async with transaction(self._engine) as connection:
            answer = await results.write_answer(connection, row, request.problem.digest, built)
        return replace(unanswered, answer=answer)

    async def _insert_all(self, owner: UUID | None, batch: Sequence[_Prepared]) -> list[Submission | Exception]:
        """Insert a batch of one owner in one transaction. A refused one does not hold up the others."""
        async with transaction(self._engine) as connection:
            usage = await load_usage(connection, self._settings, owner)
            inserted: list[Submission | Exception] = []
            for prepared in batch:
                try:
                    inserted.append(await _insert_job(connection, usage, prepared))
                except JobError as error:  # raised before anything was written
                    inserted.append(error)
            await usage.store(connection)
            return inserted


async def _insert_job(connection: AsyncConnection, usage: OwnerUsage, prepared: _Prepared) -> Submission:
    """Insert a job: queued, or already finished from a cached result. Raises TooManyError, IdempotencyMismatchError."""
    request, answer = prepared.request, prepared.answer
    earlier = await _find_idempotent(connection, request)
    if earlier is not None:
        return Submission(earlier, created=False, rate=usage.rate())
    usage.check(len(request.problem.text.encode()))
    job_id = uuid4()
    values = {
        "id": job_id,
        "owner": request.owner,
        "kind": request.problem.kind,
        "problem": request.problem.text,
        "problem_name": _storable(request.problem.name),
        "objective": request.problem.objective,
        "devices": request.problem.devices,
        "stages": request.problem.stages,
        "microbatches": request.problem.microbatches,
        "config": Jsonb(request.config.model_dump(mode="json")),
        "tags": list(request.config.tags),
    }
    row = None
    if answer is not None:  # no row comes back where its document is no longer kept
        given = {**vars(answer), "reason": answer.status, "stopped_by": results.stop_reason(answer, request.config)}
        row = await _ANSWERED.one_or_none(connection, **values, **given)
    if row is not None:
        job = queries.job_from_row(row)
    else:
        queue_id = await queue.enqueue(connection, job_id, request.owner, request.config.priority)
        row = await _QUEUED.one_or_none(connection, **values, queue_id=queue_id, equality=prepared.equality_key)
        job = queries.job_from_row(row, row.queue_place)
    usage.add(waits=not job.ended, stored_bytes=row.stored_bytes)
    if request.idempotency_key is not None:
        used = {"owner": request.owner, "key": request.idempotency_key, "body_hash": request.body_hash}
        await connection.execute(insert(idempotency_keys).values(job_id=job.id, **used))
    return Submission(job, created=True, rate=usage.rate())


async def _find_idempotent(connection: AsyncConnection, request: Request) -> Job | None:
    """Job that was submitted with this Idempotency-Key. Raises IdempotencyMismatchError."""
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
    return await queries.job(connection, row.job_id, request.owner)


class SubmittedProblem(ABC):
    """A problem as it is stored, and the work on it that takes longer than an event loop may wait.

    `text` is the problem's JSON, `digest` the `text_digest` of it.
    """

    kind: JobKind = "solve"
    text: str
    digest: bytes
    name: str
    objective: Objective
    devices: int
    stages: int | None
    microbatches: int | None

    @abstractmethod
    async def equality(self) -> Equality:
        """Equality key of the problem."""

    @abstractmethod
    async def build(self, orders: str, bound_us: float, method: str, solve_seconds: float) -> Built | None:
        """Schedule of the stored orders of an equal problem; None where they are not valid for this one."""


class ParsedProblem(SubmittedProblem):
    """A problem that was parsed in this process, where threads do the work."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.text, self.name, self.objective = problem.to_json(), problem.name, problem.objective
        self.digest = text_digest(self.text.encode())
        self.devices, self.stages = len(problem.devices), len(problem.stages)
        self.microbatches = problem.microbatches

    async def equality(self) -> Equality:
        """See `SubmittedProblem.equality`."""
        return await asyncio.to_thread(Equality.of, self._problem)

    async def build(self, orders: str, bound_us: float, method: str, solve_seconds: float) -> Built | None:
        """See `SubmittedProblem.build`."""

        def build() -> Built | None:
            schedule = rebuild_schedule(self._problem, orders, bound_us, method, solve_seconds)
            return Built.of(schedule) if schedule else None

        return await asyncio.to_thread(build)


class SubmittedPlan(SubmittedProblem):
    """The request of a plan, in the place of a problem: `devices` are its GPUs. `key`: its equality key."""

    kind = "plan"
    objective = "makespan"
    stages = microbatches = None

    def __init__(self, text: str, key: str, name: str, gpus: int) -> None:
        self.text, self.digest, self._key = text, text_digest(text.encode()), key
        self.name, self.devices = name, gpus

    async def equality(self) -> Equality:
        """See `SubmittedProblem.equality`."""
        return Equality(self._key, 1.0)

    async def build(self, orders: str, bound_us: float, method: str, solve_seconds: float) -> Built:  # noqa: ARG002
        """The stored plan of an equal request, as it is."""
        return await asyncio.to_thread(lambda: Built.of(FoundPlan.of_text(orders, solve_seconds)))


@dataclass(frozen=True)
class Request:
    """A job to be submitted. `body_hash` is a digest of the parsed body."""

    problem: SubmittedProblem
    config: JobConfig
    owner: UUID | None
    idempotency_key: str | None
    body_hash: bytes


@dataclass(frozen=True)
class _Prepared:
    """A request with what is known of its problem: an answer to it, or else its equality key."""

    request: Request
    answer: Answer | None = None
    equality_key: str | None = None


def _storable(name: str) -> str:
    """A name as PostgreSQL can hold it; the problem itself keeps what it was given."""
    return "".join(character if is_printable(character) else "\N{REPLACEMENT CHARACTER}" for character in name)


_GIVEN = (
    "id",
    "owner",
    "kind",
    "problem",
    "problem_name",
    "objective",
    "devices",
    "stages",
    "microbatches",
    "config",
    "tags",
)


def _queued() -> Statement:
    """The row of a job that waits, and its event."""
    new = _given(*_GIVEN, "queue_id", "equality") | {"status": literal("queued"), "revision": literal(1)}
    job = insert(jobs).values(new).returning(*queries.SHOWN).cte("job")
    return Statement(select(job, queue.place(job)).add_cte(_event(job, job)))


def _answered() -> Statement:
    """The row of a job that is done as it comes, its event, and links to the schedule that answers it. No row comes
    back where there is no such document."""
    document = (
        select(documents.c.digest, func.octet_length(documents.c.text).label("bytes"))
        .where(documents.c.digest == bindparam("document"))
        .with_for_update(read=True, key_share=True)  # it is not removed meanwhile
        .cte("document")
    )
    best = {name: cast(bindparam(name), Double) for name in ("value_us", "bound_us")}
    done = {"status": literal("succeeded"), "revision": literal(1), "finished_at": func.now()}
    done |= {"bubble": cast(bindparam("bubble"), Double), "schedule_bytes": document.c.bytes}
    new = _given(*_GIVEN, "reason", "stopped_by") | done | best
    job = _insert(jobs, document, **new).returning(*queries.SHOWN).cte("job")
    both = job.join(document, true())
    of_job = {"job_id": job.c.id, "revision": job.c.revision}
    found = best | {"method": cast(bindparam("method"), Text), "seconds": cast(bindparam("solve_seconds"), Double)}
    orders = cast(bindparam("orders"), Text)
    return Statement(
        select(job).add_cte(
            _event(job, both, **found),
            _insert(incumbents, both, attempt=job.c.attempt, orders=orders, **of_job, **found).cte("incumbent"),
            _insert(schedules, both, document=document.c.digest, **of_job).cte("schedule"),
        )
    )


def _given(*names: str) -> dict[str, ColumnElement[Any]]:
    """Parameters of these names, for columns of `jobs`."""
    return {name: bindparam(name, type_=jobs.c[name].type) for name in names}


def _event(job: CTE, source: FromClause, **found: ColumnElement[Any]) -> CTE:
    """The first event of a new job. Nobody follows the job yet, so nobody is notified: transactions that notify are
    committed one after the other. `Store.submit` tells those who follow all jobs of the owner."""
    of_job = {"job_id": job.c.id} | {name: job.c[name] for name in ("revision", "attempt", "status")}
    return _insert(events, source, kind=literal("status"), **of_job, **found).cte("event")


def _insert(table: Table, source: FromClause, **values: Any) -> Insert:
    """A row of `table` for each of `source`."""
    return insert(table).from_select(list(values), select(*values.values()).select_from(source))


_QUEUED = _queued()
_ANSWERED = _answered()


MINUTE = timedelta(minutes=1)
ASK_AGAIN_S = 5.0
"""Retry-After where too many jobs wait: by then some have ended."""
FULL_S = 60.0
"""Retry-After where too much is stored: old jobs are removed once a minute."""


@dataclass
class OwnerUsage:
    """Current usage of one owner, against the limits."""

    settings: Settings
    owner: UUID | None
    waiting: int
    stored_bytes: int
    submitted: int
    next_in_s: float
    """Seconds until the oldest submission of the last minute no longer counts."""
    added: int = 0
    """Submissions of this transaction."""

    def check(self, more_bytes: int = 0) -> None:
        """Raise TooManyError where there is no room for one more, of so many bytes."""
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
        if self.stored_bytes + more_bytes > self.settings.max_stored_bytes:
            raise TooManyError(
                "stored_bytes",
                f"the jobs of this key take {self.stored_bytes:,} bytes, and with {more_bytes:,} more they would take "
                f"more than {self.settings.max_stored_bytes:,} (max_stored_bytes). Maybe remove some of them.",
                FULL_S,
            )

    def rate(self) -> SubmissionRate:
        """The owner's limit of submissions, those left, and the seconds until the next."""
        most = self.settings.max_submissions_a_minute
        return SubmissionRate(most, max(0, most - self.submitted), max(0.0, self.next_in_s))

    def add(self, *, waits: bool, stored_bytes: int = 0) -> None:
        """Count a job that was just inserted or queued again."""
        self.added += 1
        self.submitted += 1
        self.next_in_s = self.next_in_s or MINUTE.total_seconds()
        self.waiting += waits
        self.stored_bytes += stored_bytes

    async def store(self, connection: AsyncConnection) -> None:
        """Store how many were added, apart from the jobs, which may be removed or tried again within the minute."""
        if self.added:
            same_owner = submissions.c.owner.is_not_distinct_from(self.owner)
            old = delete(submissions).where(same_owner, submissions.c.at <= func.now() - MINUTE).cte("old")
            await connection.execute(insert(submissions).values(owner=self.owner, count=self.added).add_cte(old))


def _counts(owned: bool) -> Statement:
    def of_owner(column: ColumnElement[Any]) -> ColumnElement[bool]:
        return column == bindparam("owner") if owned else column.is_(None)

    waits = jobs.c.queue_id.is_not(None)
    waiting = select(func.count()).select_from(jobs).where(of_owner(jobs.c.owner), waits)
    stored = select(func.coalesce(cast(func.sum(jobs.c.stored_bytes), BigInteger), 0)).where(of_owner(jobs.c.owner))
    submitted = func.coalesce(func.sum(submissions.c.count), 0)
    next_in_s = cast(func.extract("epoch", func.min(submissions.c.at) + MINUTE - func.now()), Double)
    counts = select(
        waiting.scalar_subquery().label("waiting"),
        stored.scalar_subquery().label("stored_bytes"),
        submitted.label("submitted"),
        func.coalesce(next_in_s, 0.0).label("next_in_s"),
    )
    return Statement(counts.where(of_owner(submissions.c.owner), submissions.c.at > func.now() - MINUTE))


_OF_KEY, _OF_NOBODY = _counts(owned=True), _counts(owned=False)
_LOCK = Statement(select(func.pg_advisory_xact_lock(func.hashtextextended(bindparam("name", type_=Text), 0))))


async def load_usage(connection: AsyncConnection, settings: Settings, owner: UUID | None) -> OwnerUsage:
    """Usage of an owner. Locks out other submissions of this owner, in all processes, until the transaction ends."""
    await _LOCK.all(connection, name=f"submit {owner}")
    (row,) = await (_OF_NOBODY if owner is None else _OF_KEY).all(connection, owner=owner)
    return OwnerUsage(settings, owner, row.waiting, row.stored_bytes, row.submitted, row.next_in_s)


Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_PER_COMMIT = 32
"""Most items of one transaction."""


class GroupCommit(Generic[Item, Result]):
    """Group commit: batches concurrent items of one owner into one call of `commit`.

    Items that come while a batch of their owner is being committed form the next batch. `commit` returns a result for
    each item, in order; a result that is an exception is raised to its caller. Use it from one event loop.
    """

    def __init__(
        self, commit: Callable[[UUID | None, Sequence[Item]], Awaitable[Sequence[Result | Exception]]]
    ) -> None:
        self._commit = commit
        self._waiting: dict[UUID | None, list[tuple[Item, asyncio.Future[Result]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, owner: UUID | None, item: Item) -> Result:
        """Commit an item with others of its owner; its result."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if owner in self._waiting:
            self._waiting[owner].append((item, future))
        else:
            self._waiting[owner] = [(item, future)]
            task = asyncio.create_task(self._commit_all(owner), name="group commit")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _commit_all(self, owner: UUID | None) -> None:
        """Commit batches until no item of this owner waits."""
        waiting = self._waiting[owner]
        while waiting:
            batch, waiting[:MOST_PER_COMMIT] = waiting[:MOST_PER_COMMIT], []
            results = await self._commit_batch(owner, [item for item, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # its caller was cancelled
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
        del self._waiting[owner]

    async def _commit_batch(self, owner: UUID | None, items: Sequence[Item]) -> Sequence[Result | Exception]:
        """Commit a batch. One that fails is committed item by item, so that an item fails alone."""
        try:
            return await self._commit(owner, items)
        except DatabaseGoneError as error:
            return [error] * len(items)
        except Exception as error:
            if len(items) == 1:
                return [error]
            return [result for item in items for result in await self._commit_batch(owner, [item])]
