"""Workers and children that follow a script, what is heard of them, and what every method answers.

Workers: a solve finds GPipe's schedule at once and ends at the time limit of its job. One that is given a start goes on
from that, says so, and ends at once. So does one whose config is named like a file, as soon as the file is there. A job
named "kills" kills its worker at its end, one named "stuck" heeds nothing and never ends. They are never reachable over
HTTP.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from unittest.mock import patch
from uuid import UUID

import psycopg
import pytest

from api.jobs import worker_process
from api.jobs.database import end_tasks
from api.jobs.records import Job, JobConfig
from api.jobs.run import OnEvent, SolveRequest
from api.jobs.store import Store
from api.settings import Settings
from instances import uniform
from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.build import build_schedule
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.process import Child, ChildResult, Heartbeat, solve_in_child
from solver.process.channel import Limit
from solver.solution import Progress, Solution
from solver.solve import solve
from tests import clock
from tests.problems import KNOWN_OPTIMA
from tests.random_timings import exceeded, random_peaks_bytes
from tests.sample import examples

PATIENCE_S = 120.0
"""Time limit of a test for what comes much sooner on a machine that is not overloaded."""

LOOK_S = 0.05

HEARTBEAT_S = 3.0
"""Where a test counts attempts: a worker that a busy machine keeps waiting for a second is not given up."""

_seeds = count()

STEPS = 4
"""From the solver's thread to the loop, to the verifier's thread and back, and to the database."""

CONTINUED = "continued"
"""The method of a schedule that was given as a start."""

FIRST = "gpipe"


def scripted(task: SolveRequest, on_event: OnEvent) -> ChildResult:
    """The script."""
    limits = task.limits()
    method = CONTINUED if task.starts else FIRST
    orders = task.starts[0] if task.starts else published_orders(METHODS[FIRST], task.problem)
    on_event(found(task.problem, orders, method, limits.seconds))
    signal_file = Path(task.config.name or "/nowhere")
    while limits.seconds < limits.time_limit_s and not (task.starts or limits.cancel.requested or signal_file.exists()):
        on_event(Heartbeat(limits.seconds, None))
        time.sleep(0.02)
    if task.problem.name == "stuck":
        time.sleep(3600)
    if task.problem.name == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    limit: Limit = "interrupted" if limits.cancel.requested else "time"
    return ChildResult(build_schedule(task.problem, orders, 0.0, method, limits.seconds), "feasible", limit)


def found(problem: Problem, orders: Orders, method: str, seconds: float) -> Progress:
    """An incumbent as a child tells it."""
    schedule = build_schedule(problem, orders, 0.0, method, seconds)
    return Progress(Solution(orders, schedule.value_us, schedule.bound_us, method), seconds)


def job_named(name: str, microbatches: int = 4) -> Problem:
    """A small problem; each number of microbatches is another problem."""
    return uniform(2, microbatches, name=name)


class Workers:
    """Worker processes on one database, made quickly by forking one that has loaded everything."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.running: list[BaseProcess] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def start(self, end_s: float = worker_process.END_S) -> BaseProcess:
        """One more, which ends so long after SIGTERM at the latest."""
        worker = self._context.Process(target=_work, args=(_environment(self.settings), end_s))
        worker.start()
        self.running.append(worker)
        return worker

    def kill(self, worker: BaseProcess) -> None:
        """Kill -9, at once."""
        worker.kill()
        worker.join()
        self.running.remove(worker)

    def let_leases_end(self) -> None:
        """As if nobody had sent a heartbeat for an hour: R1 waits for that, other tests need not."""
        assert self.settings.database_url is not None
        with psycopg.connect(self.settings.database_url.get_secret_value()) as connection:
            connection.execute("UPDATE pgqueuer SET heartbeat = heartbeat - interval '1 hour'")


def _work(environment: dict[str, str], end_s: float) -> None:
    Thread(target=_end_with_the_tests, daemon=True).start()
    os.environ.update(environment)
    worker_process.END_S = end_s
    worker_process.run_worker(Settings.load(), solve=scripted)


def _end_with_the_tests() -> None:
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)


def _environment(settings: Settings) -> dict[str, str]:
    assert settings.database_url is not None
    return {
        "OPTPIPE_DATABASE_URL": settings.database_url.get_secret_value(),
        "OPTPIPE_HEARTBEAT_S": str(settings.heartbeat_s),
        "OPTPIPE_SOLVES": str(settings.solves),
    }


@contextmanager
def workers_on(settings: Settings) -> Iterator[Workers]:
    """Workers that end with the test."""
    workers = Workers(settings)
    try:
        yield workers
    finally:
        for worker in workers.running:
            worker.kill()
            worker.join()
            worker.close()


class Lateness:
    """Lateness of this machine: the steps of a promise may together take `allowed_s` longer.

    One step: the longest time that looking at the database and a short sleep took beyond it.
    """

    def __init__(self) -> None:
        self._worst_s = 0.0

    @property
    def allowed_s(self) -> float:
        return STEPS * self._worst_s

    async def watch(self, store: Store) -> None:
        """Look until cancelled."""
        while True:
            began_s = time.monotonic()
            await store.ping()
            await asyncio.sleep(LOOK_S)
            self._worst_s = max(self._worst_s, time.monotonic() - began_s - LOOK_S)


@asynccontextmanager
async def lateness(store: Store) -> AsyncIterator[Lateness]:
    """Seconds that a promise is allowed on top because the machine was busy with something else."""
    late = Lateness()
    watching = asyncio.create_task(late.watch(store))
    try:
        yield late
    finally:
        await end_tasks(watching)


async def submitted(store: Store, name: str, seconds: float, microbatches: int = 4, file: Path | None = None) -> UUID:
    """The id of a new job that takes so long, or until the file is there. None waits for the end of another one: each
    has a seed of its own."""
    config = JobConfig(time_limit_s=seconds, name=str(file or ""), seed=next(_seeds))
    return (await store.submit(job_named(name, microbatches), config)).job.id


async def until(store: Store, job_id: UUID, state: Callable[[Job], bool]) -> Job:
    """The job as soon as it is as it should be."""
    patience_s = time.monotonic() + PATIENCE_S
    job = await store.get(job_id)
    while not state(job):
        assert time.monotonic() < patience_s, f"still {job}"
        await store.events(job_id, after=job.revision, wait_s=1)
        job = await store.get(job_id)
    return job


PROBLEM, _ = KNOWN_OPTIMA["offload"]
Event = Progress | Heartbeat


@dataclass(frozen=True)
class Heard:
    """Messages of a solve, each with the second at which it came, its result, and the second of that.

    `waited_s`: how long the child, until it searched, and this process found no free processor.
    """

    events: list[tuple[float, Event]]
    result: ChildResult
    ended_s: float
    waited_s: float

    @property
    def incumbents(self) -> list[Solution]:
        return [event.solution for _, event in self.events if isinstance(event, Progress)]

    def check_best_is_kept(self) -> None:
        """The result is the best incumbent, valid, and better than the published schedule that came first."""
        schedule = self.result.schedule
        assert schedule is not None
        assert verify(schedule).ok
        assert schedule.value_us == min(incumbent.value_us for incumbent in self.incumbents)
        assert schedule.value_us < self.incumbents[0].value_us


class _StubbornChild(Child):
    """A child of `stubborn`. How long it found no free processor is noted whenever its parent asks."""

    def __init__(self) -> None:
        super().__init__("tests.promises.stubborn")
        self._kept_waiting_s: list[float] = []

    @property
    def kept_waiting_s(self) -> float:
        self._kept_waiting_s.append(super().kept_waiting_s)
        return self._kept_waiting_s[-1]

    @property
    def waited_s(self) -> float:
        """The wait that its parent has counted: from the beginning of the solve until it searched."""
        return self._kept_waiting_s[-1] - self._kept_waiting_s[0]

    def wait_until_loaded(self) -> None:
        patience_s = time.monotonic() + PATIENCE_S
        while not Path(self.folder, "loaded").exists():
            assert time.monotonic() < patience_s, "the child does not load"
            time.sleep(0.02)


def heard(
    method: str,
    limits: Limits,
    on_event: Callable[[Event], None] | None = None,
    loaded: bool = True,
    memory_limit_bytes: int | None = None,
) -> Heard:
    """Solve with a method of `stubborn`; `loaded`: the clock begins once the child has loaded what it can."""
    events: list[tuple[float, Event]] = []

    def listen(event: Event) -> None:
        events.append((limits.seconds, event))
        if on_event:
            on_event(event)

    # The parent knows its name too: a method that nobody knows is refused.
    known = {method: replace(METHODS["search"], name=method)}
    with patch.dict(METHODS, known), _StubbornChild() as child:
        if loaded:
            child.wait_until_loaded()
            limits = replace(limits, began=time.perf_counter())
        before_s = clock.waited_s()
        result = solve_in_child(PROBLEM, method, limits, memory_limit_bytes, on_event=listen, child=child)
    ended_s = time.perf_counter() - limits.began
    return Heard(events, result, ended_s, child.waited_s + max(0.0, clock.waited_s() - before_s))


PUBLISHED = [name for name, method in METHODS.items() if method.kind == "published"]
SEARCHES = [name for name in METHODS if name not in PUBLISHED]

TIMINGS = examples(1000)
"""Executions of every schedule, each under random durations of its own."""


def answer(problem: Problem, method: str, gap: float = 0.0) -> Schedule | None:
    """The schedule of a method within a second; None where it gives a reason, with numbers, for having none."""
    try:
        return solve(problem, method, Limits(1, gap=gap, workers=1))
    except (MethodError, InfeasibleError, NoSolutionError) as error:
        reason = str(error)
    assert re.search(r"(\d.*|proved: .*) Maybe ", reason)
    return None


def check(problem: Problem, schedule: Schedule, seed: int) -> None:
    """No rule is broken, the value is what the orders give, and no device exceeds its budget under random timings.

    Nor is the largest peak under any timing, which the verifier computes exactly, ever exceeded.
    """
    assert verify(schedule).ok
    assert schedule.problem == problem
    assert simulate(problem, schedule.orders).value_us == pytest.approx(schedule.value_us, rel=1e-9, abs=1e-9)
    peaks_bytes = random_peaks_bytes(problem, schedule.orders, TIMINGS, seed)
    assert not exceeded(problem, peaks_bytes)
    assert (peaks_bytes <= [device.peak_bytes_any_timing for device in schedule.devices]).all()
