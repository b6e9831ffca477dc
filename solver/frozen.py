"""Stages without a backward, for searches and bounds that know none: theirs takes no time, no memory and no message.

A schedule of the problem becomes one of `with_backwards(problem)`: the backward of a frozen stage is put where its
device is between two ops, once that of the stage behind it has ended. No op is later for it, so that the makespan
stays; to leave the backwards out again delays nothing. So the shortest makespans are equal, and a bound on one is a
bound on the other. A device's span may grow by an op without length at its end: of spans the bound is that of the
problem itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optpipe.kinds import codes, covering
from optpipe.ops import DeviceOrders, Op, OpArray, Orders, WaitArray
from optpipe.problem import DirectedTransfer, Problem
from optpipe.simulate import simulate
from optpipe.stage import Stage
from solver.bounds.lower_bound import lower_bound_us
from solver.build import orders_from_times, snapped_bound
from solver.scale import value_step_us
from solver.solution import Solution


def with_backwards(problem: Problem) -> Problem:
    """The problem whose frozen stages have a backward that costs nothing; itself where there are none."""
    frozen = sum(stage.backward == "none" for stage in problem.stages)
    return problem.derived(_with_backwards) if frozen else problem


def _with_backwards(problem: Problem) -> Problem:
    splits = any(stage.split_backward for stage in problem.stages if stage.backward == "full")
    stages = [stage if stage.backward == "full" else _costless(stage, splits) for stage in problem.stages]
    delays_us = [
        DirectedTransfer.model_construct(forward=forward, backward=backward if stage.backward == "full" else 0)
        for stage, forward, backward in zip(
            problem.stages[:-1], problem.forward_delay_us, problem.backward_delay_us, strict=True
        )
    ]
    return problem.replaced(stages=stages, transfer_us=delays_us)


def _costless(stage: Stage, splits: bool) -> Stage:
    """The stage with the same F, which holds its activation while it runs, and a backward that costs nothing."""
    work = stage.workspace_bytes
    return stage.replaced(
        backward="full",
        backward_input_us=0,
        backward_weight_us=0,
        activation_bytes=0,
        backward_weight_bytes=0,
        workspace_bytes=work.replaced(F=work.F + stage.activation_bytes, B=0, W=0, BW=0),
        offload=None,
        modes=[],
        split_backward=splits,
        slice_gradient_bytes=0,
    )


def orders_with_backwards(problem: Problem, orders: Orders) -> Orders:
    """Orders of a problem as orders of `with_backwards(problem)`."""
    simulation = simulate(problem, orders)
    times = zip(simulation.start_us.tolist(), simulation.end_us.tolist(), strict=True)
    planned = dict(zip(simulation.ops, times, strict=True))
    frozen = sum(stage.backward == "none" for stage in problem.stages)
    first = min(frozen, len(problem.stages) - 1)
    last_ops = covering("B" if first == frozen else "F")  # before the backward of the last frozen stage
    ends_us = {op.microbatch: end for op, (_, end) in planned.items() if op.stage == first and op.kind in last_ops}
    if first < frozen and problem.slice_count > 1:  # backwards of slices begin with the last, which may be any F's here
        ends_us = dict.fromkeys(ends_us, max(ends_us.values()))
    running = [sorted(planned[op] for op in device.compute) for device in orders.devices]
    for s in reversed(range(frozen)):
        own = running[problem.stages[s].device]
        ends_us = {unit: _between_ops(own, end_us) for unit, end_us in ends_us.items()}
        planned |= {Op("BW", s, unit): (end_us, end_us) for unit, end_us in ends_us.items()}
    return orders_from_times(with_backwards(problem), planned, 0.0, orders.modes, orders.microbatch_order)


def _between_ops(running: Sequence[tuple[float, float]], time_us: float) -> float:
    """The first time from `time_us` on at which none of a device's ops, in order of their times, is running."""
    last = bisect_left(running, (time_us, time_us)) - 1
    return max(time_us, running[last][1]) if last >= 0 else time_us


def orders_without_backwards(problem: Problem, orders: Orders) -> Orders:
    """Orders of `with_backwards(problem)` as orders of the problem."""
    frozen = np.array([stage.backward == "none" for stage in problem.stages])

    def kept(ops: OpArray) -> np.ndarray:
        of_frozen = frozen[np.where(ops.spread, 0, ops.stage)] & ~ops.spread  # the stage of a pass is a device
        return ~of_frozen | np.isin(ops.kind, codes(covering("F")))

    def left(ops: Sequence[Op]) -> OpArray:
        columns = OpArray.of(ops)
        return columns[np.flatnonzero(kept(columns))]

    waits = WaitArray.of(orders.waits)
    chosen = np.flatnonzero(kept(waits.op) & kept(waits.before))
    devices = [DeviceOrders(*map(left, device.streams())) for device in orders.devices]
    return replace(orders, devices=devices, waits=WaitArray(waits.op[chosen], waits.before[chosen]))


def solution_without_backwards(problem: Problem, solution: Solution) -> Solution:
    """A solution of `with_backwards(problem)` as one of the problem."""
    bound_us = solution.bound_us
    if problem.objective == "device_span" and not solution.infeasible:
        bound_us = problem.derived(lower_bound_us)
    if solution.orders is None:
        return replace(solution, bound_us=bound_us)
    orders = orders_without_backwards(problem, solution.orders)
    value_us = simulate(problem, orders).value_us
    bound_us = snapped_bound(value_us, bound_us, value_step_us(problem))
    return replace(solution, orders=orders, value_us=value_us, bound_us=bound_us)
