"""1F1B over slices of sequences: Seq1F1B (arXiv 2406.03488) and SlimPipe (2504.14519), with one stage a device or more.

A backward begins with the last slice of a microbatch, so Seq1F1B runs n - 1 forwards more ahead than 1F1B: stage i of p
holds at most ``n + p - 1 - i`` slices. With equal slices and no transfers m microbatches take
``(m + (p - 1) / n)(F + BW)``, F and BW being of a whole microbatch: the bubble of 1F1B, divided by n.

SlimPipe cuts sequences into slices of equal length, at least as many as there are devices, runs twice as far ahead as
Seq1F1B does beyond the first microbatch, and moves attention between devices so that slices take the same time. The
order is that of its authors' code as forks of it have it (`pipelining_with_slicing`), since the abstract alone says no
more than "uniform slicing with 1F1B".
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
    of slices: a group of units, one a device, then cuts a microbatch, whose last slice would never come.
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


def slimpipe(problem: Problem) -> Orders:
    """SlimPipe with B and W fused: device i of p holds at most ``v n + 2(p - 1 - i)`` slices of its v stages.

    What its devices exchange to even out attention is not planned: `slices.factors` say what each slice takes. Stages
    that are interleaved take turns in groups of slices of one microbatch, at least one a device. Raises MethodError on
    placement, and where stages are interleaved on more devices than there are slices.
    """
    p, n, chunks = len(problem.devices), problem.slice_count, 1
    if any(len(stages) != 1 for stages in problem.stages_of):
        chunks = require_interleaved(problem, "slimpipe")
        if n < p:
            raise MethodError(
                f"slimpipe takes interleaved stages in groups of at least {p} slices, one a device, but slices.count "
                f"is {n}. Maybe cut sequences into {p} slices."
            )
    group = next((size for size in range(p, n) if n % size == 0), n) if chunks > 1 else n
    orders = []
    for stages in problem.stages_of:
        ahead = p - 1 - (stages[0] % p)
        forwards = _passes(problem, "F", stages, group)
        backwards = _passes(problem, "BW", stages[::-1], group)
        warm_up = min(chunks * n + 2 * ahead, len(forwards))
        order = forwards[:warm_up]
        for k, backward in enumerate(backwards):
            order += [backward, *forwards[warm_up + k : warm_up + k + 1]]
        orders.append(order)
    return Orders.of_compute(orders)


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
