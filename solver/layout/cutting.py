"""Cuts layers into stages for a given placement: evenly by count, or balanced by time under memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ortools.sat.python import cp_model

from optpipe.layers import Layer, LayerProfile
from optpipe.layout import work_us

WORK_LIMIT = 5.0
"""CP-SAT's deterministic time for one cut, about as many seconds."""

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
    layers = profile.each_layer
    if len(layers) < len(placement):
        return None
    return _Cut(profile, layers, placement, scale).sizes()


class _Cut:
    """The places of the cuts as integers; what a stage sums up is a difference of prefix sums at two of them."""

    def __init__(self, profile: LayerProfile, layers: Sequence[Layer], placement: Sequence[int], scale: float) -> None:
        self.model = cp_model.CpModel()
        self.placement = placement
        count, stages = len(layers), len(placement)
        inner = [self.model.new_int_var(s, count - stages + s, f"cut {s}") for s in range(1, stages)]
        self.cuts: list[cp_model.IntVar | int] = [0, *inner, count]
        for before, after in pairwise(self.cuts):
            self.model.add(after - before >= 1)
        self.ticks = _prefix_ticks(layers, scale)
        self._add_memory(profile, layers, scale)
        self._add_objective()
        self._hint(even_sizes(count, stages))

    def sizes(self) -> tuple[int, ...] | None:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = WORK_LIMIT
        solver.parameters.cp_model_presolve = False  # measured: on 50 stages it took all of the work and found nothing
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
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

    def _add_memory(self, profile: LayerProfile, layers: Sequence[Layer], scale: float) -> None:
        if profile.memory_bytes is None:
            return
        held = [layer.parameter_bytes + int(scale * layer.activation_bytes) for layer in layers]
        sums = self._stage_sums([0, *accumulate(held)])
        for stages in self._stages_of():
            self.model.add(sum(sums[s] for s in stages) <= profile.memory_bytes)

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


def _prefix_ticks(layers: Sequence[Layer], scale: float) -> list[int]:
    """The work of all layers before each place, in ticks."""
    work = list(accumulate((work_us(layer, scale) for layer in layers), initial=0.0))
    return [round(TICKS * value / work[-1]) for value in work] if work[-1] else [0] * len(work)
