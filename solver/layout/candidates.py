"""Candidate layouts: placements, cuts and microbatch sizes at a fixed global batch; their time slices.

No step is guaranteed to end within its slice, least of all on a busy machine. Each slice is therefore a share of the
time left when it begins: an overrun shortens the slices after it, and the search as a whole ends in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from threading import Lock

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
)
from optpipe.problem import Objective, Problem
from optpipe.sequences import SliceBy, model_times_us, require_attention, slice_lengths
from solver.layout.cut_bounds import CutBounds
from solver.layout.cuts import Sizes, best_cuts, even_sizes
from solver.layout.quick_rating import QuickRating
from solver.limits import Limits


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
    """Layout with its problem, or why it has none. `cut` is `even`, `searched`, `searched-2` (the next best) and so on.

    `sequences` is their number in one training step. `slices`: tokens of each slice of a sequence; empty: whole.
    `rating` is known where the cut was rated. No schedule of any cut of `choice` is shorter than `every_cut_us`.
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
    rating: QuickRating | None = None
    every_cut_us: float = 0.0

    @property
    def choice(self) -> tuple[object, ...]:
        """All that is chosen beside the cut."""
        return self.placement, self.batching, tuple(self.slices), self.offload

    @property
    def name(self) -> str:
        """Short name for one line of output."""
        offload = ", offload" if self.offload else ""
        slices = f", {len(self.slices)} slices" if self.slices else ""
        return f"{self.placement}, {self.cut} cut, microbatch {self.batching.microbatch_size}{slices}{offload}"


def candidates(profile: LayerProfile, search: Search, limits: Limits | None = None) -> Iterator[Candidate]:
    """The even cut and the best ones found for every combination of the other choices.

    These share `CUT_SHARE` of the time limit; where that is over the rest still get a rating of one cut, as long as
    there is time, and the first one even without.
    """
    limits = limits or Limits(inf)
    may_offload = profile.copies is not None and any(layer.offload_bytes for layer in profile.layers)
    offloads = tuple(dict.fromkeys(offload and may_offload for offload in search.offload))
    choices = list(product(search.placements, search.microbatch_sizes, _slicings(profile, search), offloads))
    for number, (name, size, slices, offload) in enumerate(choices):
        left_s = max(0.0, CUT_SHARE * limits.time_limit_s - limits.seconds)
        until_s = 0.0 if number and late(limits, LAST_SHARE) else limits.seconds + left_s / (len(choices) - number)
        part = replace(limits, time_limit_s=until_s)
        one = replace(search, placements=[name], microbatch_sizes=[size], offload=[offload])
        yield from candidates_of(profile, one, part, slices)


def candidates_of(
    profile: LayerProfile, search: Search, limits: Limits, slices: Sequence[int] = ()
) -> Iterator[Candidate]:
    """The even cut and the best ones found within the limits for one choice of all else, the first of each."""
    size, offload = search.microbatch_sizes[0], search.offload[0]
    kind, chunks = parse_placement(search.placements[0])
    places = placement(kind, search.devices, chunks)
    batching = Batching(size, search.global_batch // size)
    even = Candidate(
        placement_name(kind, chunks),
        "even",
        None,
        batching,
        offload,
        None,
        search.global_batch if search.documents is None else search.documents,
        slices=slices,
    )
    count = len(profile.each_layer)
    if count < len(places):
        yield replace(even, why_not=f"{count} layers are too few for its stages")
        return

    def build(sizes: Sizes) -> Problem | None:
        layout = Partition(sizes, places)
        return build_problem(
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

    bounds = CutBounds(
        profile,
        places,
        size / profile.microbatch_size,
        batching.microbatches,
        offload=offload,
        recomputes=bool(search.modes),
        objective=search.objective,
        parts=max(1, len(slices)),
    )
    found = best_cuts(bounds, build, limits, alike=not slices and not search.factors)
    even_cut = even_sizes(count, len(places))
    cuts = {even_cut: "even"} | {sizes: "" for sizes in found.rated if sizes != even_cut}
    for number, (sizes, cut) in enumerate(cuts.items()):
        layout, rating = Partition(sizes, places), found.rated.get(sizes)
        problem = rating.problem if rating else build(sizes)
        yield replace(
            even,
            cut=cut or ("searched" if number == 1 else f"searched-{number}"),
            layout=layout,
            problem=problem,
            why_not="" if problem else _overfull(profile, layout),
            rating=rating,
            every_cut_us=found.least_us,
        )


def _overfull(profile: LayerProfile, layout: Partition) -> str:
    held = parameter_bytes(profile, layout)
    device, budget = max(range(len(held)), key=held.__getitem__), profile.memory_bytes
    return f"parameters alone take {held[device]:,} of {budget:,} bytes on device {device}"


def _slicings(profile: LayerProfile, search: Search) -> Sequence[Sequence[int]]:
    """Tokens of the slices for each number of them; empty for whole sequences."""
    total_us, _, attention_us = model_times_us(profile)
    share = attention_us / total_us if total_us else 0.0
    return [
        () if count == 1 else slice_lengths(require_attention(profile, "slices"), count, search.slice_by, share)
        for count in search.slices
    ]


RATING_SHARE = 0.4
"""Share of the time limit after which only layouts that have no rating get one."""

CUT_SHARE = 0.25
"""Share of the time limit in which cuts are searched."""

LAST_SHARE = 0.85
"""Share of the time limit after which nothing is rated."""

PUBLISHED_SHARE = 0.1
"""Share of the time left for the published schedules of one candidate."""

LEAST_S = 2.0
"""Shortest slice worth a solve: a child process takes about a second to start."""

MOST_RESERVE_S = 1.0
RESERVE = 0.1
"""Time reserved after the last slice: at most this many seconds, or this share of a short limit."""


def late(limits: Limits, share: float) -> bool:
    """Return whether this share of the time limit is over."""
    return limits.cancel.requested or limits.seconds > share * limits.time_limit_s


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
