"""Schedules of a vocabulary layer that lies on all devices."""

from __future__ import annotations

from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.build import build_schedule
from solver.published.vocab import vocab_1, vocab_2
from tests.optpipe.test_spread import vocabulary


def vocabulary_schedule(p: int, m: int, barriers: int, **change: object) -> Schedule:
    """The paper's order, with memory of the passes."""
    data = vocabulary(p, m, barriers=barriers, lag_us=1)
    data["spread"][0] |= {"kept_bytes": [*range(1, p + 1)], "workspace_bytes": [2] * p}
    problem = Problem.from_data(data | change)
    return build_schedule(problem, (vocab_2, vocab_1)[barriers - 1](problem), 0.0, "vocab", 0.0)
