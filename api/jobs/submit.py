"""Job submission: answered from a known solution or queued, within the owner's limits, idempotent by key."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, TypeVar
from uuid import UUID, uuid4

from psycopg.types.json import Jsonb
from sqlalchemy import (
    CTE,
    ColumnElement,
    Double,
    FromClause,
    Insert,
    Table,
    Text,
    bindparam,
    cast,
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
from api.jobs.records import Job, JobConfig, Limit, Submission
from api.jobs.results import Answer, Equality
from api.jobs.tables import answers, documents, events, idempotency_keys, incumbents, jobs, schedules, solved_problems
from api.settings import Settings
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from solver.methods import METHODS


class Submissions:
    """What takes jobs in, for one process."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._reading = for_reading(engine)
        self._together = GroupCommit(self._take_all)

    async def submit(self, request: Request) -> Submission:
        """See `Store.submit`."""
        return await self._together.ask(request.owner, (request, await self._answer(request)))

    async def _answer(self, request: Request) -> Answer | None:
        """What was written for this very problem, or else is written now for an equal one that was solved."""
        async with transaction(self._reading) as connection:
            known = await results.find_answer(connection, request.digest, request.config)
        if known is not None:
            return known
        equality = await asyncio.to_thread(Equality.of, request.problem)
        async with transaction(self._reading) as connection:
            row = await results.find_solution(connection, equality.key)
        made = await asyncio.to_thread(_made_of, row, equality, request) if row else None
        if row is None or made is None:
            return None
        async with transaction(self._engine) as connection:
            return await results.remember_answer(connection, row, request.digest, *made)

    async def _take_all(
        self, owner: UUID | None, asked: Sequence[tuple[Request, Answer | None]]
    ) -> list[Submission | Exception]:
        """Take in some of one owner's: together, or none of them."""
        async with transaction(self._engine) as connection:
            room = await load_usage(connection, self._settings, owner)
            return [await _taken_or_refused(connection, room, request, answer) for request, answer in asked]


def _made_of(row: Any, equality: Equality, request: Request) -> tuple[Schedule, str] | None:
    """The schedule of an equal problem for this one, and its document; None where it was not solved well enough."""
    schedule = results.build_schedule_of_solution(row, request.problem, equality, request.config)
    return (schedule, schedule_text(schedule)) if schedule else None


async def _taken_or_refused(
    connection: AsyncConnection, room: OwnerUsage, request: Request, answer: Answer | None
) -> Submission | Exception:
    try:
        return await _taken(connection, room, request, answer)
    except JobError as error:  # before anything was written
        return error


async def _taken(connection: AsyncConnection, room: OwnerUsage, request: Request, answer: Answer | None) -> Submission:
    known = await _known(connection, request)
    if known is not None:
        return Submission(known, created=False)
    room.check()
    job = await insert_answered(connection, request, answer) if answer else None
    if job is None:
        job = await insert_queued(connection, request)
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
    return await queries.job(connection, row.job_id, request.owner)


@dataclass(frozen=True)
class Request:
    """A job to be taken in. `body_hash` is a digest of the parsed body."""

    problem: Problem
    config: JobConfig
    owner: UUID | None
    idempotency_key: str | None
    body_hash: bytes

    @cached_property
    def problem_json(self) -> str:
        """The problem as it is stored."""
        return self.problem.to_json()

    @cached_property
    def digest(self) -> bytes:
        """The same for problems that are equal word for word."""
        return hashlib.sha256(self.problem_json.encode()).digest()


async def insert_queued(connection: AsyncConnection, request: Request) -> Job:
    """A job that waits to be solved."""
    asked = _asked(request)
    asked["queue_id"] = await queue.enqueue(connection, asked["id"], request.config.priority)
    row = await _QUEUED.one_or_none(connection, **asked)
    return queries.job_from_row(row, row.queue_place)


async def insert_answered(connection: AsyncConnection, request: Request, answer: Answer) -> Job | None:
    """A job that is done as it comes; None where the answer is no longer the one that is stored."""
    asked = _asked(request) | {"digest": request.digest, "answer": answer.document}
    asked |= {"reason": answer.status, "stopped_by": _stopped_by(answer, request.config)}
    row = await _ANSWERED.one_or_none(connection, **asked)
    return queries.job_from_row(row) if row else None


def _asked(request: Request) -> dict[str, Any]:
    """What a new job's row says of what is asked for, and its id."""
    return {
        "id": uuid4(),
        "owner": request.owner,
        "problem": request.problem_json,
        "problem_name": _shown(request.problem.name),
        "objective": request.problem.objective,
        "config": Jsonb(request.config.model_dump(mode="json")),
        "tags": list(request.config.tags),
    }


def _shown(name: str) -> str:
    """A name as PostgreSQL can hold it; the problem itself keeps what it was given."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)


def _stopped_by(answer: Answer, config: JobConfig) -> Limit | None:
    """What would have ended a solve with this answer."""
    if answer.status == "optimal" or METHODS[config.method].kind == "published":
        return None
    return "gap" if answer.gap <= config.gap else "time"


_ASKED = ("id", "owner", "problem", "problem_name", "objective", "config", "tags")


def _queued() -> Statement:
    """The row of a job that waits, and its event."""
    new = _given(*_ASKED, "queue_id") | {"status": literal("queued"), "revision": literal(1)}
    job = insert(jobs).values(new).returning(*queries.SHOWN).cte("job")
    return Statement(select(job, queue.place(job)).add_cte(_event(job, job)))


def _answered() -> Statement:
    """The row of a job that is done as it comes, its event, and links to the schedule that answers it. No row comes
    back where the answer has changed."""
    answer = (
        select(answers, solved_problems.c.method, solved_problems.c.solve_seconds, solved_problems.c.orders)
        .join(solved_problems, solved_problems.c.key == answers.c.key)
        .join(documents, documents.c.digest == answers.c.document)
        .where(answers.c.problem == bindparam("digest"), answers.c.document == bindparam("answer"))
        .with_for_update(read=True, key_share=True, of=documents)  # which is not removed meanwhile
        .cte("answer")
    )
    best = {"value_us": answer.c.value_us, "bound_us": answer.c.bound_us}
    done = {"status": literal("succeeded"), "revision": literal(1), "finished_at": func.now()}
    new = _given(*_ASKED, "reason", "stopped_by") | done | best
    job = _insert(jobs, answer, **new).returning(*queries.SHOWN).cte("job")
    both = job.join(answer, true())
    of_job = {"job_id": job.c.id, "revision": job.c.revision}
    found = best | {"method": answer.c.method, "seconds": answer.c.solve_seconds}
    return Statement(
        select(job).add_cte(
            _event(job, both, **found),
            _insert(incumbents, both, attempt=job.c.attempt, orders=answer.c.orders, **of_job, **found).cte(
                "incumbent"
            ),
            _insert(schedules, both, document=answer.c.document, **of_job).cte("schedule"),
        )
    )


def _given(*names: str) -> dict[str, ColumnElement[Any]]:
    """Parameters of these names, for columns of `jobs`."""
    return {name: bindparam(name, type_=jobs.c[name].type) for name in names}


def _event(job: CTE, source: FromClause, **found: ColumnElement[Any]) -> CTE:
    """The first event of a new job. Nobody follows it yet, so nobody is told: PostgreSQL lets those that tell commit
    one after the other only."""
    of_job = {"job_id": job.c.id} | {name: job.c[name] for name in ("revision", "attempt", "status")}
    return _insert(events, source, kind=literal("status"), **of_job, **found).cte("event")


def _insert(table: Table, source: FromClause, **values: Any) -> Insert:
    """A row of `table` for each of `source`."""
    return insert(table).from_select(list(values), select(*values.values()).select_from(source))


_QUEUED = _queued()
_ANSWERED = _answered()


MINUTE = timedelta(minutes=1)
ASK_AGAIN_S = 5.0
"""When to try again where too many jobs wait: some will have ended."""


@dataclass
class OwnerUsage:
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


async def load_usage(connection: AsyncConnection, settings: Settings, owner: UUID | None) -> OwnerUsage:
    """What an owner has now. From here to the end of the transaction nobody else, in no process, submits for it."""
    await _LOCK.all(connection, name=f"submit {owner}")
    (row,) = await (_OF_NOBODY if owner is None else _OF_KEY).all(connection, owner=owner)
    return OwnerUsage(settings, row.waiting, row.submitted, row.next_in_s)


Asked = TypeVar("Asked")
Done = TypeVar("Done")

MOST_PER_COMMIT = 32
"""Done in one go."""


class GroupCommit(Generic[Asked, Done]):
    """Whoever asks while others of the same owner are being served waits, and is served with all who wait by then.

    `do` serves some of one owner, in order; its answer for one of them may be an exception, which is raised there. Use
    it from one event loop.
    """

    def __init__(self, do: Callable[[UUID | None, Sequence[Asked]], Awaitable[Sequence[Done | Exception]]]) -> None:
        self._do = do
        self._waiting: dict[UUID | None, list[tuple[Asked, asyncio.Future[Done]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, owner: UUID | None, asked: Asked) -> Done:
        """Have it done."""
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if owner in self._waiting:
            self._waiting[owner].append((asked, done))
        else:
            self._waiting[owner] = [(asked, done)]
            task = asyncio.create_task(self._serve(owner), name="together")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await done

    async def _serve(self, owner: UUID | None) -> None:
        """Until nobody of this owner waits."""
        waiting = self._waiting[owner]
        while waiting:
            now, waiting[:MOST_PER_COMMIT] = waiting[:MOST_PER_COMMIT], []
            answers = await self._answers(owner, [asked for asked, _ in now])
            for (_, done), answer in zip(now, answers, strict=True):
                _tell(done, answer)
        del self._waiting[owner]

    async def _answers(self, owner: UUID | None, asked: Sequence[Asked]) -> Sequence[Done | Exception]:
        try:
            return await self._do(owner, asked)
        except DatabaseGoneError as error:
            return [error] * len(asked)
        except Exception as error:
            if len(asked) == 1:
                return [error]
            return [answer for one in asked for answer in await self._answers(owner, [one])]  # what fails, fails alone


def _tell(done: asyncio.Future[Done], answer: Done | Exception) -> None:
    if done.done():  # nobody waits any more
        return
    if isinstance(answer, Exception):
        done.set_exception(answer)
    else:
        done.set_result(answer)
