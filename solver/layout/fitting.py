"""Memory of each rank of a strategy under a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from optpipe.cluster.costs import CostModel, CostModels, Work
from optpipe.cluster.layers import strategy_layers, strategy_partition
from optpipe.cluster.machine import Machine
from optpipe.cluster.memory import Held, MemoryModel
from optpipe.cluster.model import Model
from optpipe.cluster.rules import Rules
from optpipe.cluster.software import Software
from optpipe.cluster.strategy import Precision, Strategy
from optpipe.errors import (
    DeadlockError,
    InfeasibleError,
    InputError,
    Issue,
    MethodError,
    NoSolutionError,
    OrderError,
)
from optpipe.memory import planned_memory
from optpipe.ops import Orders
from optpipe.partition import Batching, build_problem, check_layer_modes
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.build import peak_budgets
from solver.layout.peaks import COUNTED, Counts, counts_in, enough_microbatches, peak_bytes
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.solution import Solution
from solver.solve import solve

SOLVE_S = 30.0
"""Time limit of a published schedule."""


@dataclass(frozen=True)
class Rank:
    """Memory of the ranks of one device of the pipeline, in bytes. `op_at_peak` runs when most is held."""

    device: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Activations, logits and what ops hold for a moment, at their peak under the schedule."""
    fragments: float
    """Reserved by the allocator, but not allocated."""
    context: float
    op_at_peak: str

    @property
    def allocated(self) -> float:
        """Bytes that the program allocates."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total(self) -> float:
        """Bytes that the device must have."""
        return self.allocated + self.fragments + self.context


@dataclass(frozen=True)
class Job:
    """A model on a machine: what a strategy is chosen for."""

    model: Model
    machine: Machine
    sequence: int
    global_batch: int
    software: Software
    software_name: str = ""

    def rules(self, gpus: int) -> Rules:
        """Rules of strategies on so many GPUs."""
        if gpus not in self._rules:
            node = self.machine.facts.gpus_per_node
            self._rules[gpus] = Rules(self.model, gpus, node, self.sequence, self.global_batch)
        return self._rules[gpus]

    @cached_property
    def _rules(self) -> dict[int, Rules]:
        return {}

    def is_legal(self, strategy: Strategy) -> bool:
        """True if a strategy breaks no rule."""
        return next(self.rules(strategy.gpus).faults(strategy), None) is None

    def require_rates(self, precisions: Iterable[Precision], *, offload: bool = False) -> None:
        """Raise InputError for a precision without a peak in the machine's facts, or copies without a rate."""
        name, facts = self.machine.name, self.machine.facts
        for precision in precisions:
            if getattr(facts, f"operations_{precision}_per_s") is None:
                known = [one for one in get_args(Precision) if getattr(facts, f"operations_{one}_per_s") is not None]
                detail = f"is {precision} but operations_{precision}_per_s of {name} is not known."
                raise InputError([Issue("precision", "no_rate", f"{detail} Maybe {' or '.join(known)}.")])
        if offload and not facts.host_rate:
            detail = f"is yes but host_bytes_per_s of {name} is not known. Maybe add it to the machine's facts."
            raise InputError([Issue("offload", "no_rate", detail)])

    @cached_property
    def _models(self) -> CostModels:
        return CostModels(self.model, self.machine.facts, self.sequence)

    def costs(self, strategy: Strategy) -> CostModel:
        """Costs of the model under a strategy."""
        return self._models.of(strategy)

    def slowdowns(self, strategy: Strategy) -> Work:
        """Inverse efficiencies of the machine in the strategy's precision."""
        return self.machine.efficiencies_of(strategy.precision, self.software_name).slowdowns

    def seconds(self, strategy: Strategy) -> float:
        """Predicted seconds of a step by the closed form of its schedule."""
        slowdowns = self.slowdowns(strategy)
        return float(self.costs(strategy).step(self.global_batch, slowdowns) @ slowdowns) + self.copies_s(strategy)

    def copies_s(self, strategy: Strategy) -> float:
        """Seconds of a step that wait for activations to reach the host and to come back.

        Between two F of a device, F and backward of a microbatch hide what leaves, and as much comes back. In the
        warm-up only F follows F, and in the cool-down a backward a backward.
        """
        if strategy.offload == "no":
            return 0.0
        m = strategy.microbatches(self.global_batch)
        memory = self.memory(strategy)
        copy_s = memory.activations() / self.machine.facts.host_rate
        passes = self.costs(strategy).devices() @ self.slowdowns(strategy)
        in_flight = np.array([memory.in_flight(device) for device in range(strategy.pipeline)])
        forward_s, total_s = passes[:, 0], passes.sum(1)
        ends = np.maximum(0, copy_s - forward_s) + np.maximum(0, copy_s - (total_s - forward_s))
        return float((m * np.maximum(0, copy_s - total_s) + in_flight * ends).max())

    def error(self, strategy: Strategy) -> float | None:
        """Median error of predictions on the machine; None where nothing was measured on it."""
        return self.machine.efficiencies_of(strategy.precision, self.software_name).median_error

    def memory(self, strategy: Strategy) -> MemoryModel:
        """Memory of the model under a strategy."""
        m = strategy.microbatches(self.global_batch)
        return MemoryModel(self.model, strategy, self.sequence, m, self.software)

    def held(self, strategy: Strategy) -> list[Held]:
        """Memory of each device of the pipeline at the peak of its schedule.

        Where blocks hide exchanges, or all activations leave, it is that of the closed form.
        """
        memory = self.memory(strategy)
        devices = memory.devices()
        if strategy.overlap == "yes" or strategy.offload == "yes":
            return devices
        peaks = self._peaks(strategy, memory).tolist()
        return [
            replace(held, activations=peak - held.logits - held.transient)
            for held, peak in zip(devices, peaks, strict=True)
        ]

    def _peaks(self, strategy: Strategy, memory: MemoryModel) -> NDArray[np.float64]:
        """Most bytes of activations on each device in the order of the strategy's schedule."""
        name, m = strategy.schedule, strategy.microbatches(self.global_batch)
        if name not in COUNTED:
            return np.array(peak_budgets(*_published_orders(self, strategy)), np.float64)
        m = enough_microbatches(name, strategy.pipeline, m)
        key = (name, strategy.pipeline, strategy.virtual, m)
        if key not in self._orders:
            problem = self.problem(strategy, budgets=False, microbatches=m)
            assert problem is not None, "only budgets can be too small"
            self._orders[key] = counts_in(problem, published_orders(METHODS[name], problem))
        return peak_bytes(self._orders[key], memory.stages(), memory.spread_bytes)

    @cached_property
    def _orders(self) -> dict[tuple[str, int, int, int], list[Counts]]:
        return {}

    def problem(
        self, strategy: Strategy, *, budgets: bool, microbatches: int | None = None, of: Schedule | None = None
    ) -> Problem | None:
        """The scheduling problem of a strategy; None if with budgets the states alone have no room.

        `microbatches`: of a step, if they are not those of the global batch. It has the offload and the activation
        modes of the schedule that it is made for (`of`), if any. Raises InputError for a mode that layers have not.
        """
        efficiencies = self.machine.efficiencies_of(strategy.precision, self.software_name)
        layers = strategy_layers(self.model, self.machine, strategy, self.sequence, self.software, efficiencies)
        if not budgets:
            layers = layers.model_copy(update={"memory_bytes": None})
        batching = Batching(strategy.microbatch_size, microbatches or strategy.microbatches(self.global_batch))
        leaves = strategy.offload == "yes" or (of is not None and any(device.offload for device in of.devices))
        modes = () if of is None else of.mode_names
        check_layer_modes(layers, modes, "schedule")
        return build_problem(layers, strategy_partition(self.model, strategy), batching, offload=leaves, modes=modes)


def ranks_of(job: Job, strategy: Strategy, schedule: str | Schedule) -> list[Rank]:
    """Memory of each device of the pipeline under a published schedule, or under the orders of another one.

    Raises InputError and MethodError where the schedule is for another pipeline.
    """
    if isinstance(schedule, Schedule):
        problem = job.problem(strategy, budgets=False, of=schedule)
        assert problem is not None, "only budgets can be too small"
        try:
            orders = schedule.orders_in(problem)
            found = Solution(orders, simulate(problem, orders).value_us, 0.0, "given").to_schedule(problem, 0.0)
        except (OrderError, DeadlockError) as error:
            detail = f"cannot run with these options: {error}. Maybe it was edited, or is of another job."
            raise InputError([Issue("schedule", "cannot_run", detail)]) from None
    else:
        found = published_schedule(job, replace(strategy, schedule=schedule))
    software = job.software
    ranks = []
    for device, held in enumerate(job.memory(strategy).devices()):
        peak, op = _peak(found, device)
        allocated = held.weights + held.gradients + held.optimizer + peak
        ranks.append(
            Rank(
                device,
                held.weights,
                held.gradients,
                held.optimizer,
                peak,
                allocated * (software.reserved - 1),
                software.context_bytes,
                op,
            )
        )
    return ranks


def published_schedule(job: Job, strategy: Strategy, max_ops: float = inf) -> Schedule:
    """The strategy's schedule within the memory that is left, if it keeps that: some take what there is. Else without.

    Where activations leave, that is AdaOffload's.

    Raises InputError where it has more than `max_ops`, before anything is built; MethodError where it is for another
    pipeline.
    """
    method = "ada-offload" if strategy.offload == "yes" else strategy.schedule
    ops = 3 * strategy.stages * strategy.microbatches(job.global_batch)
    if ops > max_ops:
        detail = f"has {ops:,} ops, and at most {max_ops:,} are drawn (max_ops). Maybe take a larger microbatch size."
        raise InputError([Issue("strategy", "too_many_ops", detail)])
    limits = Limits(time_limit_s=SOLVE_S)
    problem = job.problem(strategy, budgets=True)
    if problem is not None:
        with suppress(MethodError, InfeasibleError, NoSolutionError):
            return solve(problem, method, limits)
    problem = job.problem(strategy, budgets=False)
    assert problem is not None, "only budgets can be too small"
    return solve(problem, method, limits)


def _published_orders(job: Job, strategy: Strategy) -> tuple[Problem, Orders]:
    """The problem of a strategy and the orders of its schedule, those of `published_schedule`."""
    problem = job.problem(strategy, budgets=True)
    if problem is not None:
        with suppress(MethodError):
            return problem, published_orders(METHODS[strategy.schedule], problem)
    problem = job.problem(strategy, budgets=False)
    assert problem is not None, "only budgets can be too small"
    return problem, published_orders(METHODS[strategy.schedule], problem)


def _peak(schedule: Schedule, device: int) -> tuple[int, str]:
    """Most bytes of activations on a device under any timing, and the compute op that begins them as planned."""
    curve = planned_memory(schedule, device)
    at_us = float(curve.times_us[int(np.argmax(curve.bytes))])
    running = [op for op in schedule.devices[device].compute if op.start_us <= at_us]
    return schedule.devices[device].peak_bytes_any_timing, str(running[-1].key) if running else ""
