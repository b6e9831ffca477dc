"""Leases: writes of workers, each of which checks in its transaction that the job is still the worker's own.

A lease is a job at one attempt. A worker that was silent for too long loses its leases: the job is at a later attempt
by then, with another worker or ended, so whatever the old one still writes is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Double, FromClause, cast, exists, func, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.errors import LeaseLostError
from api.jobs import queries, queue, results
from api.jobs.database import transaction
from api.jobs.queries import change_job
from api.jobs.queue import FOREVER_S, Picker
from api.jobs.records import Found, JobConfig, JobKind, JobResult
from api.jobs.tables import AnyRow, incumbents, jobs
from optpipe.problem import Problem
from solver.layout.plan_process import FoundPlan
from solver.layout.request import PlanRequest
from solver.methods import METHODS

MOST_LOST = 3
"""Lost workers after which a job fails: it may be what kills them."""

LEADER_LOCK = 0x6F70747069706533
"""Key of the advisory lock under which one worker at a time looks for equal jobs."""


@dataclass(frozen=True)
class Lease:
    """A job that a worker has taken up. `best`: its row of `incumbents`, from an earlier attempt.

    `alone`: the worker was lost before with this job, so it takes no other one with it. `share`: 0 for the primary
    worker; 1 and up for its helpers, which begin `begun_s` later. A helper writes in the primary worker's name, so that
    its lease ends with the primary's.
    """

    job_id: UUID
    worker: UUID
    attempt: int
    queue_id: int
    problem_json: str
    config_data: Mapping[str, Any]
    best: AnyRow | None
    alone: bool
    share: int = 0
    begun_s: float = 0.0
    kind: JobKind = "solve"

    def problem(self) -> Problem:
        """Its problem. Raises InputError where a program with other rules accepted it."""
        return Problem.from_json(self.problem_json)

    def plan_request(self) -> PlanRequest:
        """The request of a plan. Raises InputError like `problem`."""
        return PlanRequest.from_json(self.problem_json)

    def config(self) -> JobConfig:
        """Its configuration. Raises InputError like `problem`."""
        return JobConfig.from_data(self.config_data)


async def claim(
    engine: AsyncEngine, picker: Picker, running_ids: Collection[UUID] = (), threads: int | None = None
) -> list[Lease]:
    """Lease jobs to a worker, which solves `running_ids` at present. Those of silent workers are set aside first.

    `threads`: those that it gives to one job. For what a job asks for beyond, other workers are asked to help.
    """
    leases: list[Lease] = []
    free = picker.free
    async with transaction(engine) as connection:
        # After a restart of the database nobody had a chance to send a heartbeat yet.
        up_for = func.now() - func.pg_postmaster_start_time()
        if (await connection.execute(select(up_for < timedelta(seconds=picker.heartbeat_timeout_s)))).scalar():
            picker = replace(picker, heartbeat_timeout_s=FOREVER_S)
        lost = await picker.lost(connection)
        for queue_id, job_id in lost:
            await _take(connection, picker.worker, queue_id, job_id, threads)
        await queries.add_totals(connection, {(queries.LOST, ""): len(lost)})
        if not lost:
            leases, again = await _claim(connection, picker, running_ids, threads)
            if not again:
                return leases
    while True:
        picker = replace(picker, free=free - len(leases))
        async with transaction(engine) as connection:  # pgqueuer hands out what was set aside after this moment only
            more, again = await _claim(connection, picker, running_ids, threads)
        leases += more
        if not again:
            return leases


async def claim_share(engine: AsyncEngine, picker: Picker, running_ids: Collection[UUID]) -> Lease | None:
    """Lease a share of a job of another worker, if one asks for help."""
    async with transaction(engine) as connection:
        share = await picker.pick_share(connection, running_ids)
        if share is None:
            return None
        row = (await connection.execute(select(jobs).where(jobs.c.id == share.job_id))).one_or_none()
        if row is None or row.status != "running":  # it ends just now, and its rows with it
            await queue.remove(connection, share.queue_id, "canceled")
            return None
        kept = (await connection.execute(select(incumbents).where(incumbents.c.job_id == row.id))).one_or_none()
        lease = Lease(row.id, row.worker, row.attempt, share.queue_id, row.problem, row.config, kept, alone=False)
        return replace(lease, share=share.number, begun_s=share.seconds)


async def end_share(engine: AsyncEngine, lease: Lease) -> None:
    """Remove the row of a share that was searched to its end."""
    async with transaction(engine) as connection:
        await queue.remove(connection, lease.queue_id, "successful")


async def _claim(
    connection: AsyncConnection, picker: Picker, running_ids: Collection[UUID], threads: int | None
) -> tuple[list[Lease], bool]:
    """Leases of the next jobs, and True if there may be more: the worker has room, and some jobs that were picked wait
    for equal ones."""
    await queue.release(connection, _may_go_on())
    picked = await picker.pick(connection)
    # A job of its own comes back where its heartbeat was late; picking it has renewed that.
    others = [(queue_id, job_id) for queue_id, job_id in picked if job_id not in running_ids]
    taken = [await _take(connection, picker.worker, queue_id, job_id, threads) for queue_id, job_id in others]
    return [lease for lease in taken if lease is not None], any(lease is None for lease in taken)


_leaders = jobs.alias("leaders")

FOLLOWED_FOR_S = 5.0
"""Longest wait of a job for others, one after another, beyond its own time limit."""


def _limit_s(job: FromClause) -> ColumnElement[float]:
    return cast(job.c.config["time_limit_s"], Double)


def _may_go_on() -> ColumnElement[bool]:
    """Condition for a held job: the one that it follows no longer runs, or it was held for too long."""
    runs = exists().where(_leaders.c.id == jobs.c.leader, _leaders.c.status == "running")
    patience = func.make_interval(0, 0, 0, 0, 0, 0, _limit_s(jobs) + FOLLOWED_FOR_S)
    return ~runs | (jobs.c.held_at + patience < func.now())


async def _find_leader(connection: AsyncConnection, job: AnyRow) -> UUID | None:
    """A running job whose schedule will answer this one within its time limit, all its waits for others included; None
    where there is none.

    It is of an equal problem, with the same method, seed and threads, no less time and no larger gap.

    One claim at a time looks, so that of two equal jobs one sees the other run.
    """
    if job.equality is None or job.attempt > 0:  # what is tried again is to be searched for again
        return None
    await connection.execute(select(func.pg_advisory_xact_lock(LEADER_LOCK)))
    config = job.config
    same = [_leaders.c.config[name] == cast(config[name], JSONB) for name in ("method", "seed", "workers")]
    # Not `now`, the start of this transaction: the other one may have begun its job while this one waited for the lock.
    passed_s = cast(func.extract("epoch", func.clock_timestamp() - _leaders.c.started_at), Double)
    left_s = _limit_s(_leaders) - passed_s
    held_s = 0.0 if job.held_at is None else func.extract("epoch", func.clock_timestamp() - job.held_at)
    leader = select(_leaders.c.id).where(
        _leaders.c.equality == job.equality,
        _leaders.c.status == "running",
        ~_leaders.c.cancel_requested,
        *same,
        _limit_s(_leaders) >= config["time_limit_s"],
        cast(_leaders.c.config["gap"], Double) <= config["gap"],
        left_s + held_s <= config["time_limit_s"],
        _leaders.c.id.is_distinct_from(job.leader),
    )
    found: UUID | None = (
        await connection.execute(leader.order_by(_leaders.c.started_at).limit(1))
    ).scalar_one_or_none()
    return found


async def _take(
    connection: AsyncConnection, worker: UUID, queue_id: int, job_id: UUID, threads: int | None
) -> Lease | None:
    """Lease of a picked job; None if the job has ended, ends here, is set aside because its worker was lost, or waits
    for the end of an equal one."""
    await queue.end_help(connection, job_id)  # what an earlier attempt has asked for
    row = (
        await connection.execute(select(jobs).where(jobs.c.id == job_id, jobs.c.queue_id == queue_id).with_for_update())
    ).one_or_none()
    if row is None:
        await queue.remove(connection, queue_id, "canceled")
        return None
    lost_workers = row.lost + (row.status == "running")
    if row.cancel_requested or lost_workers >= MOST_LOST:
        values = queries.cancelled(row)
        if not row.cancel_requested:
            values |= {
                "status": "failed",
                "stopped_by": None,
                "error": f"the worker was lost {lost_workers} times while it solved this job, so it is not retried. "
                "Maybe the machine of the workers ran out of memory; their logs may say more.",
            }
        await queue.remove(connection, queue_id, "canceled" if row.cancel_requested else "exception")
        await change_job(connection, job_id, "status", lost=lost_workers, **values)
        return None
    if row.status == "running":
        await queue.give_back(connection, queue_id)
        await queue.set_aside(connection, queue_id)
        await change_job(connection, job_id, "status", status="queued", worker=None, lost=lost_workers)
        return None
    leader = await _find_leader(connection, row)
    if leader is not None:
        await queue.give_back(connection, queue_id)
        await queue.hold(connection, queue_id)
        held_at = func.coalesce(jobs.c.held_at, func.clock_timestamp())
        held = update(jobs).where(jobs.c.id == job_id).values(leader=leader, held_at=held_at)
        await connection.execute(held)
        return None
    begun = func.coalesce(jobs.c.started_at, func.now())
    attempt = row.attempt + 1
    values = {"status": "running", "worker": worker, "attempt": attempt, "started_at": begun, "leader": None}
    await change_job(connection, job_id, "status", **values)
    kept = (await connection.execute(select(incumbents).where(incumbents.c.job_id == job_id))).one_or_none()
    if (
        threads is not None and row.lost == 0 and row.kind == "solve"
    ):  # a job that may be what ends workers is solved by one at a time
        method = METHODS.get(row.config.get("method", "auto"))
        if method is not None and method.kind != "published":
            await queue.ask_for_help(connection, job_id, (row.config.get("workers", 1) - 1) // threads)
    return Lease(job_id, worker, attempt, queue_id, row.problem, row.config, kept, row.lost > 0, kind=row.kind)


@dataclass(frozen=True)
class Beat:
    """Answer to a heartbeat. `better`: the row of `incumbents` where another worker has stored a better one."""

    cancel_requested: bool
    better: AnyRow | None


async def beat(
    engine: AsyncEngine, lease: Lease, best: Found | None = None, count: int = 0, *, stored: bool = False
) -> Beat:
    """Record a heartbeat, and store `best`, verified, if it or its bound is better than what is stored.

    `stored`: it was stored before. `count`: heartbeats to add to the totals, in batches, because all workers update the
    same row. Raises LeaseLostError, DatabaseGoneError.
    """
    async with transaction(engine) as connection:
        await queue.beat(connection, lease.queue_id)
        row = await _locked_row(connection, lease)
        if best is not None and not stored:
            await _improve(connection, lease, row, best)
        own = (float("inf"), 0.0) if best is None else (best.value_us, -best.bound_us)
        better = None
        if row.value_us is not None and (row.value_us, -row.bound_us) < own:
            kept = select(incumbents).where(incumbents.c.job_id == lease.job_id)
            better = (await connection.execute(kept)).one_or_none()
        await queries.add_totals(connection, {(queries.HEARTBEATS, ""): count})
        return Beat(bool(row.cancel_requested), better)


async def _locked_row(connection: AsyncConnection, lease: Lease) -> AnyRow:
    """The row of the job, locked. Raises LeaseLostError, which undoes what the transaction has done to the queue."""
    columns = jobs.c.cancel_requested, jobs.c.value_us, jobs.c.bound_us
    row = (
        await connection.execute(
            select(*columns)
            .where(
                jobs.c.id == lease.job_id,
                jobs.c.status == "running",
                jobs.c.worker == lease.worker,
                jobs.c.attempt == lease.attempt,
            )
            .with_for_update()
        )
    ).one_or_none()
    if row is None:
        raise LeaseLostError(f"attempt {lease.attempt} of job {lease.job_id} is no longer this worker's.")
    return row


async def _improve(connection: AsyncConnection, lease: Lease, known: AnyRow, found: Found) -> None:
    """Record a better value, or else a better bound or more of a plan; a schedule that is neither changes nothing."""
    bound_us = max(found.bound_us, known.bound_us or 0.0)
    if known.value_us is None or found.value_us < known.value_us:
        values = {"value_us": found.value_us, "bound_us": min(bound_us, found.value_us), "bubble": found.bubble}
        row = await change_job(connection, lease.job_id, "incumbent", found, **values)
        await results.keep_orders(connection, row, found)
    elif isinstance(found, FoundPlan) and found.value_us == known.value_us:
        same = select(incumbents.c.orders == found.text).where(incumbents.c.job_id == lease.job_id)
        if (await connection.execute(same)).scalar():
            return
        row = await change_job(connection, lease.job_id, "strategies", found, bound_us=min(bound_us, found.value_us))
        await results.keep_orders(connection, row, found)
    elif bound_us > known.bound_us:
        bound_us = min(bound_us, known.value_us)
        row = await change_job(connection, lease.job_id, "bound", found, bound_us=bound_us)
        kept = incumbents.update().where(incumbents.c.job_id == lease.job_id)
        # Its document has the bound, so it is another document: callers know it by the revision.
        await connection.execute(kept.values(bound_us=bound_us, revision=row.revision))


async def end(engine: AsyncEngine, lease: Lease, result: JobResult, heartbeats: int = 0) -> None:
    """Store how the job ended, once, after so many heartbeats that were not counted yet. Raises LeaseLostError,
    DatabaseGoneError."""
    found = result.found
    text = await asyncio.to_thread(results.document_text, found) if found else ""
    values: dict[str, Any] = {"status": result.status, "worker": None, "queue_id": None, "finished_at": func.now()}
    values |= {"reason": result.reason, "stopped_by": result.stop_reason, "error": result.error}
    values |= {"budgets_bytes": list(result.budgets_bytes) if result.budgets_bytes is not None else None}
    async with transaction(engine) as connection:
        await queue.remove(connection, lease.queue_id, "canceled" if result.status == "cancelled" else "successful")
        await queue.end_help(connection, lease.job_id)
        row = await _locked_row(connection, lease)
        if found is not None:
            await _improve(connection, lease, row, found)
            values |= {"value_us": found.value_us, "bound_us": found.bound_us, "bubble": found.bubble}
        ended = await change_job(connection, lease.job_id, "status", found, **values)
        if found is not None:
            await results.keep_orders(connection, ended, found)
            await results.keep_document(connection, ended, text)
        await queries.add_totals(connection, {**queries.totals_of_result(result), (queries.HEARTBEATS, ""): heartbeats})


async def give_back(engine: AsyncEngine, lease: Lease, found: Found | None) -> None:
    """Let the job wait again at its old place, to go on from the best that it found. Raises LeaseLostError,
    DatabaseGoneError."""
    async with transaction(engine) as connection:
        await queue.give_back(connection, lease.queue_id)
        if lease.share:
            return
        await queue.end_help(connection, lease.job_id)
        row = await _locked_row(connection, lease)
        if found is not None:
            await _improve(connection, lease, row, found)
        await change_job(connection, lease.job_id, "status", status="queued", worker=None)
