"""R7: a cancelled solve is over within a second, and keeps the best incumbent."""

from __future__ import annotations

import pytest

from instances import instance
from optpipe.verify import verify
from solver.limits import Limits
from solver.process import Heartbeat, solve_in_child
from solver.solution import Progress
from tests.clock import Clock
from tests.promises.harness import heard


def test_a_solver_that_does_not_listen() -> None:
    limits = Limits(60, workers=1)
    since: list[Clock] = []

    def cancel_at_the_best(event: Progress | Heartbeat) -> None:
        if isinstance(event, Progress) and event.solution.method == "hang":
            limits.cancel.request()
            since.append(Clock())

    run = heard("hang", limits, cancel_at_the_best)
    assert since[0].seconds <= 1
    assert run.result.limit == "interrupted"
    run.check_best_is_kept()


@pytest.mark.parametrize("method", ["auto", "cp-sat", "milp"])
def test_a_solver_that_does(method: str) -> None:
    limits = Limits(60, workers=2)
    since: list[Clock] = []

    def cancel_at_once(event: Progress | Heartbeat) -> None:
        if isinstance(event, Progress) and not since:
            limits.cancel.request()
            since.append(Clock())

    result = solve_in_child(instance("d-p8-m16-o1-mo1-b1o4-vshape-make"), method, limits, on_event=cancel_at_once)
    assert since[0].seconds <= 1
    assert result.limit == "interrupted"
    assert result.schedule is not None
    assert verify(result.schedule).ok


def test_before_anything_was_found() -> None:
    limits = Limits(60, workers=1)
    limits.cancel.request()
    clock = Clock()
    result = solve_in_child(instance("zb-1.5b-p8-m24-mem1"), "cp-sat", limits)
    assert clock.seconds <= 1
    assert (result.reason, result.limit) == ("no_solution", "interrupted")
