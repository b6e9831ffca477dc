"""Links of merged sequences: precedences between any classes, for spread passes, their barriers and gates.

Behind the classes of stages come those of passes, one for each pass and device, then one for each barrier, that of a
pass which something waits for. A barrier is an op without length in a group of its own. Its units stand there in their
order, as the pass has them on each device, so that no move changes that. What comes after a pass has a link to its
barrier, and one to its op on the own device, which moves heed.

Kernels take links as an argument that is None where a problem has none, and are compiled without them then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.ops import Floats, Ints
from optpipe.problem import Problem
from optpipe.task_graph import Lag, lower

NOT_YET = -1.0
"""Instead of a start: something that an op needs is not timed yet."""

Codes = NDArray[np.int32]
"""Ops of sequences, or places of them."""

_LINK = np.dtype([("other", np.int32), ("group", np.int32), ("us", np.float64)])
_OF_CLASS = np.dtype([(name, np.int32) for name in ("needs", "needs_end", "needed", "needed_end")])


class Links(NamedTuple):
    """Links, records of `_LINK`, and for each number of a class which of them are its own.

    From `needs` up to `needs_end` are the links to what its ops need, from `needed` up to `needed_end` those to what
    needs them. Classes of passes begin with `first_pass`, those of barriers with `first_barrier`.
    """

    links: NDArray[Any]
    of_class: NDArray[Any]
    first_pass: int
    first_barrier: int


class PassClasses(NamedTuple):
    """Numbers of the classes of passes and barriers, from `first` and from `first_barrier` on; `keys`: of all.

    `barriers`: the number of the pass of each.
    """

    first: int
    first_barrier: int
    devices: int
    barriers: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, first: int) -> PassClasses:
        """Those of a problem that has `first` classes of stages."""
        devices, graph = len(problem.devices), lower(problem)
        barriers = sorted({lag.spread for lag in graph.lags if lag.spread is not None})
        return cls(first, first + len(graph.passes) * devices, devices, tuple(barriers))

    @property
    def keys(self) -> int:
        """Number of all classes."""
        return self.first_barrier + len(self.barriers)

    def of_pass(self, number: int | Ints, device: int | Ints) -> Any:
        """Class of the ops of a pass on a device."""
        return self.first + number * self.devices + device

    def barrier(self, number: int) -> int:
        """Class of the barrier of a pass."""
        return self.first_barrier + self.barriers.index(number)


def build_links(
    problem: Problem, kinds: str, numbers: PassClasses, groups: Ints, stride: int, variants: int
) -> Links | None:
    """Make the links of a problem, None where it has no passes and gates. `groups`: the group of each class.

    Numbers of classes are those of the classes of sequences, from ``n * stride`` on with the costs of number n.
    """
    if not (problem.spread or problem.gates):
        return None
    needs: defaultdict[int, list[tuple[int, Floats]]] = defaultdict(list)
    needed: defaultdict[int, list[tuple[int, Floats]]] = defaultdict(list)
    for source, target, us in _edges(problem, kinds, numbers):
        needs[target].append((source, us))
        needed[source].append((target, us))
    links: list[tuple[int, int, float]] = []
    of_class = np.zeros(len(problem.class_units) * variants * stride, _OF_CLASS)
    for name, by_class in (("needs", needs), ("needed", needed)):
        for (unit_class, unit), (c, others) in product(enumerate(problem.class_units), by_class.items()):
            at = [(unit_class * variants + variant) * stride + c for variant in range(variants)]
            of_class[name][at] = len(links)
            links += [(other, int(groups[other]), float(us[unit])) for other, us in others]
            of_class[f"{name}_end"][at] = len(links)
    return Links(np.array(links, _LINK), of_class, numbers.first, numbers.first_barrier)


_Edge = tuple[int, int, Floats]


def _edges(problem: Problem, kinds: str, numbers: PassClasses) -> Iterator[_Edge]:
    """Each precedence between two classes, from the first to the second by so much of each unit."""
    graph, count = lower(problem), len(problem.stages)
    device, at_once = graph.device.tolist(), np.zeros(problem.units)

    def after(target: int, home: int, lag: Lag) -> Iterator[_Edge]:
        if lag.spread is None:
            source = kinds.index(graph.kind_with(lag.duty, lag.stage).duties[0]) * count + lag.stage
            yield source, target, at_once if device[lag.stage] == home else lag.us
            return
        yield numbers.barrier(lag.spread), target, lag.us
        if home in graph.passes[lag.spread].devices:
            yield numbers.of_pass(lag.spread, home), target, lag.us

    for n, one in enumerate(graph.passes):
        for d in one.devices:
            for lag in one.after:
                yield from after(numbers.of_pass(n, d), d, lag)
    for n in numbers.barriers:
        for d in graph.passes[n].devices:
            yield numbers.of_pass(n, d), numbers.barrier(n), at_once
    for (duty, stage), lags in graph.gates.items():
        for lag in lags:
            yield from after(kinds.index(duty) * count + stage, device[stage], lag)


@njit(cache=True)
def has_links(links: Links | None) -> bool:
    """True if a problem has any: known when a kernel is compiled."""
    if links is None:  # noqa: SIM103 (numba leaves out a branch on None alone)
        return False
    return True


@njit(cache=True)
def pass_classes(links: Links | None) -> tuple[int, int]:
    """The first class of passes, and the first behind them."""
    if links is None:
        return 0, 0
    return links.first_pass, links.first_barrier


@njit(cache=True)
def ready_us(
    links: Links | None, c: int, i: int, shift: int, place: Codes, end_us: Floats, clock: Floats, groups: int, g: int,
    q: int, at: float,
) -> float:  # fmt: skip
    """When all that unit i of class number c needs has ended, and not before `at`; `NOT_YET` if some is not timed yet.

    From `groups` on, `clock` has the place up to which each group is timed, other than group g: that is timed up to q.
    """
    if links is None:
        return at
    for k in range(links.of_class[c].needs, links.of_class[c].needs_end):
        link = links.links[k]
        y = link.other << shift | i
        if place[y] >= (q if link.group == g else clock[groups + link.group]):
            return NOT_YET
        at = max(at, end_us[y] + link.us)
    return at


@njit(cache=True)
def due_us(links: Links | None, c: int, i: int, shift: int, start_us: Floats, at: float) -> float:
    """The latest end of unit i of class number c for all that needs it, and not after `at`."""
    if links is None:
        return at
    for k in range(links.of_class[c].needed, links.of_class[c].needed_end):
        at = min(at, start_us[links.links[k].other << shift | i] - links.links[k].us)
    return at


@njit(cache=True)
def last_needed(links: Links | None, c: int, i: int, shift: int, place: Codes, g: int, at: int) -> int:
    """The last place of what unit i of class number c needs in group g, and not before `at`."""
    if links is None:
        return at
    for k in range(links.of_class[c].needs, links.of_class[c].needs_end):
        if links.links[k].group == g:
            at = max(at, place[links.links[k].other << shift | i])
    return at


@njit(cache=True)
def first_needed(links: Links | None, c: int, i: int, shift: int, position: Codes, at: int) -> int:
    """The first position of what unit i of class number c needs, and not behind `at`."""
    if links is None:
        return at
    for k in range(links.of_class[c].needs, links.of_class[c].needs_end):
        at = min(at, position[links.links[k].other << shift | i])
    return at


@njit(cache=True)
def first_needing(links: Links | None, c: int, i: int, shift: int, place: Codes, g: int, at: int) -> int:
    """The first place of what needs unit i of class number c in group g, and not behind `at`."""
    if links is None:
        return at
    for k in range(links.of_class[c].needed, links.of_class[c].needed_end):
        if links.links[k].group == g:
            at = min(at, place[links.links[k].other << shift | i])
    return at


@njit(cache=True)
def last_needing(links: Links | None, c: int, i: int, shift: int, position: Codes, at: int) -> int:
    """The last position of what needs unit i of class number c, and not before `at`."""
    if links is None:
        return at
    for k in range(links.of_class[c].needed, links.of_class[c].needed_end):
        at = max(at, position[links.links[k].other << shift | i])
    return at
