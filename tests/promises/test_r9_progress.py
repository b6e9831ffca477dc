"""R9: heartbeats less than 1 s apart while a job is solved; an incumbent is stored within 1 s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from api.jobs.records import JobConfig
from api.jobs.run import OnEvent, SolveRequest
from api.jobs.store import Store
from api.jobs.worker import Worker
from api.settings import Settings
from instances import uniform
from optpipe.problem import Problem
from solver.build import build_schedule
from solver.methods import METHODS, published_orders
from solver.process import ChildResult
from tests.promises.harness import PATIENCE_S, found, lateness, until

BETTER_AND_BETTER = ("gpipe", "1f1b", "zb-h1", "zb-h2")
APART_S = 0.7
PROBLEM = uniform(4, 8)

LOOKS = 10
"""Least number of times that the age of the last heartbeat is looked at."""


async def test_it_is_seen_at_once(store: Store, settings: Settings) -> None:
    found_at: dict[str, datetime] = {}
    better = _each_better(PROBLEM)
    stored: set[str | None] = set()
    silences_s: list[float] = []

    def solve(task: SolveRequest, on_event: OnEvent) -> ChildResult:
        limits = task.limits()
        for method in BETTER_AND_BETTER:
            orders = published_orders(METHODS[method], task.problem)
            found_at[method] = datetime.now(UTC)
            on_event(found(task.problem, orders, method, limits.seconds))
            time.sleep(APART_S)
            _wait_until(lambda method=method: method in stored or method not in better)
        _wait_until(lambda: len(silences_s) > LOOKS)
        return ChildResult(build_schedule(task.problem, orders, 0.0, method, limits.seconds), "feasible", "time")

    worker = Worker(settings, solve)
    working = asyncio.create_task(worker.run())
    job_id = (await store.submit(PROBLEM, JobConfig())).job.id
    await until(store, job_id, lambda job: job.status == "running")
    async with lateness(store) as late:
        while (await store.get(job_id)).status == "running":
            silences_s.append((await store.counts()).heartbeat_age_s)
            stored |= {event.method for event in await store.events(job_id)}
            await asyncio.sleep(0.05)
    worker.stop()
    await working
    assert max(silences_s) < 1.0 + late.allowed_s
    assert len(silences_s) > LOOKS
    incumbents = [event for event in await store.events(job_id) if event.kind == "incumbent"]
    assert [event.method for event in incumbents] == better
    for event in incumbents:
        assert event.method is not None
        assert (event.at - found_at[event.method]).total_seconds() < 1.0 + late.allowed_s


def _wait_until(state: Callable[[], bool]) -> None:
    """In the solver's thread: what a slow machine has not seen yet is not passed over."""
    until_s = time.monotonic() + PATIENCE_S
    while not state() and time.monotonic() < until_s:
        time.sleep(0.02)


def _each_better(problem: Problem) -> list[str]:
    """The methods whose schedules are better than all before them."""
    best_us, better = float("inf"), []
    for method in BETTER_AND_BETTER:
        value_us = build_schedule(problem, published_orders(METHODS[method], problem), 0.0, method, 0.0).value_us
        if value_us < best_us:
            best_us = value_us
            better.append(method)
    return better
