"""Candidate layouts: placements, cuts and microbatch sizes at a fixed global batch; their time slices.

No step is guaranteed to end within its slice, least of all on a busy machine. Each slice is therefore a share of the
time left when it begins: an overrun shortens the slices after it, and the search as a whole ends in time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from threading import Lock

from optpipe.layers import LayerProfile
from optpipe.mode_names import WITH_OFFLOAD
from optpipe.partition import Batching, Partition, build_problem, name_with_cut, parameter_bytes
from optpipe.placement import DEFAULT_PLACEMENTS, parse_placement, placement, placement_name
from optpipe.problem import Objective, Problem
from optpipe.sequences import SliceBy, model_times_us, require_attention, slice_lengths
from optpipe.units import budget_text, bytes_text
from solver.layout.cut_bounds import CutBounds
from solver.layout.cuts import CutSearch, Sizes, even_cut
from solver.layout.quick_rating import QuickRating
from solver.limits import Limits
from solver.serial import impossible_budgets


@dataclass(frozen=True)
class Search:
    """Search space of layouts. `microbatch_sizes` must divide `global_batch` (both in sequences).

    `modes` names activation modes that recompute (`check_layer_modes`), which every layout may use; those that copy to
    the host too only one that may offload. `slices`: numbers of slices of a sequence, which is cut by equal compute or
    equal length (`slice_by`). `factors` are those of the microbatches of a step in which lengths differ, in a free
    order: then `microbatch_sizes` is the profile's alone, and `global_batch` that times their number. `documents`: how
    many sequences they have (None: `global_batch`). `vocabulary`: places of the last layer that are tried: in the last
    stage with others (`last`), alone in it (`own`), or its rows on all devices (`spread`).
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
    vocabulary: Collection[str] = ("last", "own")


@dataclass(frozen=True)
class Candidate:
    """Layout with its problem, or why it has none. `cut` is `even`, `searched`, `searched-2` (the next best) and so on.

    `profile` has the layers that were cut. `sequences` is their number in one training step. `slices`: tokens of each
    slice of a sequence; empty: whole. `rating` is known where the cut was rated. No schedule of any cut of `choice` is
    shorter than `every_cut_us`.
    """

    profile: LayerProfile
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
        """All choices other than the cut."""
        return self.placement, self.batching, tuple(self.slices), self.offload, self.profile.spread is not None

    @property
    def vocabulary(self) -> str:
        """Place of the last layer: `last` of several in the last stage, on its `own` there, or `spread`."""
        if self.profile.spread is not None:
            return "spread"
        return "own" if self.layout is not None and self.layout.sizes[-1] == 1 else "last"

    @property
    def name(self) -> str:
        """Short name for one line of output."""
        offload = ", offload" if self.offload else ""
        slices = f", {len(self.slices)} slices" if self.slices else ""
        head = ", spread head" if self.profile.spread else ""
        return f"{self.placement}, {self.cut} cut, microbatch {self.batching.microbatch_size}{slices}{offload}{head}"


def candidates(profile: LayerProfile, search: Search, limits: Limits | None = None) -> Iterator[Candidate]:
    """The even cut and the best ones found for every combination of the other choices.

    One cut of each is rated before any others are searched for, as long as there is time, and of the first one even
    without. Then they share `CUT_SHARE` of the time limit, the most promising first. For one that cannot have the best
    step, or where the time is over, little or nothing more is rated.
    """
    limits = limits or Limits(inf)
    leaves = any(layer.offload_bytes for layer in profile.layers) or _modes(search, False) != list(search.modes)
    may_offload = profile.copies is not None and leaves
    offloads = tuple(dict.fromkeys(offload and may_offload for offload in search.offload))
    profiles = [profile] if {*search.vocabulary} - {"spread"} else []
    if "spread" in search.vocabulary:
        profiles.append(profile.with_spread_head(search.devices))
    choices = [
        (own, *choice)
        for own in profiles
        for choice in product(search.placements, search.microbatch_sizes, _slicings(profile, search), offloads)
        if not (own.spread and choice[2])  # passes are of whole microbatches
    ]
    layouts = [
        _Layout(own, replace(one, placements=[name], microbatch_sizes=[size]), slices, limits)
        for own, name, size, slices, offload in choices
        for one in [replace(search, offload=[offload], modes=_modes(search, offload))]
    ]
    for number, layout in enumerate(layouts):
        if number and late(limits, LAST_SHARE):
            break
        layout.cuts.begin()
    best_us = min((layout.cuts.achieved_us for layout in layouts), default=inf)
    layouts.sort(key=lambda layout: layout.estimate_us)
    for number, layout in enumerate(layouts):
        left_s = max(0.0, CUT_SHARE * limits.time_limit_s - limits.seconds)
        may_win = layout.cuts.least_us < best_us
        until_s = limits.seconds + left_s / (len(choices) - number) if may_win else 0.0
        if not late(limits, LAST_SHARE):
            layout.cuts.extend(replace(limits, time_limit_s=until_s))
            best_us = min(best_us, layout.cuts.achieved_us)
        yield from layout.candidates()


def candidates_of(
    profile: LayerProfile, search: Search, limits: Limits, slices: Sequence[int] = ()
) -> Iterator[Candidate]:
    """The even cut and the best ones found within the limits for one choice of all else, the first of each."""
    layout = _Layout(profile, search, slices, limits)
    layout.cuts.begin()
    layout.cuts.extend(limits)
    yield from layout.candidates()


class _Layout:
    """One choice of all but the cut, the first of each in `search`, with the search for its cuts."""

    def __init__(self, profile: LayerProfile, search: Search, slices: Sequence[int], limits: Limits) -> None:
        self._profile, self._search, self._slices = profile, search, slices
        size, offload = search.microbatch_sizes[0], search.offload[0]
        self._kind, self._chunks = parse_placement(search.placements[0])
        self._places = placement(self._kind, search.devices, self._chunks)
        self._batching = Batching(size, search.global_batch // size)
        bounds = CutBounds(
            profile,
            self._places,
            size / profile.microbatch_size,
            self._batching.microbatches,
            offload=offload,
            recomputes=bool(search.modes),
            objective=search.objective,
            parts=max(1, len(slices)),
            alone=_alone(search.vocabulary) if profile.spread is None else None,
        )
        self.cuts = CutSearch(bounds, self._build, limits, alike=not slices and not search.factors)

    @property
    def estimate_us(self) -> float:
        """Value to be expected of the best cut; infinite where none is known to fit."""
        return (self.cuts.best_us + self.cuts.least_us) / 2

    def candidates(self) -> Iterator[Candidate]:
        """The even cut and the best ones rated."""
        search = self._search
        even = Candidate(
            self._profile,
            placement_name(self._kind, self._chunks),
            "even",
            None,
            self._batching,
            search.offload[0],
            None,
            search.global_batch if search.documents is None else search.documents,
            slices=self._slices,
        )
        if not self.cuts.bounds.has_cuts:
            yield replace(even, why_not=f"{len(self._profile.each_layer)} layers are too few for its stages")
            return
        found = self.cuts.found
        even_sizes = even_cut(self.cuts.bounds)
        cuts = {even_sizes: "even"} | {sizes: "" for sizes in found.rated if sizes != even_sizes}
        for number, (sizes, cut) in enumerate(cuts.items()):
            layout, rating = Partition(sizes, self._places), found.rated.get(sizes)
            problem = rating.problem if rating else self._build(sizes)
            yield replace(
                even,
                cut=cut or ("searched" if number == 1 else f"searched-{number}"),
                layout=layout,
                problem=problem,
                why_not=why_unfit(self._profile, layout, problem),
                rating=rating,
                every_cut_us=found.least_us,
            )

    def _build(self, sizes: Sizes) -> Problem | None:
        search, layout = self._search, Partition(sizes, self._places)
        return build_problem(
            self._profile,
            layout,
            self._batching,
            offload=search.offload[0],
            modes=search.modes,
            objective=search.objective,
            name=name_with_cut(self._profile, layout),
            slices=self._slices,
            factors=search.factors,
        )


def _modes(search: Search, offload: bool) -> list[str]:
    """The modes of layouts that may offload, or of those that may not."""
    return [name for name in search.modes if offload or not name.endswith(WITH_OFFLOAD)]


def _alone(vocabulary: Collection[str]) -> bool | None:
    """True if the last layer has a stage of its own; None: either."""
    return None if {"last", "own"} <= {*vocabulary} else "own" in vocabulary


def why_unfit(profile: LayerProfile, layout: Partition, problem: Problem | None) -> str:
    """Bytes, by kind, that the fullest device lacks in every schedule of a layout; empty where none does.

    `problem` is that of the layout, which has none where parameters alone are too large.
    """
    held, most = parameter_bytes(profile, layout), profile.memory_bytes
    if problem is None:
        device = max(range(len(held)), key=held.__getitem__)
        return f"on device {device} parameters alone take {budget_text(held[device], most)}"
    for device, needed, _ in impossible_budgets(problem):
        return (
            f"device {device} needs {budget_text(held[device] + needed, most)}: "
            f"parameters {bytes_text(held[device])}, one microbatch {bytes_text(needed)}"
        )
    return ""


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


def seconds_of_round(limits: Limits, share: float) -> float:
    """Seconds of a round that has a share of the time left, without what the end of a ranking needs."""
    reserve_s = min(MOST_RESERVE_S, RESERVE * limits.time_limit_s)
    return share * (limits.time_limit_s - reserve_s - limits.seconds)


class TimeSlices:
    """Slices of one round for `count` solves on `cores` cores; the round has a share of the time left. Thread-safe."""

    def __init__(self, limits: Limits, share: float, count: int, cores: int) -> None:
        self._limits = limits
        self._end_s = limits.seconds + seconds_of_round(limits, share)
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
