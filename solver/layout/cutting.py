"""Cuts layers into stages for a given placement: evenly by count, or balanced by time under memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf

from ortools.sat.python import cp_model

from optpipe.layers import Layer, LayerProfile
from optpipe.layout import work_us
from solver.exact.cp_sat.parameters import configured_solver, solve_unless_cancelled
from solver.limits import Limits

WORK_LIMIT = 5.0
"""CP-SAT's deterministic time for one search, about as many seconds on a quiet machine."""

TICKS = 10_000
"""The whole model's work in ticks of the balance: a device's share is exact to a ten-thousandth of it."""


def even_sizes(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers on each stage, the first ones taking what is left over: what frameworks do by default."""
    size, more = divmod(layers, stages)
    return tuple(size + (s < more) for s in range(stages))


def balanced_sizes(profile: LayerProfile, placement: Sequence[int], scale: float = 1.0) -> tuple[int, ...] | None:
    """Sizes of stages in layers for which the busiest device has the least work, then the longest stage the least.

    On every device the parameters and one microbatch's activations fit into the profile's memory; None where no cut is
    found that does that. `scale` is the microbatch's size in those of the profile. The busiest device's work bounds
    every schedule from below (m times it), which is why it comes first; equal stages make short warm-ups.
    """
    return Cutter(profile).sizes(placement, scale, Limits(inf))


class Cutter:
    """Balanced cuts of one profile's layers (see `balanced_sizes`).

    Sizes of microbatches that only lengthen all layers alike have one balance: it is searched once for a placement,
    and again under the memory limit only where it breaks that.
    """

    def __init__(self, profile: LayerProfile) -> None:
        self._profile = profile
        self._known: dict[tuple[tuple[int, ...], ...], tuple[int, ...] | None] = {}

    def sizes(self, placement: Sequence[int], scale: float, limits: Limits) -> tuple[int, ...] | None:
        """The sizes of stages, or None where there is no cut, or none was found within the limits."""
        layers, budget = self._profile.each_layer, self._profile.memory_bytes
        if len(layers) < len(placement):
            return None
        ticks, places = _prefix_ticks(layers, scale), tuple(placement)
        if (ticks, places) not in self._known:
            self._known[ticks, places] = _Cut(ticks, places).sizes(limits)
        sizes = self._known[ticks, places]
        held = [layer.parameter_bytes + int(scale * layer.activation_bytes) for layer in layers]
        if budget is None or (sizes and _most_held(sizes, places, held) <= budget):
            return sizes
        return _Cut(ticks, places, (0, *accumulate(held)), budget).sizes(limits)


def _most_held(sizes: Sequence[int], placement: Sequence[int], held: Sequence[int]) -> int:
    """The bytes of the fullest device, where each layer holds as many as `held` says."""
    ends = list(accumulate(sizes, initial=0))
    devices: dict[int, int] = defaultdict(int)
    for device, (begin, end) in zip(placement, pairwise(ends), strict=True):
        devices[device] += sum(held[begin:end])
    return max(devices.values())


class _Cut:
    """The places of the cuts as integers; what a stage sums up is a difference of prefix sums at two of them.

    `ticks` and `held` are such sums over the layers: of work, and of bytes, of which a device has `budget`.
    """

    def __init__(
        self, ticks: tuple[int, ...], placement: Sequence[int], held: tuple[int, ...] = (), budget: int = 0
    ) -> None:
        self.model = cp_model.CpModel()
        self.placement = placement
        count, stages = len(ticks) - 1, len(placement)
        inner = [self.model.new_int_var(s, count - stages + s, f"cut {s}") for s in range(1, stages)]
        self.cuts: list[cp_model.IntVar | int] = [0, *inner, count]
        for before, after in pairwise(self.cuts):
            self.model.add(after - before >= 1)
        self.ticks = ticks
        if held:
            self._add_memory(held, budget)
        self._add_objective()
        self._hint(even_sizes(count, stages))

    def sizes(self, limits: Limits) -> tuple[int, ...] | None:
        solver = configured_solver(replace(limits, workers=1))
        solver.parameters.max_deterministic_time = WORK_LIMIT
        solver.parameters.cp_model_presolve = False  # measured: on 50 stages it took all of the work and found nothing
        status, _ = solve_unless_cancelled(solver, self.model, limits.cancel)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        places = [solver.value(cut) for cut in self.cuts]
        return tuple(after - before for before, after in pairwise(places))

    def _add_objective(self) -> None:
        total = self.ticks[-1]
        busiest = self.model.new_int_var(0, total, "busiest device")
        longest = self.model.new_int_var(0, total, "longest stage")
        sums = self._stage_sums(self.ticks)
        for stages in self._stages_of():
            self.model.add(sum(sums[s] for s in stages) <= busiest)
        for one in sums:
            self.model.add(one <= longest)
        self.model.minimize((total + 1) * busiest + longest)

    def _add_memory(self, held: Sequence[int], budget: int) -> None:
        sums = self._stage_sums(held)
        for stages in self._stages_of():
            self.model.add(sum(sums[s] for s in stages) <= budget)

    def _stage_sums(self, prefix: Sequence[int]) -> list[cp_model.LinearExprT]:
        """For each stage, the sum over its layers of what `prefix` accumulates."""
        at: list[cp_model.IntVar | int] = [prefix[0]]
        for cut in self.cuts[1:-1]:
            value = self.model.new_int_var(0, prefix[-1], "")
            self.model.add_element(cut, prefix, value)
            at.append(value)
        at.append(prefix[-1])
        return [after - before for before, after in pairwise(at)]

    def _stages_of(self) -> list[list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for s, device in enumerate(self.placement):
            found[device].append(s)
        return list(found.values())

    def _hint(self, sizes: Sequence[int]) -> None:
        for cut, place in zip(self.cuts[1:-1], accumulate(sizes), strict=False):
            assert not isinstance(cut, int)
            self.model.add_hint(cut, place)


def _prefix_ticks(layers: Sequence[Layer], scale: float) -> tuple[int, ...]:
    """The work of all layers before each place, in ticks."""
    work = list(accumulate((work_us(layer, scale) for layer in layers), initial=0.0))
    return tuple(round(TICKS * value / work[-1]) for value in work) if work[-1] else (0,) * len(work)
