"""Bounds of one device: usable budget, its units, and knapsacks of work in memory.

Fractional knapsacks are filled greedily by time a byte (Dantzig 1957), those with a choice between states along upper
hulls (multiple choice, Sinha and Zoltners 1979). Such a relaxation is at least what any choice of whole units reaches,
so that it may stand in a proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Self

import numpy as np

from optpipe.kinds import CODE, WHOLE_BACKWARD
from optpipe.problem import Floats, Ints, Problem
from optpipe.stage import Stage
from optpipe.task_graph import lower
from solver.bounds.unit_costs import LARGEST_SUM, UnitCosts


class Knapsack:
    """Pieces of work by time and size, of which as much as possible is to fit, in parts too."""

    def __init__(self, times_us: Floats, sizes: Floats) -> None:
        used = times_us > 0
        times_us, sizes = times_us[used], sizes[used]
        with np.errstate(divide="ignore"):
            order = np.argsort(-times_us / sizes, kind="stable")
        taken = np.concatenate([[0.0], np.cumsum(sizes[order])])
        done_us = np.concatenate([[0.0], np.cumsum(times_us[order])])
        # Pieces of no size come first and need no room: of equal sizes the last counts.
        last = np.append(np.diff(taken) > 0, True)
        self.taken, self.done_us = taken[last], done_us[last]

    def most_us(self, room: float | Floats) -> Floats:
        """The most time within `room` (of each of several); 0 where it is negative."""
        most: Floats = np.where(np.less(room, 0), 0.0, np.interp(room, self.taken, self.done_us))
        return most


def most_held_us(
    times_us: Floats, rests_us: Floats, wholes: Floats, rests: Floats, room: float, *, in_parts: bool = False
) -> float:
    """The most work of units within `room`, each before its B (`wholes`), with W left (`rests`), or neither.

    In whole units where all are alike, unless `in_parts`; otherwise in parts, along the upper hull of the states of
    each.
    """
    if room < 0 or not times_us.size:
        return 0.0
    if not in_parts and room < inf and all(map(are_equal, (times_us, rests_us, wholes, rests))):
        time_us, rest_us, whole, rest = (float(values.flat[0]) for values in (times_us, rests_us, wholes, rests))
        # Every number of units before B, with as many with W left as fit.
        before = np.arange(int(min(times_us.size, room // whole) if whole else times_us.size) + 1)
        after = times_us.size - before
        if rest:
            after = np.minimum(after, (room - before * whole) // rest)
        return float((before * time_us + after * rest_us).max())
    with np.errstate(divide="ignore", invalid="ignore"):
        rest_rate = np.where(rests > 0, rests_us / rests, inf)
        whole_rate = np.where(wholes > 0, times_us / wholes, inf)
    only_whole = (rests >= wholes) | (rest_rate < whole_rate)
    pieces_us = np.concatenate([times_us[only_whole], rests_us[~only_whole], (times_us - rests_us)[~only_whole]])
    sizes = np.concatenate([wholes[only_whole], rests[~only_whole], (wholes - rests)[~only_whole]])
    return float(Knapsack(pieces_us, sizes).most_us(room))


def are_equal(values: Floats) -> bool:
    """True if all values are the same."""
    return bool((values == values.flat[0]).all())


def ended_before(held: Floats | Ints, room: Floats | Ints, order: Ints | Sequence[int]) -> Ints:
    """For each unit how many must have ended when it begins, of all before it, for the others to fit in its `room`.

    Units begin in ascending order and end in `order`; each has `held` bytes from its begin to its end. More than have
    begun may be asked for: then there is no schedule.
    """
    begun = np.cumsum(held) - held
    ended = np.concatenate([[0], np.cumsum(held[order])])
    counts: Ints = np.maximum.accumulate(np.searchsorted(ended, begun - room, side="left"))
    return counts


def usable_bytes(problem: Problem, device: int) -> float:
    """The device's budget, rounded down to the greatest common divisor of all changes on it; infinite without one.

    Every level of memory is a sum of such changes, so nothing that keeps the budget exceeds this.
    """
    budget = problem.devices[device].memory_bytes
    if budget is None:
        return float("inf")
    graph = lower(problem)
    there = ~np.isnan(graph.of_stages(graph.duration_us))[:, list(problem.stages_of[device])]
    changes = graph.of_stages(graph.device_bytes)[:, list(problem.stages_of[device])]
    divisor = int(np.gcd.reduce(changes[there], axis=None))
    return budget - budget % divisor if divisor else budget


class OnDevice:
    """The device that holds the stages `numbers`, with costs of its units: arrays (its stages, units).

    `out_rate`, `in_rate`: the most bytes that copies move in a us, to the host and back.
    """

    def __init__(self, costs: UnitCosts, numbers: Sequence[int]) -> None:
        self.costs, self.numbers, self.problem = costs, numbers, costs.problem
        self.low, self.high = numbers[0], numbers[-1]
        own = list(numbers)
        self.forward, self.backward, self.weight = (us[own] for us in (costs.forward, costs.backward, costs.weight))
        self.offload, self.reload = costs.offload[own], costs.reload[own]
        self.whole, self.staying, self.left = (size[own] for size in (costs.whole, costs.staying, costs.left))
        self.gradients = costs.gradients[own]
        self.budget = usable_bytes(self.problem, self.problem.stages[self.low].device)
        if float((self.whole + self.left + self.gradients).sum()) + self.budget >= LARGEST_SUM:
            self.budget = inf
        moved = self.whole - self.staying
        self.copies = bool((moved > 0).any())
        with np.errstate(divide="ignore"):
            self.out_rate, self.in_rate = (
                float((moved[moved > 0] / copy_us[moved > 0]).max(initial=0.0))
                for copy_us in (self.offload, self.reload)
            )

    @classmethod
    def each(cls, problem: Problem) -> Sequence[Self]:
        """One instance for each device that has stages; made once for each problem object."""
        return problem.derived(cls._each)

    @classmethod
    def _each(cls, problem: Problem) -> Sequence[Self]:
        costs = UnitCosts.of(problem)
        return [cls(costs, numbers) for numbers in problem.stages_of if numbers]

    @cached_property
    def stages(self) -> Sequence[Stage]:
        """The stages of this device, first to last."""
        return [self.problem.stages[s] for s in self.numbers]

    def value_us(self, span_us: float, to_last_backward_us: float) -> float:
        """Lower bound on the objective, from two bounds: on the device's span, and on that up to its last backward.

        Head and tail of a device (Carlier 1982): the device of stage 0 begins earlier by F of the stages before this
        device, and after its last backward the gradient still passes B of these, and W of stage 0 follows. For the
        makespan the device's own span begins after that head as well. In a free order the first and the last microbatch
        may be any.
        """
        heads_us, tails_us = self.costs.heads_us[self.low], self.costs.tails_us[self.low]
        head_us, tail_us = (
            (float(heads_us.min()), float(tails_us.min()))
            if self.problem.has_free_order
            else (float(heads_us[0]), float(tails_us[-1]))
        )
        through_us = head_us + to_last_backward_us + tail_us
        return max(through_us, span_us + (head_us if self.problem.objective == "makespan" else 0.0))


def longest_chain_us(problem: Problem) -> float:
    """One microbatch alone: F through all stages, B back through all, then the W of the first stage.

    A bound on the makespan; on the span of the device of the first stage too, since that chain begins and ends there.
    """
    return UnitCosts.of(problem).longest_microbatch_us


def split_backward_suffices(problem: Problem) -> bool:
    """True if some optimum has no fused backward, so that what is proved of split ones holds for all.

    B with W right behind it does all that BW does, no later, and hands its gradient over earlier. The microbatches stay
    in order: a BW counts as a B (docs/adr/0006), and the W of a stage may be put in order among themselves, since all
    of them are alike. Only where a budget counts and BW needs less memory on top of the activation than B and W do,
    fusing can be worth it; and a stage that cannot split its backward has fused ones alone.
    """
    return not any(fusing_may_help(problem, s) for s in range(len(problem.stages)))


def fusing_may_help(problem: Problem, s: int) -> bool:
    """True if BW of a stage may keep a budget that B and W of it do not, or if the stage cannot split its backward.

    On the other stages all may be split. Besides what a backward holds of the activation, B needs its workspace, or
    what it leaves for W, and W its own on top of that; BW needs its own workspace. A backward that recomputes within
    itself holds less than the activation, and maybe less than what B leaves. Where W of units differ, it matters which
    is first: B(i) BW(j) W(i) runs W of j before that of i, as no B and W in order do. Blocks have a BW.
    """
    graph = lower(problem)
    if not graph.trained[s]:
        return False
    if any(s == backward for _, backward in problem.block_us):
        return True
    weight = graph.type_of("W", s, 0, 0) + np.arange(graph.shape[3])
    costs = np.column_stack([graph.duration_us[weight], graph.device_bytes[weight]])
    # A fused backward may overtake a W that is longer, or frees less, than its own.
    if not graph.splits[s] or (costs != costs[0]).any():
        return True
    if problem.devices[graph.device[s]].memory_bytes is None:
        return False
    changes = graph.of_stages(graph.device_bytes)[:, s]
    for half, whole in WHOLE_BACKWARD.items():
        options = [option for option in range(graph.options[s]) if graph.has(half, s, option)]
        parts = np.concatenate([changes[CODE[half], options], changes[CODE["W"], options, :, :1]], axis=-1)
        if (np.cumsum(parts, axis=-1).max(axis=-1) > changes[CODE[whole], options, :, 0]).any():
            return True
    return False
