"""Seq1F1B: 1F1B over slices of sequences (arXiv 2406.03488), on one stage a device or interleaved.

A backward begins with the last slice of a microbatch, so a stage runs n - 1 forwards more ahead than 1F1B: stage i of p
holds at most ``n + p - 1 - i`` slices. With equal slices and no transfers m microbatches take
``(m + (p - 1) / n)(F + BW)``, F and BW being of a whole microbatch: the bubble of 1F1B, divided by n.
"""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.errors import MethodError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from solver.published.passes import require_interleaved


def seq1f1b(problem: Problem) -> Orders:
    """Seq1F1B with B and W fused.

    Raises MethodError on placement, and where stages are interleaved on a number of devices that is no multiple of that
    of slices: a group of units, one a device, then cuts a microbatch, whose last slice would be waited for in vain.
    """
    if all(len(stages) == 1 for stages in problem.stages_of):
        return Orders.of_compute(_order(problem, stages, d, 1) for d, stages in enumerate(problem.stages_of))
    chunks, p, n = require_interleaved(problem, "seq1f1b"), len(problem.devices), problem.slice_count
    if p % n:
        raise MethodError(
            f"seq1f1b takes interleaved stages in groups of {p} slices, one a device, but slices.count is {n}, which "
            f"does not divide {p}. Maybe cut sequences into {max(k for k in range(1, n) if p % k == 0)} slices."
        )
    return Orders.of_compute(_order(problem, stages, d, chunks) for d, stages in enumerate(problem.stages_of))


def _order(problem: Problem, stages: Sequence[int], device: int, chunks: int) -> list[Op]:
    p, n = len(problem.devices), problem.slice_count
    # One stage a device need not be in the order of devices.
    behind = p - 1 - (stages[0] if chunks == 1 else device)
    forwards = _passes(problem, "F", stages, p)
    backwards = _passes(problem, "BW", stages[::-1], p)
    warm_up = min(behind + n - 1 if chunks == 1 else (chunks - 1) * p + 2 * behind + n - 1, len(forwards))
    order = forwards[:warm_up]
    for k, backward in enumerate(backwards):
        order += [*forwards[warm_up + k : warm_up + k + 1], backward]
    return [op for op in order if op.microbatch < problem.units]


def _passes(problem: Problem, kind: str, stages: Sequence[int], group: int) -> list[Op]:
    """The passes of one kind in order: `group` units on the first stage, then on the next; then the next units.

    Groups are filled up with units that the problem does not have.
    """
    units = problem.units_in_order(kind).tolist()
    count = problem.slice_count
    for first in range(problem.units, -(-problem.units // group) * group, count):
        units += [first + unit for unit in units[:count]]
    starts = range(0, len(units), group)
    return [Op(kind, s, unit) for start in starts for s in stages for unit in units[start : start + group]]
