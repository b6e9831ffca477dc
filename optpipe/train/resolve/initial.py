"""Initial schedule: costs measured before training, then solved or taken from a heuristic."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter, sleep

from optpipe.compile import compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.errors import MethodError, NoSolutionError, RunFailedError, TrainingError
from optpipe.problem import Objective, Problem
from optpipe.profile.measured import Measured, measure, without_margin
from optpipe.profile.ops import OnRound
from optpipe.profile.subject import Subject, build_chain, sampled
from optpipe.runtime.stage import check_splits
from optpipe.runtime.weight_gradients import compiled_part
from optpipe.schedule import Schedule
from optpipe.train.config import OnlineConfig, TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.resolve.search import Search, Solver
from optpipe.train.result import Events
from optpipe.train.tasks import build_task
from optpipe.train.tasks.base import Task
from optpipe.worst_case_memory import worst_case_peak_bytes


@dataclass(frozen=True)
class Setting:
    """Where a schedule has to fit: everything about a problem but what ops cost.

    `limits_bytes` are what a device may hold of activations, workspaces and messages; None: what `memory_bytes`
    leaves, its share `memory_margin` free, or no limit. A budget of the problem counts no messages, so it is less
    by `reserved_bytes`.
    """

    placement: Sequence[int]
    microbatches: int
    objective: Objective = "makespan"
    memory_bytes: int | None = None
    memory_margin: float = 0.0
    limits_bytes: Sequence[int] | None = None
    reserved_bytes: Sequence[int] = ()

    def problem(self, measured: Measured) -> Problem:
        """The scheduling problem. Raises InputError where weights alone take more than the memory."""
        problem = measured.problem(self.microbatches, self.memory_bytes, self.memory_margin)
        data = problem.to_data() | {"objective": self.objective}
        if self.limits_bytes is not None:
            data["devices"] = [{"memory_bytes": limit} for limit in self.limits_bytes]
        for device, reserved in zip(data["devices"], self.reserved_bytes, strict=False):
            if device["memory_bytes"] is not None:
                device["memory_bytes"] = max(0, device["memory_bytes"] - reserved)
        return Problem.from_data(data)

    def excess_bytes(self, schedule: Schedule, measured: Measured) -> list[int]:
        """By how much each device would exceed its limit with this schedule, messages that wait for their ops included.

        The list of a program alone decides what a device holds when, so this is the same under any timing.
        """
        whole = replace(self, reserved_bytes=()).problem(measured)
        limits, held = [device.memory_bytes for device in whole.devices], held_bytes(schedule, whole, measured)
        return [0 if limit is None else max(0, h - limit) for h, limit in zip(held, limits, strict=True)]

    def reserving(self, bytes_: Sequence[int]) -> Setting:
        """The same with so much more of each device kept for messages."""
        before = self.reserved_bytes or [0] * len(bytes_)
        return replace(self, reserved_bytes=[old + more for old, more in zip(before, bytes_, strict=True)])


def held_bytes(schedule: Schedule, problem: Problem, measured: Measured) -> list[int]:
    """The most that each device holds with this schedule and the sizes of a problem, messages included."""
    return planned_peaks_bytes(compile_schedule(schedule), problem, measured.message_bytes)


def build_setting(config: OnlineConfig, schedule: Schedule | None, objective: Objective) -> Setting:
    """Placement and microbatches of the schedule; without one, as the configuration says."""
    if schedule is None:
        placement = config.placed()
        microbatches = config.microbatches or 2 * (max(placement) + 1)
    else:
        placement = tuple(stage.device for stage in schedule.problem.stages)
        microbatches = schedule.problem.microbatches
    return Setting(placement, microbatches, objective, config.memory_bytes, config.memory_margin)


def within_what_is_taken(setting: Setting, schedule: Schedule, measured: Measured) -> Setting:
    """Where nobody says what memory there is: no device may take more than with this schedule, whatever the timing."""
    if setting.memory_bytes is not None:
        return setting
    problem, orders = setting.problem(measured), schedule.orders
    peaks = [worst_case_peak_bytes(problem, (d.compute, d.offload, d.reload), orders.waits) for d in orders.devices]
    held = held_bytes(schedule, problem, measured)
    limits = [max(pair) for pair in zip(peaks, held, strict=True)]
    return replace(setting, limits_bytes=limits, reserved_bytes=[a - b for a, b in zip(limits, peaks, strict=True)])


def measure_before(
    config: TrainingConfig, task: Task, setting: Setting, launch: Launch, on_round: OnRound
) -> tuple[Measured, float]:
    """Measure the task's stages as the config has them run, built for this alone; with it the seconds that it took.

    Called by all processes together, with the same answer but for the seconds. Raises InputError where stages do not
    fit one another, TrainingError where training would begin with B and W apart on a compiled stage, and what
    `on_round` raises.
    """
    begin = perf_counter()
    batch, stages = list(zip(*task.batch(0), strict=True)), task.build_stages()
    for s, stage in enumerate(stages):  # before the first forward, at which torch.compile starts
        if config.schedule is not None:
            check_splits(s, stage, {op.kind for op in config.schedule.orders.ops() if op.stage == s})
        elif config.online.mode == "online" and compiled_part(stage) is not None:
            # Not for --solve, whose search may find BW alone; the heuristic always has B and W.
            raise TrainingError(
                f"stages[{s}] is compiled by torch.compile, which computes input and weight gradients at once, but "
                "without a schedule training begins with B and W apart. Maybe give a schedule that fuses them, such as "
                "1f1b's, or use --solve, or compile less of the module."
            )
    subject = sampled(Subject(task.name, stages, *batch[0], task.loss), batch)
    mine = {s for s, device in enumerate(setting.placement) if device in launch.own_devices}
    chain = build_chain(subject, launch.hardware, setting.microbatches, mine, config.model.torch_autocast)
    measured = measure(
        subject,
        chain,
        setting.placement,
        launch.hardware,
        config.online.rounds,
        gather=launch.gather,
        on_round=on_round,
    )
    return measured, perf_counter() - begin


LOG = logging.getLogger("optpipe.train.resolve")

NEWS_S = 1.0
"""Rank 0 says so often that it still searches: a wait of other processes has an end, however long a search may be."""

MESSAGES = 4
"""What is advised leaves room for so many messages: two each way, more than one microbatch at a time has waiting."""


@dataclass(frozen=True)
class InitialSchedule:
    """What training begins with: the schedule, where later ones have to fit, and what was measured of the task."""

    schedule: Schedule
    setting: Setting
    measured: Measured
    task: Task


def initial_schedule(
    config: TrainingConfig, launch: Launch, solver: Solver | None, events: Events, interrupted: Callable[[], bool]
) -> InitialSchedule:
    """Measure, and find the schedule to begin with; called by all processes together, with the same answer.

    `solver` is rank 0's. Raises OptPipeError in every process where there is no schedule. Where a process was
    `interrupted` while ops were measured, KeyboardInterrupt in all of them; while rank 0 searches, in rank 0.
    """
    online, given = config.online, config.schedule
    setting = build_setting(online, given, _objective(config, launch))
    task = build_task(config, len(setting.placement), setting.microbatches)
    measured, seconds = measure_before(config, task, setting, launch, _heeding(interrupted, launch))
    if any(launch.gather(interrupted())):
        raise KeyboardInterrupt
    events.add(0, "measured", f"measured every op in {online.rounds} rounds: {seconds:.2f} s", seconds)
    if given is not None:
        return InitialSchedule(given, within_what_is_taken(setting, given, measured), measured, task)
    begin = perf_counter()
    largest = max(measured.message_bytes, default=0)
    schedule = _from_rank_0(online, setting.problem(measured), largest, launch, solver, interrupted)
    while any(excess := setting.excess_bytes(schedule, measured)):
        setting = setting.reserving(excess)
        schedule = _from_rank_0(online, setting.problem(measured), largest, launch, solver, interrupted)
    seconds = perf_counter() - begin
    text = f"{schedule.method}: {schedule.value_us:,.0f} us a step predicted, found in {seconds:.2f} s"
    events.add(0, "found", text, seconds)
    return InitialSchedule(schedule, setting, measured, task)


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
