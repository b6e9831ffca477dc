"""Before the first step: what the stages cost on this hardware, and the schedule to begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from optpipe.any_timing import any_timing_peak_bytes
from optpipe.problem import Objective, Problem
from optpipe.profile.chain import chain_of
from optpipe.profile.measured import Measured, measure
from optpipe.profile.subject import Subject
from optpipe.schedule import Schedule
from optpipe.train.launch import Launch
from optpipe.train.online.config import OnlineConfig
from optpipe.train.task import Task


@dataclass(frozen=True)
class Setting:
    """Where a schedule has to fit: everything about a problem but what ops cost.

    `budgets_bytes` are for activations, by device; None: what `memory_bytes` leaves, or no limit.
    """

    placement: Sequence[int]
    microbatches: int
    objective: Objective = "makespan"
    memory_bytes: int | None = None
    budgets_bytes: Sequence[int] | None = None

    def problem(self, measured: Measured) -> Problem:
        """The scheduling problem. Raises InputError where weights alone take more than the memory."""
        data = measured.problem(self.microbatches, self.memory_bytes).to_data() | {"objective": self.objective}
        if self.budgets_bytes is not None:
            data["devices"] = [{"memory_bytes": budget} for budget in self.budgets_bytes]
        return Problem.from_data(data)


def setting_of(config: OnlineConfig, schedule: Schedule | None, objective: Objective) -> Setting:
    """Placement and microbatches of the schedule; without one, as the configuration says."""
    if schedule is None:
        placement = config.placed()
        microbatches = config.microbatches or 2 * (max(placement) + 1)
    else:
        placement = tuple(stage.device for stage in schedule.problem.stages)
        microbatches = schedule.problem.microbatches
    return Setting(placement, microbatches, objective, config.memory_bytes)


def with_budgets_of(setting: Setting, schedule: Schedule, measured: Measured) -> Setting:
    """Where nobody says what memory there is: no device may take more than with this schedule, whatever the timing."""
    if setting.memory_bytes is not None:
        return setting
    problem, orders = setting.problem(measured), schedule.orders
    peaks = [any_timing_peak_bytes(problem, (d.compute, d.offload, d.reload), orders.waits) for d in orders.devices]
    return replace(setting, budgets_bytes=peaks)


def measure_before(task: Task, setting: Setting, launch: Launch, rounds: int) -> tuple[Measured, float]:
    """Measure the task's stages, built for this alone, and return with it the seconds that it took.

    Called by all processes together, with the same answer.
    """
    begin = perf_counter()
    inputs, targets = task.batch(0)
    subject = Subject(task.name, task.build_stages(), inputs[0], targets[0], task.loss)
    mine = {s for s, device in enumerate(setting.placement) if device in launch.own_devices}
    chain = chain_of(subject, launch.hardware, setting.microbatches, mine)
    measured = measure(subject, chain, setting.placement, launch.hardware, rounds, gather=launch.gather)
    return measured, perf_counter() - begin
