"""A schedule for another number of microbatches, or for other activation modes.

For another number of microbatches its steady state is repeated, or cut short.

In the steady state of a schedule each device does the same again for every group of n microbatches. What a device does
from the F of microbatch a to that of a + n, on all its streams, can be done k times more, or left out. Warm-up and
cool-down stay as they are. Whether the steady state is there is not asked: what comes out is simulated and held to
the budgets, and where it fails another a or n is tried. That includes activation modes: a microbatch is in the mode of
the one whose F its own repeats.

For other activation modes each microbatch takes the mode that keeps the most similar share of the activation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import NamedTuple

import numpy as np

from optpipe.errors import DeadlockError, OrderError
from optpipe.kinds import COPIES, PLAIN_BACKWARD
from optpipe.ops import DeviceOrders, Ints, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.stage import Stage
from solver.build import orders_from_times, within_budgets
from solver.scale import count_ops

Planned = dict[Op, tuple[float, float]]

GROUPS = (1, 2, 3, 4)
"""Sizes of the groups of microbatches that are tried as one period of a steady state, besides one for each device."""

PLACES = (0.5, 0.4, 0.65)
"""Positions at which a period is sought, as shares of the microbatches."""


class Kept(NamedTuple):
    """A mode of the problem that orders come from: the share of the activation that it keeps, and if any leaves."""

    share: float
    leaves: bool


PLAN_S_PER_OP = 1e-5
"""Seconds to repeat a period, order the ops by their times and judge the result, per op (8 us measured on one core)."""


def adapt_orders(
    problem: Problem,
    orders: Orders,
    microbatches: int,
    others: Sequence[Sequence[Kept]] | None = None,
    allowed_s: float = float("inf"),
) -> Orders | None:
    """The best orders for `problem` that can be had from `orders` for so many `microbatches`, else None.

    The problem that they were made for may have had other budgets too, and other activation modes, which `others` says
    for each stage in the order of its choices. Nothing else may differ. For another number of microbatches no further
    period is tried that is not likely to be done within `allowed_s`.
    """
    until_s = perf_counter() + allowed_s
    plan_s = PLAN_S_PER_OP * count_ops(problem)
    if others is None and microbatches == problem.microbatches:
        return orders if _value_us(problem, orders) is not None else None
    if not problem.has_equal_microbatches:  # then a steady state is not the same for every unit
        return None
    source = problem.with_microbatches(microbatches)
    if microbatches != problem.microbatches and plan_s > allowed_s:
        return None
    try:
        orders = orders if others is None else _in_modes_of(source, orders, others)
        planned = _times(source, orders)
    except (DeadlockError, OrderError):
        return None
    if microbatches == problem.microbatches:
        made = orders_from_times(problem, planned, modes=orders.modes)
        return made if _value_us(problem, made) is not None else None
    best: tuple[float, Orders | None] = (float("inf"), None)
    for plan, origin in _plans(problem, planned, microbatches):
        if origin.shape[1] < problem.microbatches:  # some F is missing
            continue
        modes = None if orders.modes is None else orders.modes[np.arange(len(problem.stages))[:, None], origin]
        made = orders_from_times(problem, plan, tolerance=1e-9 * max(end for _, end in plan.values()), modes=modes)
        value = _value_us(problem, made)
        if value is not None and value < best[0]:
            best = (value, made)
        if perf_counter() + plan_s > until_s:
            break
    return best[1]


def _in_modes_of(problem: Problem, orders: Orders, others: Sequence[Sequence[Kept]]) -> Orders:
    """Orders, without waits, in which each activation has the most similar mode of this problem.

    What the new mode does not do is left out; where it does not recompute inside the backward, it does so before.
    """
    if orders.modes is None:
        return replace(orders, waits={})
    most_similar = [
        [_most_similar(stage, mode) for mode in modes] for stage, modes in zip(problem.stages, others, strict=True)
    ]
    modes = np.array([[most_similar[s][k] for k in row] for s, row in enumerate(orders.modes.tolist())], np.int64)

    def converted(ops: Sequence[Op]) -> Iterator[Op]:
        for op in ops:
            mode = problem.stages[op.stage].choices[modes[op.stage, op.microbatch]]
            if (op.kind in COPIES and not mode.offload) or (op.kind == "C" and not mode.recomputes):
                continue
            if op.kind in PLAIN_BACKWARD and mode.segment_bytes is None:
                if mode.recomputes:
                    yield Op("C", op.stage, op.microbatch)
                yield Op(PLAIN_BACKWARD[op.kind], op.stage, op.microbatch)
            else:
                yield op

    devices = [DeviceOrders(*(list(converted(ops)) for ops in device.streams())) for device in orders.devices]
    channels = [list(converted(ops)) for ops in orders.channels]
    return Orders(devices, {}, channels, modes if problem.has_modes else None)


def _most_similar(stage: Stage, other: Kept) -> int:
    """The choice of a stage that is most like a mode of another problem; it leaves only if that one does."""
    choices = [k for k, mode in enumerate(stage.choices) if bool(mode.offload) == other.leaves]
    choices = choices or [k for k, mode in enumerate(stage.choices) if not mode.offload]
    whole = stage.activation_bytes or 1
    return min(choices, key=lambda k: abs(stage.choices[k].kept_bytes / whole - other.share))


def _value_us(problem: Problem, orders: Orders) -> float | None:
    """The value of orders that keep the budgets; None for those that do not, or are none of this problem."""
    try:
        simulation = simulate(problem, orders)
        return simulation.value_us if within_budgets(problem, orders, simulation) else None
    except (DeadlockError, OrderError):
        return None


def _times(problem: Problem, orders: Orders) -> Planned:
    simulation = simulate(problem, orders)
    times = zip(simulation.start_us.tolist(), simulation.end_us.tolist(), strict=True)
    return dict(zip(simulation.ops, times, strict=True))


def _plans(problem: Problem, planned: Planned, microbatches: int) -> Iterator[tuple[Planned, Ints]]:
    """Plans for the problem's microbatches, each with the microbatch of `planned` whose F is repeated.

    That is an array (stages, microbatches).
    """
    more = problem.microbatches - microbatches
    if more < 0:
        yield _first(planned, problem.microbatches), np.arange(problem.microbatches)[None, :]
    for place in PLACES:
        for group in (*GROUPS, len(problem.devices)) if more > 0 else (-more,):
            begin = round(place * (microbatches - group))
            if begin < 0 or begin + group >= microbatches:
                continue
            copies = ceil(more / group) if more > 0 else -1
            plan, origin = _repeated(planned, begin, group, copies)
            yield (_first(plan, problem.microbatches) if more % group else plan), origin[:, : problem.microbatches]


def _first(planned: Planned, microbatches: int) -> Planned:
    """Without the last microbatches: valid whatever the schedule, but the place of what is left out stays empty."""
    return {op: times for op, times in planned.items() if op.microbatch < microbatches}


def _repeated(planned: Planned, begin: int, group: int, copies: int) -> tuple[Planned, Ints]:
    """The plan with one period done `copies` times more (-1: left out), and the microbatch that each F repeats.

    The period of each kind of op of each stage holds those of the `group` microbatches that follow the last one that
    has started when stage 0 runs F `begin`. Where the schedule is not quite periodic there, the plan is not quite right
    either, but its order may be.
    """
    here_us, next_us = planned[Op("F", 0, begin)][0], planned[Op("F", 0, begin + group)][0]
    first: Counter[tuple[str, int]] = Counter()
    for op, (start, _) in planned.items():
        if start < here_us:
            first[op.kind, op.stage] = max(first[op.kind, op.stage], op.microbatch + 1)
    result: Planned = {}
    origin = {}
    for op, (start, end) in planned.items():
        beyond = op.microbatch - first[op.kind, op.stage]
        if beyond < 0:
            shifts = range(1)
        elif beyond < group:
            shifts = range(copies + 1)
        else:
            shifts = range(copies, copies + 1)
        for k in shifts:
            shift_us = k * (next_us - here_us)
            later = Op(op.kind, op.stage, op.microbatch + k * group)
            result[later] = (start + shift_us, end + shift_us)
            if op.kind == "F":
                origin[op.stage, later.microbatch] = op.microbatch
    stages, microbatches = (1 + max(column) for column in zip(*origin, strict=True))
    table = np.array([[origin.get((s, i), 0) for i in range(microbatches)] for s in range(stages)])
    return result, table
