"""Stored results: the best schedule of each job, and solutions shared by equal problems.

Solutions of equal problems follow the rules of `solver.cache`, which keeps files for the command line. For an equal
problem the orders are timed and verified anew, and the document is written. It is the `Answer` to that problem, when it
comes word for word.

Every schedule that is written here comes from `solver.build`, which verifies it. A document lies under the digest of
its text and is never changed, so what is read later, for whichever job, is what was verified then.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self
from uuid import UUID

from sqlalchemy import Integer, bindparam, case, delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from api.errors import NoScheduleError
from api.jobs.database import Statement
from api.jobs.queries import OWNED, not_found
from api.jobs.records import TERMINAL, BestRevision, BestSchedule, Found, JobConfig, StopReason
from api.jobs.tables import AnyRow, answers, documents, incumbents, jobs, schedules, solved_problems
from optpipe.ops import Orders, orders_from_data, orders_to_data
from optpipe.problem import Problem
from optpipe.schedule import Schedule, relative_gap, schedule_text
from solver.build import build_schedule
from solver.cache import canonical_form, rebuild_schedule, solved_well_enough
from solver.layout.plan_process import SEPARATOR, FoundPlan, plan_part
from solver.layout.request import PlanRequest
from solver.limits import Limits
from solver.methods import METHODS

USED_WITHIN = timedelta(hours=12)
"""Granularity of `used_at`: written at each use, its row lock would serialise all users of the row."""


@dataclass(frozen=True)
class Equality:
    """Equality key of a problem: only equal problems share `key`; `time_us` is the unit of its canonical times."""

    key: str
    time_us: float

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """Equality key of `problem`."""
        form = canonical_form(problem)
        return cls(form.key, float(form.time_us))

    @classmethod
    def of_plan(cls, request: PlanRequest) -> Self:
        """Equality key of the request of a plan."""
        return cls(request.equality_key(), 1.0)


@dataclass(frozen=True)
class Built:
    """A verified schedule as the text of its document, with the figures that decide whether it answers a job."""

    text: str
    value_us: float
    bound_us: float
    bubble: float | None

    @classmethod
    def of(cls, found: Found) -> Self:
        """The document of a verified schedule, or a plan."""
        return cls(document_text(found), found.value_us, found.bound_us, found.bubble)


@dataclass(frozen=True)
class Answer:
    """The stored schedule of a problem given as text, with the figures for a job that it answers.

    `document` is its digest, `orders` are what it was made of. Times are the problem's own.
    """

    document: bytes
    value_us: float
    bound_us: float
    bubble: float | None
    method: str
    solve_seconds: float
    orders: str

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """Status of the schedule document."""
        return "optimal" if self.bound_us == self.value_us else "feasible"

    @property
    def gap(self) -> float:
        """Relative gap."""
        return relative_gap(self.value_us, self.bound_us)


_ANSWER = Statement(
    select(
        answers,
        *(solved_problems.c[name] for name in ("asked", "worker_s", "used_at", "method", "solve_seconds", "orders")),
    )
    .join(solved_problems, solved_problems.c.key == answers.c.key)
    .where(answers.c.problem == bindparam("problem"))
)
_ROW = Statement(select(solved_problems).where(solved_problems.c.key == bindparam("key")))


async def find_answer(connection: AsyncConnection, problem: bytes, config: JobConfig) -> Answer | None:
    """Answer to the problem with this digest, if it meets the requested limits."""
    row = await _ANSWER.one_or_none(connection, problem=problem)
    if row is None:
        return None
    await _use(connection, row)
    figures = row.value_us, row.bound_us, row.bubble
    known = Answer(row.document, *figures, row.method, row.solve_seconds, row.orders)
    return known if is_good_enough(known, row, config) else None


async def find_solution(connection: AsyncConnection, key: str) -> Any:
    """The row of a key; None where there is none."""
    row = await _ROW.one_or_none(connection, key=key)
    if row is not None:
        await _use(connection, row)
    return row


async def _use(connection: AsyncConnection, row: Any) -> None:
    """Update `used_at` of a row, which retention reads."""
    if datetime.now(UTC) - row.used_at > USED_WITHIN:
        used = update(solved_problems).where(solved_problems.c.key == row.key).values(used_at=func.now())
        await connection.execute(used)


def build_equal(row: Any, problem: Problem, equality: Equality, config: JobConfig) -> Schedule | None:
    """Verified schedule of `problem` from the solution of an equal one, if it meets the requested limits."""
    bound_us = row.bound * equality.time_us
    schedule = rebuild_schedule(problem, row.orders, bound_us, row.method, row.solve_seconds)
    return schedule if schedule is not None and is_good_enough(schedule, row, config) else None


def is_good_enough(known: Answer | Built | Found, row: Any, config: JobConfig) -> bool:
    """True if a schedule of a row meets the requested limits, by the rule of `solver.cache`."""
    limits = Limits(config.time_limit_s, config.gap, config.workers, config.seed)
    gap = relative_gap(known.value_us, known.bound_us)
    return solved_well_enough(gap, row.asked, row.worker_s, config.method, limits)


def stop_reason(answer: Answer | Found, config: JobConfig) -> StopReason | None:
    """StopReason that would have ended a solve with this answer; None: the search was complete."""
    if answer.status == "optimal" or METHODS[config.method].kind == "published":
        return None
    return "gap" if answer.gap <= config.gap else "time"


async def write_answer(connection: AsyncConnection, row: Any, problem: bytes, built: Built) -> Answer:
    """Write the document that was made of a row, as the answer to the problem with this digest.

    It is found when the problem comes again word for word, until one with other words comes, or the row changes.
    """
    document = await write_document(connection, built.text)
    figures: dict[str, Any] = {"value_us": built.value_us, "bound_us": built.bound_us, "bubble": built.bubble}
    same = [solved_problems.c[name] == getattr(row, name) for name in ("key", "orders", "bound")]
    if (await connection.execute(select(solved_problems.c.key).where(*same).with_for_update())).one_or_none():
        await connection.execute(delete(answers).where((answers.c.key == row.key) | (answers.c.problem == problem)))
        await connection.execute(insert(answers).values(problem=problem, key=row.key, document=document, **figures))
    return Answer(document, **figures, method=row.method, solve_seconds=row.solve_seconds, orders=row.orders)


def warm_start(row: Any) -> Orders | None:
    """Orders of a row, to start a search from."""
    try:
        return orders_from_data(json.loads(row.orders))
    except (ValueError, TypeError, KeyError):
        return None  # see `solver.cache.rebuild_schedule`


async def keep_solution(
    connection: AsyncConnection,
    found: Found,
    equality: Equality,
    requested_method: str,
    cpu_seconds: float,
    job_id: UUID,
) -> None:
    """Keep the verified result that `requested_method` found for a job in `cpu_seconds` (time limit x threads), unless
    a better one is stored. The higher bound is kept in either case.

    A solution counts among those of the key whose job was the first to find one.
    """
    owner = select(jobs.c.owner).where(jobs.c.id == job_id).scalar_subquery()
    new = insert(solved_problems).values(
        key=equality.key,
        asked=requested_method,
        worker_s=cpu_seconds,
        value=found.value_us / equality.time_us,
        bound=found.bound_us / equality.time_us,
        method=found.method,
        solve_seconds=found.solve_seconds,
        orders=_kept_text(found),
        owner=owner,
    )
    old, given = solved_problems.c, new.excluded
    better = tuple_(given.value, -given.worker_s) <= tuple_(old.value, -old.worker_s)
    names = ("asked", "worker_s", "value", "method", "solve_seconds", "orders")
    values = {name: case((better, given[name]), else_=old[name]) for name in names}
    bound = func.greatest(old.bound, given.bound)
    await connection.execute(
        new.on_conflict_do_update(index_elements=["key"], set_={**values, "bound": bound, "used_at": func.now()})
    )
    await connection.execute(delete(answers).where(answers.c.key == equality.key))  # it may be another one from now on


def _kept_text(found: Found) -> str:
    """The text from which a result is made again: the orders of a schedule, or the whole of a plan."""
    if isinstance(found, FoundPlan):
        return found.text
    return json.dumps(orders_to_data(found.orders), separators=(",", ":"))


def document_text(found: Found) -> str:
    """The text of a result as callers read it; of a plan, all its documents."""
    return found.text if isinstance(found, FoundPlan) else schedule_text(found)


async def keep_orders(connection: AsyncConnection, job: AnyRow, found: Found) -> None:
    """Keep a verified result as the best of a job, whose row this is."""
    orders = _kept_text(found)
    values = {
        "revision": job.revision,
        "attempt": job.attempt,
        "value_us": found.value_us,
        "bound_us": found.bound_us,
        "method": found.method,
        "seconds": found.solve_seconds,
        "orders": orders,
    }
    new = insert(incumbents).values(job_id=job.id, **values)
    await connection.execute(new.on_conflict_do_update(index_elements=["job_id"], set_=values))
    await _count_bytes(connection, job, orders)


async def _count_bytes(connection: AsyncConnection, job: AnyRow, text: str) -> None:
    """Count the text of a job's best as what the job stores of it."""
    stored = update(jobs).where(jobs.c.id == job.id).values(schedule_bytes=len(text.encode()))
    await connection.execute(stored)


async def keep_document(connection: AsyncConnection, job: AnyRow, text: str) -> None:
    """Keep the final document of a job, which counts instead of what it was made of."""
    digest = await write_document(connection, text)
    await connection.execute(insert(schedules).values(job_id=job.id, revision=job.revision, document=digest))
    await _count_bytes(connection, job, text)


async def write_document(connection: AsyncConnection, text: str) -> bytes:
    """Write a document unless it is there; its digest. `remove_old` leaves what was written in the last hour alone."""
    digest = hashlib.sha256(text.encode()).digest()
    new = insert(documents).values(digest=digest, text=text)
    await connection.execute(new.on_conflict_do_update(index_elements=["digest"], set_={"written_at": func.now()}))
    return digest


_KEPT = (
    jobs.outerjoin(incumbents, incumbents.c.job_id == jobs.c.id)
    .outerjoin(schedules, schedules.c.job_id == jobs.c.id)
    .outerjoin(documents, documents.c.digest == schedules.c.document)
)
_REVISION = (
    jobs.c.status,
    incumbents.c.revision,
    incumbents.c.bound_us,
    documents.c.digest.is_not(None).label("kept"),
)
_MADE_OF = jobs.c.kind, jobs.c.problem, incumbents.c.method, incumbents.c.seconds, incumbents.c.orders

_BEST_REVISION = Statement(select(*_REVISION).select_from(_KEPT).where(OWNED))
_BEST = Statement(select(*_REVISION, *_MADE_OF, documents.c.text.label("document")).select_from(_KEPT).where(OWNED))
_PLAN_PART = Statement(
    select(
        *_REVISION,
        jobs.c.kind,
        func.split_part(
            func.coalesce(documents.c.text, incumbents.c.orders), SEPARATOR, bindparam("part", type_=Integer)
        ).label("text"),
    )
    .select_from(_KEPT)
    .where(OWNED)
)

Build = Callable[[str, str, float, str, float], Awaitable[str | None]]
"""Makes the document of a problem (its text), orders (their text), bound, method and seconds; None where they make
none."""


async def best_revision(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> BestRevision:
    """Revision of the best schedule, without reading it. Raises NotFoundError, NoScheduleError."""
    return _best_revision(await _BEST_REVISION.one_or_none(connection, job_id=job_id, owner=owner), job_id)


async def best_row(connection: AsyncConnection, job_id: UUID, owner: UUID | None) -> Any:
    """Row for `best_schedule`, of a job that has one. Raises NotFoundError, NoScheduleError."""
    row = await _BEST.one_or_none(connection, job_id=job_id, owner=owner)
    _best_revision(row, job_id)
    return row


def _best_revision(row: Any, job_id: UUID) -> BestRevision:
    if row is None:
        raise not_found(job_id)
    if row.revision is None:
        raise NoScheduleError(f"job {job_id} is {row.status} and has no schedule. Maybe its events tell why.")
    return BestRevision(row.revision, row.bound_us, row.status in TERMINAL, row.kept)


async def best_schedule(row: Any, job_id: UUID, build: Build) -> BestSchedule:
    """Best schedule of a row of `best_row`. Raises NoScheduleError where its orders make none."""
    text = row.document
    if row.kind == "plan":
        text = plan_part(text or row.orders, 1)
        if text is None:
            raise NoScheduleError(f"the plan {job_id} is {row.status} and has no schedule. Maybe allow it more time.")
    elif text is None:
        text = await build(row.problem, row.orders, row.bound_us, row.method, row.seconds)
    if text is None:
        raise NoScheduleError(f"the schedule of job {job_id} was stored by a version with other rules. Maybe retry it.")
    return BestSchedule(_best_revision(row, job_id), text)


async def best_plan(connection: AsyncConnection, job_id: UUID, owner: UUID | None, part: int = 0) -> BestSchedule:
    """The document of the best plan so far, or its schedule number `part` from 1. Raises NotFoundError,
    NoScheduleError."""
    row = await _PLAN_PART.one_or_none(connection, job_id=job_id, owner=owner, part=part + 1)
    revision = _best_revision(row, job_id)
    if row.kind != "plan" or not row.text:
        raise NoScheduleError(f"job {job_id} is a {row.kind} without that. Maybe it is the id of another job.")
    return BestSchedule(revision, row.text)


async def build_in_thread(problem: str, orders: str, bound_us: float, method: str, solve_seconds: float) -> str | None:
    """See `Build`; for callers with time."""

    def build() -> str | None:
        schedule = rebuild_schedule(Problem.from_json(problem), orders, bound_us, method, solve_seconds)
        return schedule_text(schedule) if schedule else None

    return await asyncio.to_thread(build)


def load_schedule(problem: Problem, row: Any) -> Schedule:
    """The kept orders of a problem, timed and verified anew. `row`: of `incumbents`."""
    return build_schedule(problem, orders_from_data(json.loads(row.orders)), row.bound_us, row.method, row.seconds)
