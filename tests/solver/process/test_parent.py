"""A solve in a child gives what a solve in this process gives, errors included, and says how it goes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from optpipe.errors import InputError, MethodError
from optpipe.verify import verify
from solver.limits import Limits
from solver.process import Child, Heartbeat, SolverDiedError, solve_in_child
from solver.process.memory_use import available_bytes, resident_bytes
from tests.problems import KNOWN_OPTIMA, instance, uniform
from tests.promises.solves import heard


def test_a_proved_optimum() -> None:
    problem, optimum = KNOWN_OPTIMA["makespan"]
    result = solve_in_child(problem, "cp-sat", Limits(30, workers=2))
    assert (result.reason, result.limit, result.error) == ("optimal", None, None)
    assert result.schedule is not None
    assert result.schedule.value_us == optimum
    assert result.schedule.problem == problem


def test_a_published_schedule_is_done_when_it_is_there() -> None:
    result = solve_in_child(uniform(4, 8), "gpipe", Limits(30))
    assert (result.reason, result.limit) == ("feasible", None)


def test_the_gap_asked_for() -> None:
    result = solve_in_child(KNOWN_OPTIMA["offload"][0], "cp-sat", Limits(30, gap=0.9, workers=1))
    assert (result.reason, result.limit) == ("feasible", "gap")


def test_no_schedule_is_a_result() -> None:
    result = solve_in_child(uniform(2, 2, v_shape=True, budget=3), "cp-sat", Limits(30, workers=1))
    assert (result.schedule, result.reason) == (None, "infeasible")
    assert result.error is not None
    assert vars(result.error)["budgets_bytes"] == (4, 4)


def test_errors_are_raised_here() -> None:
    with pytest.raises(MethodError, match="2 too few"):
        solve_in_child(uniform(2, 3, budget=4), "gpipe", Limits(30))
    with pytest.raises(InputError, match="the methods are auto"):
        solve_in_child(uniform(2, 3), "zb-9", Limits(30))


def test_a_child_that_dies_leaves_its_best_behind() -> None:
    with pytest.raises(SolverDiedError, match="SIGSEGV after saying: the invariant is broken") as caught:
        heard("crash", Limits(30, workers=1))
    assert caught.value.best is not None
    assert verify(caught.value.best).ok
    assert caught.value.best.method == "crash"


def test_heartbeats_while_a_solver_keeps_the_process_to_itself() -> None:
    run = heard("hang", Limits(4, workers=1))
    beats = [at for at, event in run.events if isinstance(event, Heartbeat)]
    assert all(after - before < 1 for before, after in pairwise([0.0, *beats, run.ended_s]))


def test_a_child_started_ahead_of_time() -> None:
    with Child() as child:
        result = solve_in_child(uniform(2, 3, budget=4), "zb-auto", Limits(30), child=child)
    assert result.schedule is not None


def test_a_listener_that_fails_ends_the_child() -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the database is gone")

    with Child() as child, pytest.raises(RuntimeError, match="the database is gone"):
        solve_in_child(instance("zb-1.5b-p8-m24-mem1"), "auto", Limits(30), on_event=fail, child=child)
    assert resident_bytes(child.pid) is None


def test_memory_is_known_here() -> None:
    held, available = resident_bytes(1), available_bytes()
    assert held is None or held >= 0
    assert available is None or available > 2**20
