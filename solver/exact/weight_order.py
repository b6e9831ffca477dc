"""W of like stages run in the order of their B: an order that some optimum keeps, so that others need not be searched.

On a device, let W of some stages be alike: the same duration, the same workspace, the same bytes freed at the end.
Take a schedule in which B(s, i) ends before B(t, j) and yet W(t, j) runs before W(s, i). Both B have ended before the
earlier of the two W. Let the W change places: each still follows its B, the device is busy at the same times, and at
any time its memory is as before, since B's end leaves `backward_weight_bytes` of either and the W take and free the
same. Copies are not touched, since they take place before B, and nothing else needs a W. Sorted this way, W of one
stage are in the order of their B, which is that of their microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import comb
from typing import TypeVar

from optpipe.orders import Op
from optpipe.problem import Problem

Pair = tuple[Op, Op]
Time = TypeVar("Time", int, float, tuple[float, float])


def like_weights(problem: Problem, but: Collection[int] = ()) -> Iterator[Sequence[int]]:
    """Groups of stages on one device whose W are alike, also those of a single stage; `but` are left out.

    These must be the stages that have fused backwards, whose W cannot change places with others.
    """
    for stages in problem.stages_of:
        groups = defaultdict(list)
        for s in (s for s in stages if s not in but):
            stage = problem.stages[s]
            groups[stage.backward_weight_us, stage.backward_weight_bytes, stage.workspace_bytes.W].append(s)
        yield from groups.values()


def count_like_pairs(problem: Problem) -> int:
    """How many `like_pairs` there are."""
    return sum(comb(len(group), 2) for group in like_weights(problem)) * problem.microbatches**2


def like_pairs(problem: Problem, but: Collection[int] = ()) -> Iterator[tuple[Pair, Pair]]:
    """Two B of different stages, and the two W that run in the same order."""
    microbatches = range(problem.microbatches)
    for group in like_weights(problem, but):
        for (s, t), i, j in product(combinations(group, 2), microbatches, microbatches):
            yield (Op("B", s, i), Op("B", t, j)), (Op("W", s, i), Op("W", t, j))


def in_weight_order(problem: Problem, starts: Mapping[Op, Time], but: Collection[int] = ()) -> dict[Op, Time]:
    """Starts, or starts and ends, of a schedule without fused backwards, with like W sorted so.

    The W of one stage are alike too. Where a fused backward that overtook a W was split (docs/adr/0006), they are out
    of order until they are sorted here.
    """
    result = dict(starts)
    for group in like_weights(problem, but):
        both = ([op for op in starts if op.kind == kind and op.stage in group] for kind in "BW")
        backwards, weights = (sorted(ops, key=starts.__getitem__) for ops in both)
        result.update((Op("W", *b[1:]), starts[w]) for b, w in zip(backwards, weights, strict=True))
    return result
