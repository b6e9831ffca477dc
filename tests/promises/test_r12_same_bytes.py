"""R12: the same problem, seed, one worker and a deterministic limit give the same bytes, in whatever process."""

from __future__ import annotations

import pytest

from instances import instance
from optpipe.schedule import schedule_text
from solver.limits import Limits
from solver.process import solve_in_child
from solver.solve import solve


@pytest.mark.parametrize("method", ["auto", "cp-sat"])
def test_two_processes(method: str) -> None:
    problem = instance("d-p4-m8-o1-mo1-b1o2-linear-make")
    here, there = (Limits(300, workers=1, seed=3, deterministic_limit=0.3) for _ in range(2))
    schedule = solve(problem, method, here)
    assert schedule_text(solve_in_child(problem, method, there).schedule_or_error()) == schedule_text(schedule)
