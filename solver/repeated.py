"""Published schedules of few microbatches with their steady state repeated: starts whose time hardly depends on m.

Making a published schedule, and timing it, takes time in proportion to its microbatches. Their warm-up, cool-down and
period show with few. So where there are many it is made for a few, in which every device does the same again for every
microbatch (or group of them), and that period is repeated.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from optpipe.errors import MethodError
from optpipe.orders import OpArray, Orders
from optpipe.problem import Problem

ROUNDS = 4
"""Microbatches a device of the few: a warm-up, a cool-down and a steady state between them."""

MANY = 2
"""So many times the few are many: with less there is nothing to save."""


def repeated_published(make: Callable[[Problem], Orders], problem: Problem) -> Orders:
    """What `make` plans for a few microbatches, with its steady state repeated for all of the problem.

    Whether the orders keep the budgets is for the caller to find out by simulation. Raises MethodError where `make`
    does, where there are too few microbatches for this, or where nothing is periodic.
    """
    devices = len(problem.devices)
    few = ROUNDS * devices + problem.microbatches % devices
    if problem.microbatches < MANY * few:
        raise MethodError(f"{problem.microbatches} microbatches are too few to repeat a period of {few}.")
    short = problem.from_data(problem.to_data() | {"microbatches": few})
    orders = make(short)
    more = problem.microbatches - few
    for group in (1, 2, devices):
        longer = None if more % group else lengthened(short, orders, (few - group) // 2, group, more // group)
        if longer is not None:
            return longer
    raise MethodError("what is planned for few microbatches has no period to repeat.")


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
