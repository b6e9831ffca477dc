"""The schedule to begin with: the given one, one in milliseconds, or the best of a search that all wait for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, sleep

from optpipe.errors import MethodError, NoSolutionError, RunFailedError, TrainingError
from optpipe.problem import Objective, Problem
from optpipe.profile.measured import Measured, without_margin
from optpipe.profile.op_times import OnRound
from optpipe.schedule import Schedule
from optpipe.train.config import OnlineConfig, TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.online.events import Events
from optpipe.train.online.search import Search
from optpipe.train.online.solver import Solver
from optpipe.train.online.start import Setting, measure_before, setting_of, within_what_is_taken
from optpipe.train.task import Task
from optpipe.train.tasks import task_of

LOG = logging.getLogger("optpipe.train.online")

NEWS_S = 1.0
"""Rank 0 says so often that it still searches: a wait of other processes has an end, however long a search may be."""

MESSAGES = 4
"""What is advised leaves room for so many messages: two each way, more than one microbatch at a time has waiting."""


@dataclass(frozen=True)
class First:
    """What training begins with: the schedule, where later ones have to fit, and what was measured of the task."""

    schedule: Schedule
    setting: Setting
    measured: Measured
    task: Task


def first_schedule(
    config: TrainingConfig, launch: Launch, solver: Solver | None, events: Events, interrupted: Callable[[], bool]
) -> First:
    """Measure, and find the schedule to begin with; called by all processes together, with the same answer.

    `solver` is rank 0's. Raises OptPipeError in every process where there is no schedule. Where a process was
    `interrupted` while ops were measured, KeyboardInterrupt in all of them; while rank 0 searches, in rank 0.
    """
    online, given = config.online, config.schedule
    setting = setting_of(online, given, _objective(config, launch))
    task = task_of(config, len(setting.placement), setting.microbatches)
    measured, seconds = measure_before(config, task, setting, launch, _heeding(interrupted, launch))
    if any(launch.gather(interrupted())):
        raise KeyboardInterrupt
    events.tell(0, "measured", f"measured every op in {online.rounds} rounds: {seconds:.2f} s", seconds)
    if given is not None:
        return First(given, within_what_is_taken(setting, given, measured), measured, task)
    begin = perf_counter()
    largest = max(measured.message_bytes, default=0)
    schedule = _from_rank_0(online, setting.problem(measured), largest, launch, solver, interrupted)
    while any(excess := setting.excess_bytes(schedule, measured)):
        setting = setting.reserving(excess)
        schedule = _from_rank_0(online, setting.problem(measured), largest, launch, solver, interrupted)
    seconds = perf_counter() - begin
    text = f"{schedule.method}: {schedule.value_us:,.0f} us a step predicted, found in {seconds:.2f} s"
    events.tell(0, "found", text, seconds)
    return First(schedule, setting, measured, task)


def _heeding(interrupted: Callable[[], bool], launch: Launch) -> OnRound:
    """Ends the measuring of one process that was interrupted before its next round.

    One of many says so and goes on: the others would wait for what it has measured, so all end together after it.
    """
    said = False

    def look(_round: int, _rounds: int) -> None:
        nonlocal said
        if said or not interrupted():
            return
        if not launch.distributed:
            raise KeyboardInterrupt
        said = True
        if launch.rank == 0:
            LOG.warning("interrupted: ending when all ops are measured; Ctrl-C again ends at once")

    return look


def _objective(config: TrainingConfig, launch: Launch) -> Objective:
    """What a step takes: a device's span where each updates its weights without waiting for the others."""
    return "device_span" if config.optimizer.optimistic and launch.distributed else "makespan"


def _from_rank_0(
    config: OnlineConfig,
    problem: Problem,
    message_bytes: int,
    launch: Launch,
    solver: Solver | None,
    interrupted: Callable[[], bool],
) -> Schedule:
    """The schedule that rank 0 finds; the others wait for it, or for the reason why there is none.

    `message_bytes` is the size of the largest message.
    """
    if launch.rank:
        while (news := launch.broadcast(None)) is None:
            pass
        if "error" in news:
            raise TrainingError(f"rank 0 found no schedule: {news['error']}")
        return Schedule.from_data(news["schedule"])
    try:
        if solver is None:
            raise TrainingError("a schedule is to be found, but no solver was given. Maybe use optpipe train --solve.")
        schedule = _quick(problem, config, message_bytes, solver)
        if config.mode == "first":
            schedule = _searched(config, problem, schedule, launch, solver, interrupted)
    except BaseException as error:
        with suppress(RunFailedError):  # if the others are gone, nobody is left to be told
            launch.broadcast({"error": str(error) or type(error).__name__})
        raise
    launch.broadcast({"schedule": schedule.to_data()})
    return schedule


def _quick(problem: Problem, config: OnlineConfig, message_bytes: int, solver: Solver) -> Schedule:
    """Raises NoSolutionError that speaks of the memory that the user gave, not of what it leaves for activations."""
    try:
        return solver.quick(problem)
    except MethodError as error:
        if config.memory_bytes is None:
            raise
        memory_bytes = without_margin(config.memory_bytes, config.memory_margin)
        budgets = [device.memory_bytes for device in problem.devices]
        least = [
            need + memory_bytes - budget + MESSAGES * message_bytes
            for need, budget in zip(solver.least_budgets_bytes(problem), budgets, strict=True)
            if budget is not None
        ]
        raise NoSolutionError(
            f"memory is {config.memory_bytes:,} bytes a device, which leaves {budgets} for activations: too few for "
            f"one microbatch at a time. Maybe {math.ceil(max(least) / (1 - config.memory_margin)):,} bytes, or more "
            "devices, or smaller microbatches."
        ) from error


def _searched(
    config: OnlineConfig,
    problem: Problem,
    start: Schedule,
    launch: Launch,
    solver: Solver,
    interrupted: Callable[[], bool],
) -> Schedule:
    """The best of a whole search, which begins at `start`."""
    search, said = Search(solver, config), perf_counter()
    search.begin(problem, start)
    try:
        while not search.over:
            sleep(0.02)
            if interrupted():
                raise KeyboardInterrupt
            if perf_counter() - said > NEWS_S:
                launch.broadcast(None)
                said = perf_counter()
        found = search.take()
        if found is None:
            LOG.warning("training begins with %s: %s", start.method, search.why_nothing)
        return found or start
    finally:
        search.cancel()
