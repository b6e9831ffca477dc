"""The precedences of the contract (docs/reference/contract.md) as edges between numbered ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from optpipe.orders import Op
from optpipe.problem import Problem


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
