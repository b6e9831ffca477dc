"""All layouts worth a look: placements, cuts and microbatch sizes at a fixed global batch, with and without offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from optpipe.layers import LayerProfile
from optpipe.layout import Batching, Layout, parameter_bytes, problem_of
from optpipe.placements import USUAL, name_of, placement, placement_named
from optpipe.problem import Objective, Problem
from solver.layout.cutting import Cutter, even_sizes
from solver.layout.turns import CUT_SHARE, late
from solver.limits import Limits


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


def candidates(profile: LayerProfile, search: Search, limits: Limits | None = None) -> Iterator[Candidate]:
    """Every combination once; where cuts come out equal, as `even`. Those for which `limits` leave no time say so."""
    limits = limits or Limits(inf)
    cutter = Cutter(profile)
    for name in search.placements:
        kind, chunks = placement_named(name)
        places = placement(kind, search.devices, chunks)
        for size in search.microbatch_sizes:
            batching = Batching(size, search.global_batch // size)
            for cut, layout, why_not in _layouts(cutter, profile, places, size / profile.microbatch_size, limits):
                choices = (name_of(kind, chunks), cut, layout, batching)
                yield from _with_and_without_offload(profile, search, choices, why_not)


def _layouts(
    cutter: Cutter, profile: LayerProfile, places: tuple[int, ...], scale: float, limits: Limits
) -> Iterator[tuple[str, Layout | None, str]]:
    """Cuts with their layouts, or why there is none."""
    count = len(profile.each_layer)
    if count < len(places):
        yield "even", None, f"{count} layers are too few for its stages"
        return
    even = even_sizes(count, len(places))
    yield "even", Layout(even, places), ""
    if late(limits):
        yield "balanced", None, "there was no time to cut it"
        return
    balanced = cutter.sizes(places, scale, limits.part(CUT_SHARE))
    if balanced is not None and balanced != even:
        yield "balanced", Layout(balanced, places), ""


def _with_and_without_offload(
    profile: LayerProfile, search: Search, choices: tuple[str, str, Layout | None, Batching], why_not: str
) -> Iterator[Candidate]:
    _, _, layout, batching = choices
    may_leave = profile.copies is not None and any(layer.offload_bytes for layer in profile.layers)
    for offload in dict.fromkeys(chosen and may_leave for chosen in search.offload):
        problem, reason = None, why_not
        if layout is not None:
            problem = problem_of(profile, layout, batching, offload=offload, objective=search.objective)
            reason = "" if problem else _overfull(profile, layout)
        yield Candidate(*choices, offload, problem, reason)


def _overfull(profile: LayerProfile, layout: Layout) -> str:
    held = parameter_bytes(profile, layout)
    device = max(range(len(held)), key=held.__getitem__)
    return f"parameters alone take {held[device]:,} of {profile.memory_bytes:,} bytes on device {device}"
