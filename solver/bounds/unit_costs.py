"""Costs of units (microbatches, or slices of them), as the bounds need them, and the longest paths of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from optpipe.kinds import CODE
from optpipe.problem import Floats, Ints, Problem
from optpipe.task_graph import TaskGraph, lower

LARGEST_SUM = 2.0**53
"""Bytes up to which sums in floats are exact; where all units of a device hold more, its budget is left out."""


@dataclass(frozen=True)
class UnitCosts:
    """Costs of every unit on every stage: arrays (stages, units), times in us, sizes in bytes.

    A stage that cannot split its backward has all of it in `backward`; one that has none has zeros. `whole` is what an
    activation holds between F and B while it is not offloaded, `staying` what never leaves of it, in any mode; `beside`
    what F needs beyond `whole`; `at_backward` the least that is there when B has started; `left` what W still holds;
    `gradients` those of a slice's keys and values. `to_top` is the longest time from the start of F to the end of F of
    the microbatch's last slice on the last stage, `from_top` that from there to the start of B.
    """

    problem: Problem
    forward: Floats
    backward: Floats
    weight: Floats
    offload: Floats
    reload: Floats
    whole: Floats
    staying: Floats
    beside: Floats
    at_backward: Floats
    left: Floats
    gradients: Floats
    to_top: Floats
    from_top: Floats

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """Costs of each class of units, and by them of each unit; made once for each problem object."""
        return problem.derived(cls._made)

    @classmethod
    def _made(cls, problem: Problem) -> Self:
        graph = lower(problem)
        costs = [values.astype(np.float64)[:, graph.unit_class] for values in _costs(graph)]
        costs += _paths(problem, costs[0], costs[1])
        return cls(problem, *costs)

    def turnaround_us(self, forward: int, backward: int, microbatch: int = 0) -> float:
        """The least time from the end of F of a microbatch on stage `forward` to the start of its B on `backward`.

        All F that follow, all B that come before, and the delays between them. Of slices, the last F and the last B.
        """
        first = microbatch * self.problem.slice_count
        last = first + self.problem.slice_count - 1
        return float(self.to_top[forward, last] - self.forward[forward, last] + self.from_top[backward, first])

    @cached_property
    def backward_order(self) -> Ints:
        """Units in the order of their backwards on each stage, where that of microbatches is given."""
        return self.problem.units_in_order("B")

    @property
    def longest_microbatch_us(self) -> float:
        """The longest time that a microbatch takes that has the pipeline to itself, up to its last W of stage 0."""
        back_us = self.by_slice(self.from_top + self.backward + self.weight)[0].max(axis=1)
        return float((self.by_slice(self.to_top)[0, :, 0] + back_us).max())

    @cached_property
    def heads_us(self) -> Floats:
        """From the start of F of a microbatch's first slice on stage 0 to that on each: (stages, microbatches)."""
        step = self.by_slice(self.forward)[:-1, :, 0] + self._delays_us("forward")
        return np.concatenate([np.zeros((1, self.problem.microbatches)), np.cumsum(step, axis=0)])

    @cached_property
    def tails_us(self) -> Floats:
        """From the end of a microbatch's last B, its first slice's, on each stage to the end of its W of stage 0."""
        step = self.by_slice(self.backward)[:-1, :, 0] + self._delays_us("backward")
        sums = np.concatenate([np.zeros((1, self.problem.microbatches)), np.cumsum(step, axis=0)])
        tails: Floats = sums + self.by_slice(self.weight)[0, :, 0]
        return tails

    def _delays_us(self, direction: str) -> Floats:
        return self.by_slice(lower(self.problem).delays_us[direction])[:, :, 0]

    def by_slice(self, values: Floats) -> Floats:
        """An array (stages, units) as one of (stages, microbatches, slices)."""
        return values.reshape(len(values), self.problem.microbatches, self.problem.slice_count)


def _costs(graph: TaskGraph) -> Sequence[NDArray[Any]]:
    """Costs of each stage and class of units, the least of any option, in the order of `UnitCosts`; 0 of no op."""
    times, sizes = {name: np.nan_to_num(us) for name, us in graph.times_us.items()}, graph.sizes_bytes
    backward, weight = times["backward_input"][:, 0], times["backward_weight"][:, 0]
    splits = graph.splits[:, None]
    there = ~np.isnan(graph.of_stages(graph.duration_us))
    changes = np.where(there[..., None], graph.of_stages(graph.device_bytes), 0)
    forward, backward_started, again, inside = (changes[CODE[kind]] for kind in ("F", "B", "C", "CB"))
    started, kept = forward[..., 0].min(axis=1), forward.sum(axis=-1)
    ahead = kept + again.sum(axis=-1) + backward_started[..., 0]
    least = np.where(there[CODE["CB"]], np.minimum(ahead, kept + inside[..., 0]), ahead).min(axis=1)
    waiting = (kept - sizes["copied"]).min(axis=1)
    left = np.where(there[CODE["W"], :, 0], sizes["backward_weight"][:, 0], 0)
    stages, has_modes = np.arange(len(kept)), graph.has_modes[:, None]
    whole = np.where(has_modes, waiting, kept[:, 0])
    return (
        times["forward"][:, 0],
        np.where(splits, backward, backward + weight),
        np.where(splits, weight, 0),
        *(np.where(has_modes, 0, times[copy][stages, graph.whole_option]) for copy in ("offload", "reload")),
        whole,
        waiting,
        started - whole,
        np.maximum(least, left),
        np.where(splits, left, 0),
        sizes["gradients_freed"][:, 0],
    )


def _paths(problem: Problem, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
    """`UnitCosts.to_top` and `from_top`: the longest paths over the stages and the slices of a microbatch.

    A path from F to B that turned back before the top would be no longer than one on to the top and back.
    """
    shape = len(problem.stages), problem.microbatches, problem.slice_count
    f, b = forward.reshape(shape), backward.reshape(shape)
    delays = {direction: us.reshape(len(us), *shape[1:]) for direction, us in lower(problem).delays_us.items()}
    to_top, from_top = f.copy(), np.zeros(shape)
    for s in reversed(range(shape[0])):
        for q in reversed(range(shape[2])):
            up, down = [], []
            if s + 1 < shape[0]:
                up.append(delays["forward"][s, :, q] + to_top[s + 1, :, q])
                down.append(from_top[s + 1, :, q] + b[s + 1, :, q] + delays["backward"][s, :, q])
            if q + 1 < shape[2]:
                up.append(to_top[s, :, q + 1])
                down.append(from_top[s, :, q + 1] + b[s, :, q + 1])
            if up:
                to_top[s, :, q] += np.max(up, axis=0)
                from_top[s, :, q] = np.max(down, axis=0)
    return to_top.reshape(forward.shape), from_top.reshape(forward.shape)
