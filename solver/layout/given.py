"""A layout that somebody has, as candidates to rank among those that are searched."""

from __future__ import annotations

from collections.abc import Iterator

from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem, name_with_cut, parameter_bytes
from optpipe.placement import placement_name
from solver.layout.candidates import Candidate, Search

GIVEN = "given"
"""Name of the cut of such a candidate."""


def given_candidates(profile: LayerProfile, search: Search, layout: Partition) -> Iterator[Candidate]:
    """The layout with every microbatch size, with and without offload, as the search space says."""
    chunks = len(layout.sizes) // layout.devices
    where = placement_name("linear" if chunks == 1 else "interleaved", chunks)
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
                name=name_with_cut(profile.name, layout),
                factors=search.factors,
            )
            held = max(parameter_bytes(profile, layout))
            reason = "" if problem else f"parameters alone take {held:,} of {profile.memory_bytes:,} bytes on a device"
            sequences = search.global_batch if search.documents is None else search.documents
            yield Candidate(where, GIVEN, layout, batching, offload, problem, sequences, reason)
