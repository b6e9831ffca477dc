"""A layout that somebody has or asks about, as candidates to rank among those that are searched."""

from __future__ import annotations

from collections.abc import Iterator

from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem, name_with_cut
from optpipe.placement import name_of_placement
from solver.layout.candidates import Candidate, Search, why_unfit

GIVEN, ASKED = "given", "asked"
"""Names of the cuts of such candidates."""


def given_candidates(profile: LayerProfile, search: Search, layout: Partition, cut: str = GIVEN) -> Iterator[Candidate]:
    """The layout with every microbatch size, with and without offload, as the search space says."""
    where = name_of_placement(layout.placement)
    may_offload = profile.copies is not None and any(layer.offload_bytes for layer in profile.layers)
    for size in search.microbatch_sizes:
        batching = Batching(size, search.global_batch // size)
        for offload in dict.fromkeys(offload and may_offload for offload in search.offload):
            problem = build_problem(
                profile,
                layout,
                batching,
                offload=offload,
                modes=search.modes,
                objective=search.objective,
                name=name_with_cut(profile, layout),
                factors=search.factors,
            )
            reason = why_unfit(profile, layout, problem)
            sequences = search.global_batch if search.documents is None else search.documents
            yield Candidate(profile, where, cut, layout, batching, offload, problem, sequences, reason)
