"""All layouts worth a look: placements, cuts and microbatch sizes at a fixed global batch, with and without offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optpipe.layers import LayerProfile
from optpipe.layout import Batching, Layout, parameter_bytes, problem_of
from optpipe.placements import USUAL, name_of, placement, placement_named
from optpipe.problem import Objective, Problem
from solver.layout.cutting import balanced_sizes, even_sizes


@dataclass(frozen=True)
class Search:
    """What to choose from. `microbatch_sizes` must divide `global_batch` (both in sequences)."""

    devices: int
    global_batch: int
    microbatch_sizes: Sequence[int]
    placements: Sequence[str] = USUAL
    offload: Sequence[bool] = (False, True)
    objective: Objective = "makespan"


@dataclass(frozen=True)
class Candidate:
    """One layout with its problem, or why there is none. `cut` is `even` or `balanced`."""

    placement: str
    cut: str
    layout: Layout | None
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


def candidates(profile: LayerProfile, search: Search) -> Iterator[Candidate]:
    """Every combination once; where cuts come out equal, as `even`."""
    for name in search.placements:
        kind, chunks = placement_named(name)
        places = placement(kind, search.devices, chunks)
        for size in search.microbatch_sizes:
            batching = Batching(size, search.global_batch // size)
            for cut, layout in _layouts(profile, places, size / profile.microbatch_size):
                yield from _with_and_without_offload(profile, search, name_of(kind, chunks), cut, layout, batching)


def _layouts(profile: LayerProfile, places: tuple[int, ...], scale: float) -> Iterator[tuple[str, Layout | None]]:
    count = len(profile.each_layer)
    if count < len(places):
        yield "even", None
        return
    even = even_sizes(count, len(places))
    yield "even", Layout(even, places)
    balanced = balanced_sizes(profile, places, scale)
    if balanced is not None and balanced != even:
        yield "balanced", Layout(balanced, places)


def _with_and_without_offload(
    profile: LayerProfile, search: Search, name: str, cut: str, layout: Layout | None, batching: Batching
) -> Iterator[Candidate]:
    may_leave = profile.copies is not None and any(layer.offload_bytes for layer in profile.layers)
    for offload in dict.fromkeys(chosen and may_leave for chosen in search.offload):
        problem, why_not = None, ""
        if layout is None:
            why_not = f"{len(profile.each_layer)} layers are too few for its stages"
        else:
            problem = problem_of(profile, layout, batching, offload=offload, objective=search.objective)
            if problem is None:
                why_not = _overfull(profile, layout)
        yield Candidate(name, cut, layout, batching, offload, problem, why_not)


def _overfull(profile: LayerProfile, layout: Layout) -> str:
    held = parameter_bytes(profile, layout)
    device = max(range(len(held)), key=held.__getitem__)
    return f"parameters alone take {held[device]:,} of {profile.memory_bytes:,} bytes on device {device}"
