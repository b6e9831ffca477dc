"""Published schedules of few microbatches with their steady state repeated: starts whose time hardly depends on m.

Making a published schedule, and timing it, takes time in proportion to its microbatches. Their warm-up, cool-down and
period show with few. So where there are many each one is made for a few, in which every device does the same again for
every microbatch (or group of them); the one that promises most then has that period repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from optpipe.errors import DeadlockError, MethodError
from optpipe.orders import OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import Floats, simulate
from solver.methods import METHODS, published_orders

ROUNDS = 4
"""Microbatches a device of the few: a warm-up, a cool-down and a steady state between them."""

MANY = 2
"""So many times the few are many: with less there is nothing to save."""

WITH_COPIES = ("ada-offload", "po-h", "po-f")
"""Published schedules that plan transfers: what they make for a few takes as long as for many, or is not repeated."""


class Repeated(NamedTuple):
    """Orders of the published schedule `method` for all microbatches, and the value that its steady state promises."""

    method: str
    orders: Orders
    promise_us: float


def repeated_published(problem: Problem, good_enough_us: float) -> list[Repeated]:
    """Published schedules with a steady state that can be repeated, the most promising first; none if m is small.

    Those after one that promises `good_enough_us` are not looked at. Whether the orders keep their promise and the
    budgets is for the caller to find out by simulation.
    """
    devices = len(problem.devices)
    few = ROUNDS * devices + problem.microbatches % devices
    if problem.microbatches < MANY * few:
        return []
    found = []
    for repeated in _candidates(problem, problem.from_data(problem.to_data() | {"microbatches": few})):
        found.append(repeated)
        if repeated.promise_us <= good_enough_us:
            break
    return sorted(found, key=lambda repeated: repeated.promise_us)


def _candidates(problem: Problem, few: Problem) -> Iterator[Repeated]:
    for method in METHODS.values():
        if method.orders is None or method.name in WITH_COPIES:
            continue
        try:
            orders = published_orders(method, few)
            value, begins = _value_and_begins(few, orders)
        except (MethodError, DeadlockError):
            continue
        more = problem.microbatches - few.microbatches
        for group in (1, 2, len(problem.devices)):
            begin = (few.microbatches - group) // 2
            longer = None if more % group else lengthened(few, orders, begin, group, more // group)
            if longer is not None:
                period = float(begins[begin + group] - begins[begin]) / group
                yield Repeated(method.name, longer, value + more * period)
                break


def _value_and_begins(problem: Problem, orders: Orders) -> tuple[float, Floats]:
    """The value, and for each microbatch the start of its first F, in us."""
    simulation = simulate(problem, orders)
    first = (simulation.ops.kind == 0) & (simulation.ops.stage == 0)
    return simulation.value_us, simulation.start_us[first]


def lengthened(problem: Problem, orders: Orders, begin: int, group: int, copies: int) -> Orders | None:
    """Compute orders of `problem` with one period done `copies` times more, for ``copies * group`` more microbatches.

    A device's period goes from the F of microbatch `begin` to that of ``begin + group`` on its first stage. None where
    in that time some device does not run each of its passes `group` times: then that is no period.
    """
    devices = []
    for stages, device in zip(problem.stages_of, orders.devices, strict=True):
        ops = OpArray.of(device.compute)
        longer = _lengthened(ops, stages[0], begin, group, copies) if stages else ops
        if longer is None:
            return None
        devices.append(longer)
    return Orders.of_compute(devices)


def _lengthened(ops: OpArray, stage: int, begin: int, group: int, copies: int) -> OpArray | None:
    forwards = np.flatnonzero((ops.kind == 0) & (ops.stage == stage))
    first, behind = forwards[begin], forwards[begin + group]
    passes, counts = np.unique(np.stack([ops.kind, ops.stage])[:, first:behind], axis=1, return_counts=True)
    all_passes = np.unique(np.stack([ops.kind, ops.stage]), axis=1)
    if (counts != group).any() or passes.shape != all_passes.shape:
        return None
    places = np.arange(len(ops))
    period = places[first:behind]
    shift = np.repeat(group * np.arange(copies + 1), len(period))
    place = np.concatenate([places[:first], np.tile(period, copies + 1), places[behind:]])
    later = np.concatenate([np.zeros(first, np.int64), shift, np.full(len(ops) - behind, group * copies)])
    return OpArray(ops.kind[place], ops.stage[place], ops.microbatch[place] + later)
