"""One job from claim to end: solved in a child process, incumbents and the result stored.

Where a job asks for more threads than its worker gives, other workers search it too, each as a run of its own with
other seeds and another order of searches. They meet in the stored incumbent: each stores what is better, and reads with
its heartbeats what others have stored. The primary one ends the job, at a proof of any of them; the loss of a helper
loses nothing.

During an outage of the database the solve continues; results are stored when it is back.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeVar

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from sqlalchemy.ext.asyncio import AsyncEngine

from api.errors import DatabaseGoneError, LeaseLostError
from api.jobs import leases, results
from api.jobs.database import transaction
from api.jobs.leases import Beat, Lease
from api.jobs.queue import HeartbeatGrace
from api.jobs.records import Found, JobConfig, JobResult, Reason, StopReason
from api.jobs.results import Equality
from api.jobs.tables import AnyRow
from optpipe.errors import InfeasibleError, OptPipeError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.build import build_schedule
from solver.layout.plan_process import FoundPlan, OnPlanEvent, PlanResult
from solver.layout.request import PlanRequest
from solver.limits import Cancel, Limits
from solver.process import Child, ChildResult, Heartbeat, SolverDiedError, cpu_seconds_given, solve_in_child
from solver.solution import Feed, Progress, Solution

Result = TypeVar("Result")

OnEvent = Callable[[Progress | FoundPlan | Heartbeat], None]


@dataclass(frozen=True)
class SolveRequest:
    """One solve: problem, configuration, memory limit, cancellation, and orders to start from.

    It has `threads` of those that the configuration asks for, and is number `share` of the solves that have them; the
    first began `begun_s` before. `feed`: what the others find.
    """

    problem: Problem
    config: JobConfig
    memory_limit_bytes: int | None
    cancel: Cancel
    starts: Sequence[Orders]
    threads: int
    share: int = 0
    begun_s: float = 0.0
    feed: Feed = field(default_factory=Feed)

    def limits(self) -> Limits:
        """Limits whose clock starts now."""
        config = self.config
        time_limit_s = max(config.time_limit_s - self.begun_s, 0.01)
        return Limits(time_limit_s, config.gap, self.threads, config.seed, self.cancel, lane=self.share)


Solve = Callable[[SolveRequest, OnEvent], ChildResult]
"""Solves a request in the calling thread; raises like `solve_in_child`."""


MakePlan = Callable[[PlanRequest, Limits, int | None, OnPlanEvent], PlanResult]
"""Plans like `plan_in_child`."""


class ChildSolver:
    """Solves in child processes and keeps one ready, because loading the solvers takes longer than many a solve.

    Call `prepare` in a thread that outlives this object: on Linux a child dies with the thread that started it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._spare: Child | None = None

    def prepare(self) -> None:
        """Start a child for the next solve, unless there is one."""
        with self._lock:
            if self._spare is None:
                self._spare = Child()

    def close(self) -> None:
        """End the child that is kept ready."""
        spare = self._take()
        if spare is not None:
            with spare:
                pass

    def __call__(self, task: SolveRequest, on_event: OnEvent) -> ChildResult:
        """Solve in the child that is kept ready, or else in a new one."""
        spare = self._take()
        if spare is not None and not _runs(spare.pid):
            with spare:
                spare = None
        return solve_in_child(
            task.problem,
            task.config.method,
            task.limits(),
            task.memory_limit_bytes,
            on_event,
            child=spare,
            starts=task.starts,
            feed=task.feed,
        )

    def _take(self) -> Child | None:
        with self._lock:
            spare, self._spare = self._spare, None
        return spare


def _runs(pid: int) -> bool:
    """True if a child is still running; its exit status is left to be collected."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


class WorkerMetrics:
    """The figures of one worker."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.heartbeats = Counter("optpipe_worker_heartbeats", "Heartbeats stored.", registry=registry)
        self.refused = Counter("optpipe_worker_refused", "Jobs that were no longer this worker's.", registry=registry)
        self.solving = Gauge("optpipe_worker_solving", "Jobs that it solves now.", registry=registry)

    @contextmanager
    def served(self, host: str, port: int | None) -> Iterator[None]:
        """Context that serves the metrics on a port; None: nowhere."""
        if port is None:
            yield
            return
        server, thread = start_http_server(port, host, self.registry)
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


BEAT_S = 0.3
"""Interval of heartbeats, each of which also reads the cancel request."""

COUNTED_TOGETHER = 32
"""Heartbeats added to the totals at once (some ten seconds); fewer at the end of a job."""

TRY_AGAIN_S = 0.5
"""Pause before a retry while the database does not answer."""

_log = structlog.get_logger("optpipe.worker")


@dataclass(frozen=True)
class Workplace:
    """Resources shared by all runs of a worker."""

    engine: AsyncEngine
    executor: Executor
    solve: Solve
    memory_limit_bytes: int | None
    threads: int
    metrics: WorkerMetrics
    grace: HeartbeatGrace
    plan: MakePlan


@dataclass(frozen=True)
class Searched:
    """Outcome of a search. `limit` is what stopped it; None where it was done. `error` says why nothing was found."""

    found: Found | None
    reason: Reason
    limit: StopReason | None
    error: str | None = None
    budgets_bytes: Sequence[int | None] | None = None


class Prepared(ABC):
    """A lease, parsed: how the job is searched, and how what is found is judged. All of it may take long.

    `best` is the best result of earlier attempts, verified again; None if there is none that is valid.
    """

    config: JobConfig
    equality: Equality
    best: Found | None
    known: AnyRow | None = None
    """The result of an equal job that did not answer this one, from `solved_problems`."""

    @staticmethod
    def of(lease: Lease) -> Prepared:
        """Parse what is stored. Raises InputError where a program with other rules stored it."""
        return PreparedPlan(lease) if lease.kind == "plan" else PreparedSolve(lease)

    @abstractmethod
    def load(self, row: AnyRow) -> Any:
        """The result of a row of `incumbents`, verified anew."""

    @abstractmethod
    def of_equal(self, row: AnyRow) -> Found | None:
        """The result of an equal job, from a row of `solved_problems`, if it answers this one."""

    @abstractmethod
    def search(self, place: Workplace, threads: int, cancel: Cancel, on_event: OnEvent) -> Searched:
        """Search in this thread."""

    @abstractmethod
    def read(self, heard: Any) -> Found:
        """Facts of an event of the search, verified: nothing from a child is stored unchecked."""

    @abstractmethod
    def better(self, found: Any, other: Any) -> Any:
        """The better of two results, either of which may be None."""

    @abstractmethod
    def feed(self, found: Any) -> None:
        """Tell the search what another worker found."""

    def _best(self, lease: Lease) -> Any:
        with suppress(OptPipeError, ValueError, TypeError, KeyError):  # stored by a program with other rules
            return self.load(lease.best) if lease.best else None
        return None


class PreparedSolve(Prepared):
    """A problem to solve."""

    best: Schedule | None

    def __init__(self, lease: Lease) -> None:
        self._lease, self._feed = lease, Feed()
        self.problem, self.config = lease.problem(), lease.config()
        self.equality = Equality.of(self.problem)
        self.best = self._best(lease)

    def load(self, row: AnyRow) -> Schedule:
        """See `Prepared.load`."""
        return results.load_schedule(self.problem, row)

    def of_equal(self, row: AnyRow) -> Schedule | None:
        """See `Prepared.of_equal`."""
        return results.build_equal(row, self.problem, self.equality, self.config)

    def search(self, place: Workplace, threads: int, cancel: Cancel, on_event: OnEvent) -> Searched:
        """See `Prepared.search`. It starts from the best of earlier attempts, and of an equal problem."""
        equal = results.warm_start(self.known) if self.known is not None else None
        starts = [orders for orders in (self.best.orders if self.best else None, equal) if orders]
        lease, memory = self._lease, place.memory_limit_bytes
        task = SolveRequest(
            self.problem, self.config, memory, cancel, starts, threads, lease.share, lease.begun_s, self._feed
        )
        result = place.solve(task, on_event)
        budgets_bytes = result.error.budgets_bytes if isinstance(result.error, InfeasibleError) else None
        error = None if result.error is None else str(result.error)
        return Searched(result.schedule, result.reason, result.limit, error, budgets_bytes)

    def read(self, heard: Progress) -> Schedule:
        """See `Prepared.read`."""
        return heard.solution.to_schedule(self.problem, self._lease.begun_s + heard.seconds)

    def better(self, found: Schedule | None, other: Schedule | None) -> Schedule | None:
        """The better of two schedules, with the higher of their bounds."""
        if found is None or other is None:
            return found or other
        chosen = min(found, other, key=lambda schedule: schedule.value_us)
        bound_us = max(found.bound_us, other.bound_us)
        if bound_us <= chosen.bound_us:
            return chosen
        return build_schedule(self.problem, chosen.orders, bound_us, chosen.method, chosen.solve_seconds)

    def feed(self, found: Schedule) -> None:
        """See `Prepared.feed`."""
        self._feed.offer(Solution(found.orders, found.value_us, found.bound_us, found.method))


class PreparedPlan(Prepared):
    """A plan to make."""

    best: FoundPlan | None

    def __init__(self, lease: Lease) -> None:
        self.request, self.config = lease.plan_request(), lease.config()
        self.equality = Equality.of_plan(self.request)
        self.best = self._best(lease)

    def load(self, row: AnyRow) -> FoundPlan:
        """See `Prepared.load`. Its schedules were verified before they were written."""
        return FoundPlan.of_text(row.orders, row.seconds)

    def of_equal(self, row: AnyRow) -> FoundPlan | None:
        """See `Prepared.of_equal`."""
        found = FoundPlan.of_text(row.orders, row.solve_seconds)
        return found if results.is_good_enough(found, row, self.config) else None

    def search(self, place: Workplace, threads: int, cancel: Cancel, on_event: OnEvent) -> Searched:
        """See `Prepared.search`."""
        limits = Limits(self.config.time_limit_s, workers=threads, cancel=cancel)
        result = place.plan(self.request, limits, place.memory_limit_bytes, on_event)
        if result.plan is None:
            reason: Reason = "no_solution" if result.limit else "infeasible"
            return Searched(None, reason, result.limit, str(result.error))
        return Searched(result.plan, result.plan.status, result.limit)

    def read(self, heard: FoundPlan) -> FoundPlan:
        """See `Prepared.read`. `plan_in_child` has verified its schedules."""
        return heard

    def better(self, found: FoundPlan | None, other: FoundPlan | None) -> FoundPlan | None:
        """The faster of two plans; of equal ones, the one that says more."""
        plans = [plan for plan in (found, other) if plan is not None]
        return min(plans, key=lambda plan: (plan.value_us, -len(plan.text)), default=None)

    def feed(self, found: FoundPlan) -> None:
        """See `Prepared.feed`. A plan has one worker: what was found is of an earlier attempt."""


class Run:
    """One attempt to solve a job."""

    def __init__(self, workplace: Workplace, lease: Lease) -> None:
        self.lease = lease
        self._workplace = workplace
        self._cancel = Cancel()
        self._leaving = False
        self._cancelled = False
        self._heard: Progress | FoundPlan | None = None
        self._best: Found | None = None
        self._beats = 0
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._log = _log.bind(job=str(lease.job_id), attempt=lease.attempt, share=lease.share)

    def cancel(self) -> None:
        """End the job now, with its best schedule."""
        self._cancelled = True
        self._cancel.request()

    def leave(self) -> None:
        """Stop and give the job back, because the worker ends, or a share, because a job waits for its place."""
        self._leaving = True
        self._cancel.request()

    async def run(self) -> None:
        """Solve the job and store its result. A failed solve ends the job, never the worker."""
        self._log.info("job begun")
        try:
            await self._run()
        except LeaseLostError:
            if self.lease.share:  # the job has ended, or its primary worker is lost
                return
            self._workplace.metrics.refused.inc()
            self._log.warning("result refused: the job was given to another worker, or removed")

    async def _run(self) -> None:
        try:
            prepared = await self._meanwhile_beating(Prepared.of, self.lease)
        except OptPipeError as error:
            if not self.lease.share:
                outcome = self._failed(None, str(error))
                await self._store(lambda: self._end(outcome))
            return
        self._best = prepared.best
        known = None
        with suppress(DatabaseGoneError):
            async with transaction(self._workplace.engine) as connection:
                known = await results.find_solution(connection, prepared.equality.key)
        if known is not None and await self._end_as_known(prepared, known):
            return
        prepared.known = known
        solving = self._loop.run_in_executor(
            self._workplace.executor,
            prepared.search,
            self._workplace,
            self._threads(prepared.config),
            self._cancel,
            self._hear,
        )
        try:
            await self._follow(prepared, solving)
        finally:
            self._cancel.request()  # for the ways out of here on which it still runs
            await asyncio.wait([solving])
        await self._conclude(prepared, solving)

    async def _end_as_known(self, prepared: Prepared, row: AnyRow) -> bool:
        """End the job with the solution of an equal problem, which was solved while this one waited.

        False where that one will not do, and where the job is tried again: that asks for another search. A job that was
        answered at once has a schedule before its first attempt.
        """
        if self.lease.share or self.lease.attempt > 1 or self.lease.best is not None:
            return False
        found = await self._meanwhile_beating(prepared.of_equal, row)
        if found is None:
            return False
        outcome = JobResult("succeeded", found, found.status, results.stop_reason(found, prepared.config))
        await self._store(lambda: self._end(outcome))
        return True

    def _threads(self, config: JobConfig) -> int:
        """Threads of this run's share: as many as a worker gives, and the rest in the last one."""
        return min(self._workplace.threads, config.workers - self.lease.share * self._workplace.threads)

    def _hear(self, event: Progress | FoundPlan | Heartbeat) -> None:
        """Callback in the solver's thread."""
        if not isinstance(event, Heartbeat):
            self._heard = event
            self._loop.call_soon_threadsafe(self._news.set)

    async def _follow(self, prepared: Prepared, solving: asyncio.Future[Searched]) -> None:
        """Send heartbeats with new incumbents until the solve ends."""
        solving.add_done_callback(lambda _: self._news.set())
        stored = self._best
        while not solving.done():
            await self._check_heard(prepared)
            best = self._best
            try:
                answer = await self._beat(best, stored=best is stored)
                stored = best
                if answer.better is not None:
                    await self._take_over(prepared, answer.better)
                if answer.cancel_requested:
                    self.cancel()
            except DatabaseGoneError:
                self._workplace.grace.database_lost()
                await self._rest(TRY_AGAIN_S)
            else:
                await self._rest(BEAT_S)

    async def _meanwhile_beating(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function in a thread; heartbeats keep the lease however long it takes."""
        working = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        while not (await asyncio.wait([working], timeout=BEAT_S))[0]:
            try:
                if (await self._beat(self._best, stored=True)).cancel_requested:
                    self.cancel()
            except DatabaseGoneError:
                self._workplace.grace.database_lost()
        return await working

    async def _beat(self, best: Found | None, *, stored: bool) -> Beat:
        """Send a heartbeat with a new incumbent, if any."""
        count = self._beats if self._beats >= COUNTED_TOGETHER else 0
        answer = await leases.beat(self._workplace.engine, self.lease, best, count, stored=stored)
        self._beats += 1 - count
        self._workplace.metrics.heartbeats.inc()
        self._workplace.grace.database_answered()
        return answer

    async def _take_over(self, prepared: Prepared, row: AnyRow) -> None:
        """Go on from what another worker has stored, timed and verified again."""
        try:
            theirs = await self._meanwhile_beating(prepared.load, row)
        except (OptPipeError, ValueError, TypeError, KeyError):
            self._log.exception("an incumbent of another worker is wrong")
            return
        best = self._best = await self._meanwhile_beating(prepared.better, theirs, self._best)
        assert best is not None
        prepared.feed(best)

    async def _rest(self, most_s: float) -> None:
        """Wait for an incumbent or the end of the solve, at most `most_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._news.wait()
        self._news.clear()

    async def _check_heard(self, prepared: Prepared) -> None:
        """Read the newest incumbent."""
        heard, self._heard = self._heard, None
        if heard is None:
            return
        try:
            found = await self._meanwhile_beating(prepared.read, heard)
        except OptPipeError as error:
            self._log.error("an incumbent is wrong", error=str(error))
            return
        self._best = await self._meanwhile_beating(prepared.better, found, self._best)

    async def _conclude(self, prepared: Prepared, solving: asyncio.Future[Searched]) -> None:
        """Store the result, or give the job back."""
        result: Searched | None = None
        try:
            result = solving.result()
            outcome = await self._meanwhile_beating(self._outcome, prepared, result)
        except SolverDiedError as error:
            outcome = replace(self._failed(prepared.better(error.best, self._best), str(error)), died=True)
        except OptPipeError as error:
            outcome = self._failed(self._best, str(error))
        except Exception as error:
            self._log.exception("a bug ended the solve")
            outcome = self._failed(self._best, f"a bug in the service ended the solve ({type(error).__name__}).")
        if self._leaving and not self._cancelled and outcome.stop_reason == "interrupted":
            await self._store(lambda: leases.give_back(self._workplace.engine, self.lease, outcome.found))
            self._log.info("job given back")
            return
        if self.lease.share:
            await self._store(lambda: self._end_share(outcome.found))
            return
        if result is not None and outcome.found is not None:  # first, for who submits it again once it has ended
            await self._keep(prepared, outcome.found, result)
        await self._store(lambda: self._end(outcome))

    def _outcome(self, prepared: Prepared, result: Searched) -> JobResult:
        found = prepared.better(result.found, self._best)
        if result.limit == "interrupted" and self._cancelled:
            return JobResult("cancelled", found, found.status if found else "no_solution", "interrupted")
        if found is None:
            return JobResult("failed", None, result.reason, result.limit, result.error, result.budgets_bytes)
        return JobResult("succeeded", found, found.status, None if found.status == "optimal" else result.limit)

    @staticmethod
    def _failed(found: Found | None, error: str) -> JobResult:
        return JobResult("failed", found, found.status if found else "no_solution", None, error)

    async def _end_share(self, found: Found | None) -> None:
        """Store what is better, and leave the end of the job to its primary worker."""
        await leases.beat(self._workplace.engine, self.lease, found, self._beats)
        await leases.end_share(self._workplace.engine, self.lease)
        self._log.info("share ended")

    async def _end(self, outcome: JobResult) -> None:
        await leases.end(self._workplace.engine, self.lease, outcome, self._beats)
        self._log.info("job ended", status=outcome.status, reason=outcome.reason, limit=outcome.stop_reason)

    async def _store(self, write: Callable[[], Awaitable[None]]) -> None:
        """Retry a write until the database is back."""
        while True:
            try:
                return await write()
            except DatabaseGoneError:
                await asyncio.sleep(TRY_AGAIN_S)

    async def _keep(self, prepared: Prepared, found: Found, result: Searched) -> None:
        """Keep the solution for equal problems, with the CPU time of its search; not during an outage."""
        config = prepared.config
        threads = self._threads(config)  # of helpers it is not known how long they searched
        cpu_seconds = cpu_seconds_given(config.time_limit_s, threads, result.limit, found.solve_seconds)
        with suppress(DatabaseGoneError):
            async with transaction(self._workplace.engine) as connection:
                await results.keep_solution(
                    connection, found, prepared.equality, config.method, cpu_seconds, self.lease.job_id
                )
