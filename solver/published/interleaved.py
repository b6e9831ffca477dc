"""Interleaved 1F1B: several chunks of the model on a device (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from itertools import accumulate, product, zip_longest

from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from solver.published.passes import require_interleaved


def interleaved_1f1b(problem: Problem, group: int | None = None) -> Orders:
    """1F1B over v chunks a device, B and W fused: stage s sits on device s mod p. Raises MethodError on placement.

    Every device walks through the microbatches in groups: a group passes its first chunk, then its second, and so on;
    backwards take the chunks in reverse. The backwards follow the forwards at a distance of v - 1 chunks of a group and
    two more ops for each device that follows.

    Where a problem has `overlaps`, each forward behind the warm-up runs as a block with the backward that follows. The
    warm-up then has a forward more, so that both are of different microbatches (`overlap_moe_expert_parallel_comm` of
    Megatron-LM).

    There are as many groups as p goes into the microbatches, at least one, of the same size: those of torch's
    `ScheduleInterleaved1F1B`, and of Megatron-LM where its group size is theirs. Both refuse numbers of microbatches
    for which there are no such groups; here the first ones then have a microbatch more. `group`: the size of all groups
    but the last, which has what is left, as Megatron-LM makes them.
    """
    chunks = require_interleaved(problem, "interleaved-1f1b")
    p, m = len(problem.devices), problem.units
    rounds = max(1, m // p)
    sizes = [m // rounds + (g < m % rounds) for g in range(rounds)]
    if group is not None:
        sizes = [min(group, m - first) for first in range(0, m, group)]
    devices, blocks = [], {}
    for device in range(p):
        forwards = _passes("F", [chunk * p + device for chunk in range(chunks)], sizes)
        backwards = _passes("BW", [chunk * p + device for chunk in reversed(range(chunks))], sizes)
        warm_up = min((chunks - 1) * sizes[0] + 2 * (p - 1 - device) + bool(problem.overlaps), len(forwards))
        devices.append(forwards[:warm_up])
        for forward, backward in zip_longest(forwards[warm_up:], backwards):
            devices[-1] += [backward] if forward is None else [forward, backward]
            if forward is not None and problem.block_of_units_us(forward, backward) is not None:
                blocks[forward] = backward
    return Orders(Orders.of_compute(devices).devices, blocks=blocks)


def _passes(kind: str, stages: list[int], sizes: list[int]) -> list[Op]:
    """The passes of one kind in order: each group of microbatches through all stages."""
    groups = (range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))
    return [Op(kind, stage, i) for group in groups for stage, i in product(stages, group)]
