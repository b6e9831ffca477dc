"""DualPipeV: two chunks a device along a V, forwards and backwards of different microbatches as blocks.

The V-shaped half of DualPipe (DeepSeek-V3 report, arXiv 2412.19437, section 3.2), in the steps of its open source and
of torch's `ScheduleDualPipeV`. Device r of R holds chunk 0, stage r, and chunk 1, stage 2R - 1 - r; m >= 2R:

1. 2 (R - r - 1) forwards of chunk 0.
2. r + 1 times a forward of each chunk.
3. R - r - 1 times B and W of chunk 1, and a forward of it.
4. m - 2R + r + 1 times two blocks: a forward of chunk 0 with a backward of chunk 1, then one of chunk 1 with one of
   chunk 0. The very first pair of the last device is no block.
5. R - r - 1 times a backward of chunk 1, and a block of its forward with a backward of chunk 0.
6. r + 1 backwards of each chunk; from their middle on the W are put off.
7. R - r - 1 times a W that was put off, and a backward of chunk 0.
8. The W that are left.

A device holds 2R + 1 chunks at most. Where a pair is none of the problem's `overlaps`, its ops run one after the other.
"""

from __future__ import annotations

from collections import Counter, deque

from optpipe.errors import MethodError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from solver.published.passes import general_methods, require_v_shape


def dualpipe_v(problem: Problem) -> Orders:
    """The schedule. Raises MethodError on placement, slices, or for fewer microbatches than stages."""
    require_v_shape(problem, "dualpipe-v")
    if problem.slice_count > 1:
        raise MethodError(f"dualpipe-v runs microbatches whole, but slices.count is {problem.slice_count}.")
    devices, m = len(problem.devices), problem.microbatches
    if m < 2 * devices:
        raise MethodError(
            f"dualpipe-v needs at least as many microbatches as stages, {2 * devices}, but there are {m}. "
            f"Maybe use {general_methods(problem)}."
        )
    ranks = [_Rank(problem, rank, devices) for rank in range(devices)]
    blocks = {forward: backward for rank in ranks for forward, backward in rank.blocks.items()}
    return Orders(Orders.of_compute([rank.ops for rank in ranks]).devices, blocks=blocks)


class _Rank:
    """The ops and blocks of one device."""

    def __init__(self, problem: Problem, rank: int, devices: int) -> None:
        self.ops: list[Op] = []
        self.blocks: dict[Op, Op] = {}
        self._problem = problem
        self._done: Counter[tuple[str, int]] = Counter()
        self._weights: deque[Op] = deque()
        out, back = rank, 2 * devices - 1 - rank
        self._run(out, back, devices - rank - 1, rank, problem.microbatches - 2 * devices + rank + 1)

    def _run(self, out: int, back: int, ahead: int, rank: int, pairs: int) -> None:
        """The eight steps: `ahead` devices lie beyond this one."""
        for _ in range(2 * ahead):
            self._forward(out)
        for _ in range(rank + 1):
            self._forward(out)
            self._forward(back)
        for _ in range(ahead):
            self._backward(back, whole=False)
            self._weight()
            self._forward(back)
        for n in range(pairs):
            self._block(out, back, joins=n > 0 or ahead > 0)
            self._block(back, out)
        for _ in range(ahead):
            self._backward(back)
            self._block(back, out)
        for k in range(2 * (rank + 1)):
            self._backward(out if k % 2 else back, whole=k < rank + 1)
        for _ in range(ahead):
            self._weight()
            self._backward(out, whole=False)
        while self._weights:
            self._weight()

    def _forward(self, stage: int) -> Op:
        return self._add("F", stage)

    def _backward(self, stage: int, whole: bool = True) -> Op:
        if whole or not self._problem.stages[stage].split_backward:
            return self._add("BW", stage)
        op = self._add("B", stage)
        self._weights.append(op._replace(kind="W"))
        return op

    def _weight(self) -> None:
        if self._weights:
            self.ops.append(self._weights.popleft())

    def _block(self, forward_stage: int, backward_stage: int, joins: bool = True) -> None:
        forward, backward = self._forward(forward_stage), self._backward(backward_stage)
        if joins and self._problem.block_of_units_us(forward, backward) is not None:
            self.blocks[forward] = backward

    def _add(self, kind: str, stage: int) -> Op:
        count = "F" if kind == "F" else "B"
        op = Op(kind, stage, self._done[count, stage])
        self._done[count, stage] += 1
        self.ops.append(op)
        return op
