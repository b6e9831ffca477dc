"""Rules shared by the exact models: precedences, work that memory holds back, order of like W.

On its way over a device a microbatch runs F on each of the device's stages, lowest first, then B, highest first; each W
runs any time after its B. Where every microbatch is on that way says how much work is done and how many bytes are held.

On a device, let W of some stages be alike: the same duration, the same workspace, the same bytes freed at the end.
Take a schedule in which B(s, i) ends before B(t, j) and yet W(t, j) runs before W(s, i). Both B have ended before the
earlier of the two W. Let the W change places: each still follows its B, the device is busy at the same times, and at
any time its memory is as before, since B's end leaves `backward_weight_bytes` of either and the W take and free the
same. Copies are not touched, since they take place before B, and nothing else needs a W. Sorted this way, W of one
stage are in the order of their B, which is that of their microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product
from math import comb, inf
from typing import NamedTuple, TypeVar

from optpipe.memory import device_effect
from optpipe.ops import Op
from optpipe.problem import Problem, Stage


class Place(NamedTuple):
    """One microbatch on its way: the work that it has had and the bytes that it holds at the least."""

    time: float
    bytes: float


class Around(NamedTuple):
    """The least work of its device before `op` begins, and from then on."""

    op: Op
    before: float
    after: float


def least_work_around(problem: Problem, length: Callable[[str, int], float]) -> Iterator[Around]:
    """For each F and B on a device with a budget, in the unit of `length` (by kind and stage).

    Proof. When an op of microbatch k begins, microbatches before k have passed this op and later ones have not, since
    they keep their order within each op type of a stage. One op runs at a time, so all others have ended or not begun.
    What the microbatches hold in such places, and what the op itself takes, is within the budget.
    """
    for d, stages in enumerate(problem.stages_of):
        budget = problem.devices[d].memory_bytes
        if stages and budget is not None:
            times = ([length(kind, s) for s in stages] for kind in "FBW")
            way = Way([problem.stages[s] for s in stages], *times)
            for (position, s), kind in product(enumerate(stages), "FB"):
                room = budget - way.taken(kind, position)
                for k in range(problem.microbatches):
                    yield Around(Op(kind, s, k), *_around(way, way.step(kind, position), k, problem.microbatches, room))


def _around(way: Way, step: int, k: int, microbatches: int, room: float) -> tuple[float, float]:
    most_done = way.most_done(step, microbatches - 1 - k, room)
    return way.least_done(step, k, room), (microbatches - k) * way.time - most_done


@dataclass(frozen=True)
class Way:
    """The way of a microbatch over a device: `stages` lowest first, with the times of their F, B and W.

    A place on it is the number of F and B done, from 0 to twice the number of stages. What may be offloaded counts as
    away between F and B, which only leaves more to be possible.
    """

    stages: Sequence[Stage]
    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]

    @property
    def time(self) -> float:
        """All work on one microbatch."""
        return sum(self.forward) + sum(self.backward) + sum(self.weight)

    def step(self, kind: str, position: int) -> int:
        """The place from which F or B of the stage at `position` goes on."""
        return position if kind == "F" else 2 * len(self.stages) - 1 - position

    def taken(self, kind: str, position: int) -> int:
        """Bytes that the op needs at once: its own, or what it leaves if that is more; for B all that came back."""
        stage = self.stages[position]
        effect = device_effect(stage, kind)
        back = stage.offload.bytes if kind == "B" and stage.offload else 0
        return back + max(effect.at_start, effect.at_start + effect.at_end)

    def least_done(self, step: int, count: int, room: float) -> float:
        """The least work done when one microbatch begins `step` and `count` before it have taken it.

        Of all that they hold at most `room` bytes are on the device (inf where that is impossible).
        """
        most = Place(0, 0)
        cheaper: list[Place] = []
        for copies, places in (
            (count, self._lower_hull(step + 1, 2 * len(self.stages))),
            (1, self._lower_hull(step, step)),
        ):
            most = Place(most.time + copies * places[0].time, most.bytes + copies * places[0].bytes)
            cheaper += [
                Place(copies * (b.time - a.time), copies * (a.bytes - b.bytes)) for a, b in pairwise(places) if copies
            ]
        over, time = most.bytes - room, most.time
        for piece in sorted(cheaper, key=lambda piece: piece.time / piece.bytes):
            if over <= 0:
                break
            share = min(1.0, over / piece.bytes)
            over, time = over - share * piece.bytes, time + share * piece.time
        return time if over <= 0 else inf

    def most_done(self, step: int, count: int, room: float) -> float:
        """The most work done on a microbatch that begins `step` and on `count` after it, which have not taken it."""
        own = self._done(step)
        hull = _hull([Place(place.bytes, -place.time) for place in map(self._done, range(step + 1))])
        room, time = room - own.bytes, own.time - count * hull[0].bytes
        for a, b in pairwise(hull):
            share = min(count * (b.time - a.time), room)
            room, time = room - share, time + share * (a.bytes - b.bytes) / (b.time - a.time)
        return time

    def _done(self, place: int) -> Place:
        """After `place` ops of F and B, with every W done that can be."""
        n = len(self.stages)
        backwards = range(2 * n - place, n) if place > n else range(0)
        time = sum(self.forward[:place]) + sum(self.backward[k] + self.weight[k] for k in backwards)
        inside = range(min(place, n)) if place <= n else range(2 * n - place)
        return Place(time, sum(self._least_held(self.stages[k]) for k in inside))

    @staticmethod
    def _least_held(stage: Stage) -> int:
        return stage.activation_bytes - (stage.offload.bytes if stage.offload else 0)

    def _lower_hull(self, first: int, last: int) -> Sequence[Place]:
        """The least work for the bytes held, over places from `first` to `last`; most bytes first."""
        return _hull([place for at in range(first, last + 1) for place in self._with_weights(at)])

    def _with_weights(self, place: int) -> Iterator[Place]:
        """No W done, then one after another, those first that free most for their time."""
        done = self._done(place)
        n = len(self.stages)
        late = [
            Place(self.weight[k], self.stages[k].backward_weight_bytes) for k in range(2 * n - place, n) if place > n
        ]
        late.sort(key=lambda piece: piece.time / piece.bytes if piece.bytes else inf, reverse=True)
        yield done
        for time, size in accumulate(late, lambda a, b: Place(a.time + b.time, a.bytes + b.bytes)):
            yield Place(done.time - time, done.bytes + size)


def _hull(places: Iterable[Place]) -> list[Place]:
    """The lower convex hull of `places` from the least work on, to ever fewer bytes at ever higher cost."""
    hull: list[Place] = []
    for place in sorted(places):
        if hull and place.bytes >= hull[-1].bytes:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], place):
            hull.pop()
        hull.append(place)
    return hull


def _is_above(a: Place, b: Place, c: Place) -> bool:
    """True if b lies on or above the line from a to c (bytes fall and time grow from a to c)."""
    return (b.time - a.time) * (a.bytes - c.bytes) >= (c.time - a.time) * (a.bytes - b.bytes)


class Edge(NamedTuple):
    """`after` starts at least `delay` later than `before` ends (an absent transfer takes no time)."""

    before: int
    after: int
    delay: float


def rule_edges(problem: Problem, index: Mapping[Op, int]) -> Iterator[Edge]:
    """The precedences between the ops of `index`, delays in us; microbatches of one op type of a stage in order."""
    for op, k in index.items():
        kind, s, i = op
        if kind == "F" and s:
            yield Edge(index[Op("F", s - 1, i)], k, problem.forward_delay_us[s - 1])
        if kind == "B" and s + 1 < len(problem.stages):
            yield Edge(index[Op("B", s + 1, i)], k, problem.backward_delay_us[s])
        for before in {"B": "FR", "W": "B", "O": "F", "R": "O"}.get(kind, ""):
            if Op(before, s, i) in index:
                yield Edge(index[Op(before, s, i)], k, 0.0)
        if i:
            yield Edge(index[Op(kind, s, i - 1)], k, 0.0)


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
    """Number of `like_pairs`."""
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
