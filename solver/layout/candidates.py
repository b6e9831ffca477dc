"""Candidate layouts: placements, balanced cuts and microbatch sizes at a fixed global batch; their time slices.

Nothing can be relied on to end in its time, least of all on a busy machine: whoever begins gets a part of what is left
then, so that what one takes too long is taken from those after it, and the whole ends in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from threading import Lock

from ortools.sat.python import cp_model

from optpipe.layers import Layer, LayerProfile
from optpipe.partition import (
    DEFAULT_PLACEMENTS,
    Batching,
    Partition,
    build_problem,
    parameter_bytes,
    parse_placement,
    placement,
    placement_name,
    work_us,
)
from optpipe.problem import Objective, Problem
from solver.exact.cp_sat.model import configured_solver, solve_unless_cancelled
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


@dataclass(frozen=True)
class Search:
    """What to choose from. `microbatch_sizes` must divide `global_batch` (both in sequences)."""

    devices: int
    global_batch: int
    microbatch_sizes: Sequence[int]
    placements: Sequence[str] = DEFAULT_PLACEMENTS
    offload: Sequence[bool] = (False, True)
    objective: Objective = "makespan"


@dataclass(frozen=True)
class Candidate:
    """One layout with its problem, or why there is none. `cut` is `even` or `balanced`."""

    placement: str
    cut: str
    layout: Partition | None
    batching: Batching
    offload: bool
    problem: Problem | None
    why_not: str = ""

    @property
    def sequences(self) -> int:
        """Sequences of one training step: microbatches times the size of each."""
        return self.batching.microbatches * self.batching.microbatch_size

    @property
    def name(self) -> str:
        """The choices in words."""
        moved = ", offload" if self.offload else ""
        return f"{self.placement}, {self.cut} cut, microbatch {self.batching.microbatch_size}{moved}"


def candidates(profile: LayerProfile, search: Search, limits: Limits | None = None) -> Iterator[Candidate]:
    """Every combination once; where cuts come out equal, as `even`. Those for which `limits` leave no time say so."""
    limits = limits or Limits(inf)
    cutter = Cutter(profile)
    for name in search.placements:
        kind, chunks = parse_placement(name)
        places = placement(kind, search.devices, chunks)
        for size in search.microbatch_sizes:
            batching = Batching(size, search.global_batch // size)
            for cut, layout, why_not in _layouts(cutter, profile, places, size / profile.microbatch_size, limits):
                choices = (placement_name(kind, chunks), cut, layout, batching)
                yield from _with_and_without_offload(profile, search, choices, why_not)


def _layouts(
    cutter: Cutter, profile: LayerProfile, places: tuple[int, ...], scale: float, limits: Limits
) -> Iterator[tuple[str, Partition | None, str]]:
    """Cuts with their layouts, or why there is none."""
    count = len(profile.each_layer)
    if count < len(places):
        yield "even", None, f"{count} layers are too few for its stages"
        return
    even = even_sizes(count, len(places))
    yield "even", Partition(even, places), ""
    if late(limits):
        yield "balanced", None, "there was no time to cut it"
        return
    balanced = cutter.sizes(places, scale, limits.part(CUT_SHARE))
    if balanced is not None and balanced != even:
        yield "balanced", Partition(balanced, places), ""


def _with_and_without_offload(
    profile: LayerProfile, search: Search, choices: tuple[str, str, Partition | None, Batching], why_not: str
) -> Iterator[Candidate]:
    _, _, layout, batching = choices
    may_leave = profile.copies is not None and any(layer.offload_bytes for layer in profile.layers)
    for offload in dict.fromkeys(chosen and may_leave for chosen in search.offload):
        problem, reason = None, why_not
        if layout is not None:
            problem = build_problem(profile, layout, batching, offload=offload, objective=search.objective)
            reason = "" if problem else _overfull(profile, layout)
        yield Candidate(*choices, offload, problem, reason)


def _overfull(profile: LayerProfile, layout: Partition) -> str:
    held = parameter_bytes(profile, layout)
    device = max(range(len(held)), key=held.__getitem__)
    return f"parameters alone take {held[device]:,} of {profile.memory_bytes:,} bytes on device {device}"


AT_ONCE = 0.4
"""No candidate is cut or looked at after this share of the time."""

CUT_SHARE = 0.1
"""Of the time that is left: what cutting the layers for one placement may take."""

PUBLISHED_SHARE = 0.1
"""Of the time that is left: what the published schedules of one candidate may take."""

LEAST_S = 2.0
"""The shortest turn: a child process takes about a second to begin."""

MOST_RESERVE_S = 1.0
RESERVE = 0.1
"""Time kept for what comes after the last turn: at most this many seconds, or this share of a short limit."""


def late(limits: Limits) -> bool:
    """Whether the time for looking at further candidates is over."""
    return limits.cancel.requested or limits.seconds > AT_ONCE * limits.time_limit_s


class TimeSlices:
    """The turns of one round, which has a share of the time that is left: `count` of them, on so many cores at once."""

    def __init__(self, limits: Limits, share: float, count: int, cores: int) -> None:
        self._limits = limits
        reserve_s = min(MOST_RESERVE_S, RESERVE * limits.time_limit_s)
        self._end_s = limits.seconds + share * (limits.time_limit_s - reserve_s - limits.seconds)
        self._waiting = count
        self._cores = cores
        self._lock = Lock()

    def worthwhile(self) -> bool:
        """Whether the turns that wait are long enough for a solve."""
        return self._length_s(self._waiting) >= LEAST_S

    def begin(self) -> float | None:
        """Begin one turn: its seconds, or None where no time is left for a solve."""
        with self._lock:
            seconds = self._length_s(self._waiting)
            self._waiting -= 1
        return seconds if seconds >= LEAST_S else None

    def _length_s(self, waiting: int) -> float:
        one_after_another = -(-waiting // self._cores)
        return (self._end_s - self._limits.seconds) / max(1, one_after_another)
