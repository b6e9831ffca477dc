"""Interleaved 1F1B: several chunks of the model on a device (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from itertools import product

from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from solver.published.passes import require_interleaved


def interleaved_1f1b(problem: Problem) -> Orders:
    """1F1B over v chunks a device, B and W fused: stage s sits on device s mod p. Raises MethodError on placement.

    Every device walks through the microbatches in groups of p: a group passes its first chunk, then its second, and
    so on; backwards take the chunks in reverse. The backwards follow the forwards at a distance of (v - 1) p chunks
    and two more for each device that follows.

    Where p does not divide the microbatches, the last group is planned as if it were full, and the ops of the absent
    microbatches are left out. What is left keeps its order and waits for less, so it cannot deadlock.
    """
    chunks = require_interleaved(problem, "interleaved-1f1b")
    return Orders.of_compute(_device_order(problem, device, chunks) for device in range(len(problem.devices)))


def _device_order(problem: Problem, device: int, chunks: int) -> list[Op]:
    p = len(problem.devices)
    forwards = _passes(problem, device, "F", list(range(chunks)))
    backwards = _passes(problem, device, "BW", list(reversed(range(chunks))))
    warm_up = min((chunks - 1) * p + 2 * (p - 1 - device), len(forwards))
    order = forwards[:warm_up]
    for k, backward in enumerate(backwards):
        order += [*forwards[warm_up + k : warm_up + k + 1], backward]
    return [op for op in order if op.microbatch < problem.units]


def _passes(problem: Problem, device: int, kind: str, chunks: list[int]) -> list[Op]:
    """The passes of one kind in order, the last group of microbatches filled up to p."""
    p = len(problem.devices)
    groups = range(0, problem.units, p)
    return [Op(kind, chunk * p + device, first + i) for first, chunk, i in product(groups, chunks, range(p))]
