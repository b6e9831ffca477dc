"""How much work a device must or can have done at some moment, given where one microbatch is and what memory holds.

On its way over a device a microbatch runs F on each of the device's stages, lowest first, then B, highest first; each W
runs any time after its B. Where every microbatch is on that way says how much work is done and how many bytes are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import inf
from typing import NamedTuple

from optpipe.memory import device_effect
from optpipe.orders import Op
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
    """Whether b lies on or above the line from a to c (bytes fall and time grow from a to c)."""
    return (b.time - a.time) * (a.bytes - c.bytes) >= (c.time - a.time) * (a.bytes - b.bytes)
