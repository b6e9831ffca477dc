"""Initial schedule: costs measured before training, then solved or taken from a heuristic."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter, sleep

import numpy as np

from optpipe.assignment import Places
from optpipe.compile import compile_schedule
from optpipe.compile.memory import MessageBytes, memory_steps, planned_peaks_bytes
from optpipe.errors import InputError, Issue, MethodError, NoSolutionError, RunFailedError, TrainingError
from optpipe.mode_names import IN_LOW_PRECISION, OFFLOAD
from optpipe.problem import Floats, Objective, Problem
from optpipe.profile.measured import Measured, measure, without_margin
from optpipe.profile.ops import OnRound
from optpipe.profile.subject import Subject, build_chain, sampled
from optpipe.runtime.stage import check_splits
from optpipe.runtime.weight_gradients import compiled_part
from optpipe.schedule import Schedule
from optpipe.stage import UnitFactors
from optpipe.train.config import OnlineConfig, TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.lengths import SizeCosts, Sizes, typical
from optpipe.train.resolve.search import Search, Solver
from optpipe.train.result import Events
from optpipe.train.tasks import build_task
from optpipe.train.tasks.base import Task
from optpipe.units import bytes_text, time_text
from optpipe.worst_case_memory import worst_case_peak_bytes

LOG = logging.getLogger("optpipe.train.resolve")

HEARTBEAT_S = 1.0
"""Interval in which rank 0 signals that it still searches: a collective times out, a search may take longer."""

ADVISED_MESSAGES = 4
"""Messages for which the advised memory has room: two a direction, more than one microbatch at a time has waiting."""


@dataclass(frozen=True)
class Setting:
    """Constraints of every schedule of the run: everything about a problem except the costs of ops.

    `limits_bytes`: most that a device may hold of activations, workspaces and messages; None: what `memory_bytes`
    leaves after weights and optimizer, with the share `memory_margin` free, or no limit. Budgets of a problem do not
    count messages, so each is less by `reserved_bytes`. `factors`: of the microbatches of a step, where their sizes
    differ (`SizeCosts.factors`): they may run in any order.
    """

    placement: Sequence[int]
    microbatches: int
    objective: Objective = "makespan"
    memory_bytes: int | None = None
    memory_margin: float = 0.0
    limits_bytes: Sequence[int] | None = None
    reserved_bytes: Sequence[int] = ()
    factors: Floats | None = None

    def problem(self, measured: Measured) -> Problem:
        """Scheduling problem with measured costs. Raises InputError if weights alone exceed the memory."""
        problem = measured.problem(self.microbatches, self.memory_bytes, self.memory_margin)
        data = problem.to_data() | {"objective": self.objective}
        for stage in data["stages"]:  # of a compiled one: the heuristic would refuse it, and what is found is looked at
            stage.pop("split_backward", None)
        if self.factors is not None:
            entries = [dict(zip(UnitFactors._fields, column, strict=True)) for column in self.factors.T.tolist()]
            data |= {"microbatch_factors": entries, "microbatch_order": "free"}
        if self.limits_bytes is not None:
            data["devices"] = [{"memory_bytes": limit} for limit in self.limits_bytes]
        for device, reserved in zip(data["devices"], self.reserved_bytes, strict=False):
            if device["memory_bytes"] is not None:
                device["memory_bytes"] = max(0, device["memory_bytes"] - reserved)
        return Problem.from_data(data)

    def excess_bytes(self, schedule: Schedule, measured: Measured) -> list[int]:
        """Bytes by which each device would exceed its limit with this schedule, waiting messages included.

        Memory is taken and freed in the order of a device's program, so this holds under any timing.
        """
        unreserved = arranged(replace(self, reserved_bytes=()).problem(measured), schedule)
        messages = message_bytes(unreserved, measured)
        peaks = planned_peaks_bytes(compile_schedule(schedule), unreserved, messages)
        limits = [device.memory_bytes for device in unreserved.devices]
        return [0 if limit is None else max(0, peak - limit) for peak, limit in zip(peaks, limits, strict=True)]

    def reserving(self, bytes_: Sequence[int]) -> Setting:
        """Setting with this many more bytes of each device reserved for messages."""
        before = self.reserved_bytes or [0] * len(bytes_)
        return replace(self, reserved_bytes=[old + more for old, more in zip(before, bytes_, strict=True)])


def arranged(problem: Problem, schedule: Schedule) -> Problem:
    """The problem with the factors of its microbatches in the places of a schedule in which they are best.

    Where all are alike they run in the order of the schedule, whatever that was chosen for.
    """
    own = problem.microbatch_factors
    if own is None:
        in_order = schedule.microbatch_order is None
        return problem if in_order else problem.replaced(microbatch_order="free")
    program, orders = compile_schedule(schedule), schedule.orders_in(problem)
    factors = np.array([entry.by_name for entry in own], np.float64).T
    order = Places(problem, orders, memory_steps(program, problem)).assign(factors)
    return problem.replaced(microbatch_factors=[own[i] for i in order])


def message_bytes(problem: Problem, measured: Measured) -> MessageBytes:
    """Bytes of the message over each boundary, for each microbatch of the problem where these differ."""
    own = problem.microbatch_factors
    if own is None:
        return measured.message_bytes
    return [[math.ceil(size * entry.transfer) for entry in own] for size in measured.message_bytes]


def build_setting(config: OnlineConfig, schedule: Schedule | None, objective: Objective) -> Setting:
    """Placement and microbatches of the schedule; without one, as the configuration says."""
    if schedule is None:
        placement = config.placed()
        microbatches = config.microbatches or 2 * (max(placement) + 1)
    else:
        placement = tuple(stage.device for stage in schedule.problem.stages)
        microbatches = schedule.problem.microbatches
    return Setting(placement, microbatches, objective, config.memory_bytes, config.memory_margin)


def limited_to_peaks(setting: Setting, schedule: Schedule, measured: Measured) -> Setting:
    """Setting in which no device may take more than with this schedule under any timing, unless memory is given.

    Without `--memory` the given schedule is the only evidence of how much memory there is.
    """
    if setting.memory_bytes is not None:
        return setting
    problem = arranged(setting.problem(measured), schedule)
    orders = schedule.orders_in(problem)
    streams = [(device.compute, device.offload, device.reload) for device in orders.devices]
    peaks = [worst_case_peak_bytes(problem, own, orders.waits, orders.modes, orders.blocks) for own in streams]
    with_messages = planned_peaks_bytes(compile_schedule(schedule), problem, message_bytes(problem, measured))
    limits = [max(pair) for pair in zip(peaks, with_messages, strict=True)]
    return replace(setting, limits_bytes=limits, reserved_bytes=[a - b for a, b in zip(limits, peaks, strict=True)])


def measure_before(
    config: TrainingConfig, task: Task, setting: Setting, launch: Launch, on_round: OnRound
) -> tuple[Measured, float]:
    """Measure new copies of the task's stages as the config runs them; also returns the seconds that it took.

    Called by all processes together, with the same result except for the seconds. Raises InputError where stages do not
    fit one another, or modes are asked for that cannot be measured, TrainingError where training would begin with B and
    W apart on a compiled stage, and what `on_round` raises.
    """
    modes = [*dict.fromkeys([*config.online.mode_names, *(config.schedule.mode_names if config.schedule else ())])]
    if launch.hardware.type == "cuda" and any(mode not in (OFFLOAD, *IN_LOW_PRECISION) for mode in modes):
        detail = f"has {modes}, but recomputation is measured on CPUs alone so far. Maybe leave --online out."
        raise InputError([Issue("--modes", "not_measured", detail)])
    begin = perf_counter()
    batch, stages = list(zip(*task.batch(0), strict=True)), task.build_stages()
    if config.model.varies:  # the costs of the others are multiples of those of the longest
        batch = [max(batch, key=lambda pair: Sizes.of(pair[0]).elements)]
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
    own_stages = {s for s, device in enumerate(setting.placement) if device in launch.own_devices}
    chain = build_chain(subject, launch.hardware, setting.microbatches, own_stages, config.model.torch_autocast)
    measured = measure(
        subject,
        chain,
        setting.placement,
        launch.hardware,
        config.online.rounds,
        gather=launch.gather,
        on_round=on_round,
        modes=modes,
    )
    return measured, perf_counter() - begin


@dataclass(frozen=True)
class InitialSchedule:
    """Schedule that training begins with, constraints of later ones, and measurements of the task.

    `reference`: size of the microbatch that was measured.
    """

    schedule: Schedule
    setting: Setting
    measured: Measured
    task: Task
    reference: Sizes


def initial_schedule(
    config: TrainingConfig, launch: Launch, solver: Solver | None, events: Events, interrupted: Callable[[], bool]
) -> InitialSchedule:
    """Measure, and find the schedule to begin with; called by all processes together, with the same result.

    `solver` is rank 0's. Raises OptPipeError in every process if there is no schedule. If a process was `interrupted`
    while ops were measured, KeyboardInterrupt in all of them; while rank 0 searches, in rank 0.
    """
    online, given = config.online, config.schedule
    # Devices that update without a barrier start their next step as soon as they are done with this one: then the
    # longest span of a device is what a step costs (Zero Bubble, section 4).
    optimistic = config.optimizer.optimistic and launch.distributed
    setting = build_setting(online, given, "device_span" if optimistic else "makespan")
    task = build_task(config, len(setting.placement), setting.microbatches, launch)
    measured, seconds = measure_before(config, task, setting, launch, _ending_on_interrupt(interrupted, launch))
    if any(launch.gather(interrupted())):
        raise KeyboardInterrupt
    events.add(0, "measured", f"measured every op in {online.rounds} rounds: {seconds:.2f} s", seconds)
    sizes = [Sizes.of(inputs) for inputs in task.batch(0)[0]]
    reference = max(sizes, key=lambda size: size.elements) if config.model.varies else sizes[0]
    if config.model.varies:
        setting = replace(setting, factors=typical(SizeCosts().factors(sizes, reference), setting.microbatches))
    if given is not None:
        return InitialSchedule(given, limited_to_peaks(setting, given, measured), measured, task, reference)
    begin = perf_counter()
    largest = max(measured.message_bytes, default=0)
    schedule = _from_rank_0(online, setting.problem(measured), largest, launch, solver, interrupted)
    # Only the program of a schedule shows how many messages wait at its peak. A search that left too little room for
    # them is repeated with as much reserved; the reserve grows each time, so this ends, at worst with NoSolutionError.
    while any(excess := setting.excess_bytes(schedule, measured)):
        setting = setting.reserving(excess)
        schedule = _from_rank_0(online, setting.problem(measured), largest, launch, solver, interrupted)
    seconds = perf_counter() - begin
    text = f"{schedule.method}: {time_text(schedule.value_us)} a step predicted, found in {seconds:.2f} s"
    events.add(0, "found", text, seconds)
    return InitialSchedule(schedule, setting, measured, task, reference)


def _ending_on_interrupt(interrupted: Callable[[], bool], launch: Launch) -> OnRound:
    """Callback that ends the measuring of a single process at its next round after an interrupt.

    One process of many continues, because the others would wait for its measurements: all end together afterwards.
    """
    announced = False

    def end_if_interrupted(_round: int, _rounds: int) -> None:
        nonlocal announced
        if announced or not interrupted():
            return
        if not launch.distributed:
            raise KeyboardInterrupt
        announced = True
        if launch.rank == 0:
            LOG.warning("interrupted: ending when all ops are measured; Ctrl-C again ends at once")

    return end_if_interrupted


def _from_rank_0(
    config: OnlineConfig,
    problem: Problem,
    message_bytes: int,
    launch: Launch,
    solver: Solver | None,
    interrupted: Callable[[], bool],
) -> Schedule:
    """Schedule that rank 0 finds; other ranks wait for it, or for the reason why there is none.

    `message_bytes`: size of the largest message.
    """
    if launch.rank:
        while (answer := launch.broadcast(None)) is None:  # a heartbeat
            pass
        if "error" in answer:
            raise TrainingError(f"rank 0 found no schedule: {answer['error']}")
        return Schedule.from_data(answer["schedule"])
    try:
        if solver is None:
            raise TrainingError("a schedule is to be found, but no solver was given. Maybe use optpipe train --solve.")
        schedule = _quick(problem, config, message_bytes, solver)
        if config.mode == "first":
            schedule = _searched(config, problem, schedule, launch, solver, interrupted)
    except BaseException as error:
        with suppress(RunFailedError):  # the other ranks may have ended: the error to raise is this one
            launch.broadcast({"error": str(error) or type(error).__name__})
        raise
    launch.broadcast({"schedule": schedule.to_data()})
    return schedule


def _quick(problem: Problem, config: OnlineConfig, message_bytes: int, solver: Solver) -> Schedule:
    """Heuristic schedule. Raises NoSolutionError that advises a total memory, as the user gave it, not a budget."""
    try:
        return solver.quick(problem)
    except MethodError as error:
        if config.memory_bytes is None:
            raise
        memory_bytes = without_margin(config.memory_bytes, config.memory_margin)
        budgets = [device.memory_bytes for device in problem.devices]
        needs = [
            need + memory_bytes - budget + ADVISED_MESSAGES * message_bytes
            for need, budget in zip(solver.least_budgets_bytes(problem), budgets, strict=True)
            if budget is not None
        ]
        least_left = bytes_text(min(budget for budget in budgets if budget is not None))
        needed_bytes = math.ceil(max(needs) / (1 - config.memory_margin))
        raise NoSolutionError(
            f"memory is {bytes_text(config.memory_bytes)} a device, which leaves {least_left} for activations on the "
            f"fullest: too little for one microbatch at a time. Maybe {needed_bytes:,} bytes, or more devices, or "
            "smaller microbatches."
        ) from error


def _searched(
    config: OnlineConfig,
    problem: Problem,
    start: Schedule,
    launch: Launch,
    solver: Solver,
    interrupted: Callable[[], bool],
) -> Schedule:
    """Best schedule of a whole search that begins at `start`, which is returned if it finds nothing."""
    search, last_heartbeat_s = Search(solver, config), perf_counter()
    search.begin(problem, start)
    try:
        while not search.over:
            sleep(0.02)
            if interrupted():
                raise KeyboardInterrupt
            if perf_counter() - last_heartbeat_s > HEARTBEAT_S:
                launch.broadcast(None)
                last_heartbeat_s = perf_counter()
        found = search.take()
        if found is None:
            LOG.warning("training begins with %s: %s", start.method, search.why_nothing)
        return found or start
    finally:
        search.cancel()
