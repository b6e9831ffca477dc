"""New jobs in the tables: one that waits, or one that is done as it comes; each by one statement."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import UUID, uuid4

from psycopg.types.json import Jsonb
from sqlalchemy import CTE, ColumnElement, FromClause, Insert, Table, bindparam, func, insert, literal, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs import queue, reading
from api.jobs.config import JobConfig
from api.jobs.direct import Statement
from api.jobs.records import Job, Limit
from api.jobs.solved import Answer
from api.jobs.tables import answers, documents, events, incumbents, jobs, schedules, solved_problems
from optpipe.problem import Problem
from solver.methods import METHODS


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


async def queued(connection: AsyncConnection, request: Request) -> Job:
    """A job that waits to be solved."""
    asked = _asked(request)
    asked["queue_id"] = await queue.enqueue(connection, asked["id"], request.config.priority)
    row = await _QUEUED.one_or_none(connection, **asked)
    return reading.job_of(row, row.queue_place)


async def answered(connection: AsyncConnection, request: Request, answer: Answer) -> Job | None:
    """A job that is done as it comes; None where the answer is no longer the one that is stored."""
    asked = _asked(request) | {"digest": request.digest, "answer": answer.document}
    asked |= {"reason": answer.status, "stopped_by": _stopped_by(answer, request.config)}
    row = await _ANSWERED.one_or_none(connection, **asked)
    return reading.job_of(row) if row else None


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
    job = insert(jobs).values(new).returning(*reading.SHOWN).cte("job")
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
    job = _insert(jobs, answer, **new).returning(*reading.SHOWN).cte("job")
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
