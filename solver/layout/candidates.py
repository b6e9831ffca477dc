"""Candidate layouts: placements, balanced cuts and microbatch sizes at a fixed global batch; their time slices.

No step is guaranteed to end within its slice, least of all on a busy machine. Each slice is therefore a share of the
time left when it begins: an overrun shortens the slices after it, and the search as a whole ends in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import inf
from threading import Lock

from ortools.sat.python import cp_model

from optpipe.layers import LayerProfile
from optpipe.partition import (
    DEFAULT_PLACEMENTS,
    Batching,
    Partition,
    build_problem,
    name_with_cut,
    parameter_bytes,
    parse_placement,
    placement,
    placement_name,
    work_us,
)
from optpipe.problem import Objective, Problem
from optpipe.sequences import SliceBy, model_times_us, require_attention, slice_lengths
from solver.exact.cp_sat.model import configured_solver, solve_unless_cancelled
from solver.limits import Limits

WORK_LIMIT = 5.0
"""Deterministic time limit of one CP-SAT search, about as many seconds on an idle machine."""

TICKS = 10_000
"""Ticks in the whole model's work: a device's share is balanced to a ten-thousandth of it."""


def even_sizes(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, equal up to one; the first stages take the remainder, as in most frameworks."""
    size, remainder = divmod(layers, stages)
    return tuple(size + (s < remainder) for s in range(stages))


def balanced_sizes(profile: LayerProfile, placement: Sequence[int], scale: float = 1.0) -> tuple[int, ...] | None:
    """Layers per stage that minimise the work of the busiest device, then that of the longest stage.

    On every device the parameters and one microbatch's activations fit into the profile's memory; None if no such cut
    is found. `scale` is the microbatch size relative to the profile's. The busiest device's work times m is a lower
    bound on every schedule, so it comes first; equal stages make short warm-ups.
    """
    return Cutter(profile).sizes(placement, scale, Limits(inf))


class Cutter:
    """Balanced cuts of one profile's layers (see `balanced_sizes`), cached.

    Microbatch sizes that scale all layers alike share a balance. It is computed once per placement without the memory
    limit, and again under the limit only if it exceeds that.
    """

    def __init__(self, profile: LayerProfile) -> None:
        self._profile = profile
        self._cache: dict[tuple[tuple[int, ...], ...], tuple[int, ...] | None] = {}

    def sizes(self, placement: Sequence[int], scale: float, limits: Limits) -> tuple[int, ...] | None:
        """Layers per stage; None if there is no cut, or none was found within the limits."""
        layers, budget = self._profile.each_layer, self._profile.memory_bytes
        if len(layers) < len(placement):
            return None
        work = list(accumulate((work_us(layer, scale) for layer in layers), initial=0.0))
        ticks = tuple(round(TICKS * value / work[-1]) for value in work) if work[-1] else (0,) * len(work)
        devices = tuple(placement)
        if (ticks, devices) not in self._cache:
            self._cache[ticks, devices] = _CutModel(ticks, devices).solve(limits)
        sizes = self._cache[ticks, devices]
        if budget is None:
            return sizes
        held = (0, *accumulate(layer.parameter_bytes + int(scale * layer.activation_bytes) for layer in layers))
        if sizes:
            held_on_device: dict[int, int] = defaultdict(int)
            for device, (begin, end) in zip(devices, pairwise(accumulate(sizes, initial=0)), strict=True):
                held_on_device[device] += held[end] - held[begin]
            if max(held_on_device.values()) <= budget:
                return sizes
        return _CutModel(ticks, devices, held, budget).solve(limits)


class _CutModel:
    """CP-SAT model of the cuts: one integer per cut, and a stage's total is a difference of prefix sums at two cuts.

    `ticks` (work) and `held` (bytes, of which a device has `budget`) are prefix sums over the layers, beginning with 0.
    """

    def __init__(
        self, ticks: tuple[int, ...], placement: Sequence[int], held: tuple[int, ...] = (), budget: int = 0
    ) -> None:
        self.model = model = cp_model.CpModel()
        count, stages = len(ticks) - 1, len(placement)
        inner = [model.new_int_var(s, count - stages + s, f"cut {s}") for s in range(1, stages)]
        self.cuts: list[cp_model.IntVar | int] = [0, *inner, count]
        for before, after in pairwise(self.cuts):
            model.add(after - before >= 1)
        stages_of_device: dict[int, list[int]] = defaultdict(list)
        for s, device in enumerate(placement):
            stages_of_device[device].append(s)
        if held:
            bytes_of_stage = self._stage_sums(held)
            for own in stages_of_device.values():
                model.add(sum(bytes_of_stage[s] for s in own) <= budget)
        # Lexicographic objective: the busiest device first, since its work times m bounds every schedule from below;
        # then the longest stage, which the warm-up and the cool-down wait for. A stage takes at most `total` ticks, so
        # one tick of the busiest device outweighs it.
        total = ticks[-1]
        busiest = model.new_int_var(0, total, "busiest device")
        longest = model.new_int_var(0, total, "longest stage")
        work_of_stage = self._stage_sums(ticks)
        for own in stages_of_device.values():
            model.add(sum(work_of_stage[s] for s in own) <= busiest)
        for work in work_of_stage:
            model.add(work <= longest)
        model.minimize((total + 1) * busiest + longest)
        for cut, begin in zip(inner, accumulate(even_sizes(count, stages)), strict=False):
            model.add_hint(cut, begin)

    def solve(self, limits: Limits) -> tuple[int, ...] | None:
        """Layers per stage; None if no solution was found."""
        solver = configured_solver(replace(limits, workers=1))
        solver.parameters.max_deterministic_time = WORK_LIMIT
        # Measured on 50 stages: presolve used up the whole work limit without a solution.
        solver.parameters.cp_model_presolve = False
        status, _ = solve_unless_cancelled(solver, self.model, limits.cancel)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return tuple(after - before for before, after in pairwise(solver.value(cut) for cut in self.cuts))

    def _stage_sums(self, prefix: Sequence[int]) -> list[cp_model.LinearExprT]:
        """Per stage, the sum over its layers of the values that `prefix` accumulates."""
        at_cut: list[cp_model.IntVar | int] = [prefix[0]]
        for cut in self.cuts[1:-1]:
            value = self.model.new_int_var(0, prefix[-1], "")
            self.model.add_element(cut, prefix, value)
            at_cut.append(value)
        at_cut.append(prefix[-1])
        return [after - before for before, after in pairwise(at_cut)]


@dataclass(frozen=True)
class Search:
    """Search space of layouts. `microbatch_sizes` must divide `global_batch` (both in sequences).

    `modes` names activation modes that recompute (`check_layer_modes`), which every layout may use. `slices`: numbers
    of slices of a sequence, which is cut by equal compute or equal length (`slice_by`). `factors` are those of the
    microbatches of a step in which lengths differ, in a free order: then `microbatch_sizes` is the profile's alone, and
    `global_batch` that times their number. `documents`: how many sequences they have (None: `global_batch`).
    """

    devices: int
    global_batch: int
    microbatch_sizes: Sequence[int]
    placements: Sequence[str] = DEFAULT_PLACEMENTS
    offload: Sequence[bool] = (False, True)
    objective: Objective = "makespan"
    modes: Sequence[str] = ()
    slices: Sequence[int] = (1,)
    slice_by: SliceBy = "compute"
    factors: Sequence[Mapping[str, float]] = ()
    documents: int | None = None


@dataclass(frozen=True)
class Candidate:
    """Layout with its problem, or why it has none. `cut` is `even` or `balanced`.

    `sequences` is their number in one training step. `slices`: tokens of each slice of a sequence; empty: whole.
    """

    placement: str
    cut: str
    layout: Partition | None
    batching: Batching
    offload: bool
    problem: Problem | None
    sequences: int
    why_not: str = ""
    slices: Sequence[int] = ()

    @property
    def name(self) -> str:
        """Description of the layout, for users."""
        offload = ", offload" if self.offload else ""
        slices = f", {len(self.slices)} slices" if self.slices else ""
        return f"{self.placement}, {self.cut} cut, microbatch {self.batching.microbatch_size}{slices}{offload}"


def candidates(profile: LayerProfile, search: Search, limits: Limits | None = None) -> Iterator[Candidate]:
    """Every combination once; a balanced cut equal to the even one is left out.

    Balanced cuts that `limits` leave no time for have no problem and say so.
    """
    limits = limits or Limits(inf)
    cutter = Cutter(profile)
    may_offload = profile.copies is not None and any(layer.offload_bytes for layer in profile.layers)
    offloads = tuple(dict.fromkeys(offload and may_offload for offload in search.offload))
    slicings = _slicings(profile, search)
    for name in search.placements:
        kind, chunks = parse_placement(name)
        devices = placement(kind, search.devices, chunks)
        for size in search.microbatch_sizes:
            batching = Batching(size, search.global_batch // size)
            for cut, layout, why_not in _layouts(cutter, profile, devices, size / profile.microbatch_size, limits):
                for slices, offload in product(slicings, offloads):
                    problem, reason = None, why_not
                    if layout is not None:
                        problem = build_problem(
                            profile,
                            layout,
                            batching,
                            offload=offload,
                            modes=search.modes,
                            objective=search.objective,
                            name=name_with_cut(profile.name, layout),
                            slices=slices,
                            factors=search.factors,
                        )
                        reason = ""
                    if layout is not None and problem is None:
                        held = parameter_bytes(profile, layout)
                        device, budget = max(range(len(held)), key=held.__getitem__), profile.memory_bytes
                        reason = f"parameters alone take {held[device]:,} of {budget:,} bytes on device {device}"
                    sequences = search.global_batch if search.documents is None else search.documents
                    where = placement_name(kind, chunks), cut, layout, batching
                    yield Candidate(*where, offload, problem, sequences, reason, slices)


def _slicings(profile: LayerProfile, search: Search) -> Sequence[Sequence[int]]:
    """Tokens of the slices for each number of them; empty for whole sequences."""
    total_us, _, attention_us = model_times_us(profile)
    share = attention_us / total_us if total_us else 0.0
    return [
        () if count == 1 else slice_lengths(require_attention(profile, "slices"), count, search.slice_by, share)
        for count in search.slices
    ]


def _layouts(
    cutter: Cutter, profile: LayerProfile, devices: tuple[int, ...], scale: float, limits: Limits
) -> Iterator[tuple[str, Partition | None, str]]:
    """Yield each cut by name with its layout, or with the reason why it has none."""
    count = len(profile.each_layer)
    if count < len(devices):
        yield "even", None, f"{count} layers are too few for its stages"
        return
    even = even_sizes(count, len(devices))
    yield "even", Partition(even, devices), ""
    if late(limits):
        yield "balanced", None, "there was no time to cut it"
        return
    balanced = cutter.sizes(devices, scale, limits.part(CUT_SHARE))
    if balanced is not None and balanced != even:
        yield "balanced", Partition(balanced, devices), ""


RATING_SHARE = 0.4
"""Share of the time limit after which no further candidate is cut or rated."""

CUT_SHARE = 0.1
"""Share of the time left for cutting the layers for one placement."""

PUBLISHED_SHARE = 0.1
"""Share of the time left for the published schedules of one candidate."""

LEAST_S = 2.0
"""Shortest slice worth a solve: a child process takes about a second to start."""

MOST_RESERVE_S = 1.0
RESERVE = 0.1
"""Time reserved after the last slice: at most this many seconds, or this share of a short limit."""


def late(limits: Limits) -> bool:
    """Return whether the time for rating further candidates is over."""
    return limits.cancel.requested or limits.seconds > RATING_SHARE * limits.time_limit_s


class TimeSlices:
    """Slices of one round for `count` solves on `cores` cores; the round has a share of the time left. Thread-safe."""

    def __init__(self, limits: Limits, share: float, count: int, cores: int) -> None:
        self._limits = limits
        reserve_s = min(MOST_RESERVE_S, RESERVE * limits.time_limit_s)
        self._end_s = limits.seconds + share * (limits.time_limit_s - reserve_s - limits.seconds)
        self._waiting = count
        self._cores = cores
        self._lock = Lock()

    def worthwhile(self) -> bool:
        """Return whether the next slices are long enough for a solve."""
        return self._length_s(self._waiting) >= LEAST_S

    def begin(self) -> float | None:
        """Begin a slice and return its seconds, or None if too little time is left for a solve."""
        with self._lock:
            seconds = self._length_s(self._waiting)
            self._waiting -= 1
        return seconds if seconds >= LEAST_S else None

    def _length_s(self, waiting: int) -> float:
        in_sequence = -(-waiting // self._cores)
        return (self._end_s - self._limits.seconds) / max(1, in_sequence)
