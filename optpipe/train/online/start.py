"""Before the first step: what the stages cost on this hardware, and where a schedule has to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from optpipe.any_timing import any_timing_peak_bytes
from optpipe.compile import compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.problem import Objective, Problem
from optpipe.profile.chain import chain_of
from optpipe.profile.measured import Measured, measure
from optpipe.profile.op_times import OnRound
from optpipe.profile.subject import Subject, sampled
from optpipe.schedule import Schedule
from optpipe.train.config import OnlineConfig, TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.task import Task


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


def setting_of(config: OnlineConfig, schedule: Schedule | None, objective: Objective) -> Setting:
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
    peaks = [any_timing_peak_bytes(problem, (d.compute, d.offload, d.reload), orders.waits) for d in orders.devices]
    held = held_bytes(schedule, problem, measured)
    limits = [max(pair) for pair in zip(peaks, held, strict=True)]
    return replace(setting, limits_bytes=limits, reserved_bytes=[a - b for a, b in zip(limits, peaks, strict=True)])


def measure_before(
    config: TrainingConfig, task: Task, setting: Setting, launch: Launch, on_round: OnRound
) -> tuple[Measured, float]:
    """Measure the task's stages as the config has them run, built for this alone; with it the seconds that it took.

    Called by all processes together, with the same answer but for the seconds. Raises InputError where stages do not
    fit one another, and what `on_round` raises.
    """
    begin = perf_counter()
    batch = list(zip(*task.batch(0), strict=True))
    subject = sampled(Subject(task.name, task.build_stages(), *batch[0], task.loss), batch)
    mine = {s for s, device in enumerate(setting.placement) if device in launch.own_devices}
    chain = chain_of(subject, launch.hardware, setting.microbatches, mine, config.model.torch_autocast)
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
