"""A solve in a child gives what a solve in this process gives, errors included, and says how it goes."""

from __future__ import annotations

import pytest

from instances import HALF, instance, uniform
from optpipe.errors import InputError, MethodError
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.bounds import lower_bound_us
from solver.build import within_budgets
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.process import Child, Heartbeat, SolverDiedError, solve_in_child
from solver.process.channel import available_bytes, resident_bytes
from solver.process.parent import Fallback
from solver.serial import serial_orders
from solver.solution import Feed, Progress, Solution
from solver.strategy import SharedIncumbent
from solver.warm_starts import offer_published
from tests.clock import Clock
from tests.problems import KNOWN_OPTIMA
from tests.promises.harness import heard
from tests.unequal import unequal

in_a_forked_child = pytest.mark.usefixtures("forked_children")
"""For what does not depend on how a child starts: the other tests start it as a solve does."""


@in_a_forked_child
def test_a_proved_optimum() -> None:
    problem, optimum = KNOWN_OPTIMA["makespan"]
    result = solve_in_child(problem, "cp-sat", Limits(120, workers=2))
    assert (result.reason, result.limit, result.error) == ("optimal", None, None)
    assert result.schedule is not None
    assert result.schedule.value_us == optimum
    assert result.schedule.problem == problem


@in_a_forked_child
def test_a_published_schedule_is_done_when_it_is_there() -> None:
    result = solve_in_child(uniform(4, 8), "gpipe", Limits(30))
    assert (result.reason, result.limit) == ("feasible", None)


@in_a_forked_child
def test_the_gap_asked_for() -> None:
    result = solve_in_child(KNOWN_OPTIMA["offload"][0], "cp-sat", Limits(30, gap=0.9, workers=1))
    assert (result.reason, result.limit) == ("feasible", "gap")


@in_a_forked_child
def test_no_schedule_is_a_result() -> None:
    result = solve_in_child(uniform(2, 2, v_shape=True, budget=3), "cp-sat", Limits(30, workers=1))
    assert (result.schedule, result.reason) == (None, "infeasible")
    assert result.error is not None
    assert vars(result.error)["budgets_bytes"] == (4, 4)


@in_a_forked_child
def test_what_other_solves_find_is_the_childs_own() -> None:
    """A better schedule is taken over, and a bound that meets it ends the search."""
    problem, feed = instance("zb-1.5b-p8-m24-mem1"), Feed()
    poor, better = (published_orders(METHODS[method], problem) for method in ("1f1b", "zb-h1"))
    value_us = simulate(problem, better).value_us

    def on_event(event: Progress | Heartbeat) -> None:
        if isinstance(event, Progress) and event.solution.value_us > value_us:
            feed.offer(Solution(better, value_us, 0.0, "elsewhere"))
        elif isinstance(event, Progress):
            feed.offer(Solution(None, float("inf"), event.solution.value_us, "elsewhere"))

    result = solve_in_child(problem, "milp", Limits(500, workers=1), on_event=on_event, starts=[poor], feed=feed)
    assert result.schedule is not None
    assert result.reason == "optimal"
    assert result.schedule.value_us <= value_us


@in_a_forked_child
def test_errors_are_raised_here() -> None:
    with pytest.raises(MethodError, match="2 B too few"):
        solve_in_child(uniform(2, 3, budget=4), "gpipe", Limits(30))
    with pytest.raises(InputError, match="the methods are auto"):
        solve_in_child(uniform(2, 3), "zb-9", Limits(30))


def test_a_child_that_dies_leaves_its_best_behind() -> None:
    with pytest.raises(SolverDiedError, match="SIGSEGV after saying: the invariant is broken") as caught:
        heard("crash", Limits(30, workers=1))
    assert caught.value.best is not None
    assert verify(caught.value.best).ok
    assert caught.value.best.method == "crash"


def test_an_unexpected_exception_is_what_the_error_ends_with() -> None:
    reason = r"(?s)exit code 1 after saying: Traceback.*\nAssertionError: the invariant is broken\. Maybe "
    with pytest.raises(SolverDiedError, match=reason) as caught:
        heard("fail", Limits(30, workers=1))
    assert caught.value.best is not None
    assert caught.value.best.method == "fail"


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


LIMIT_S = 4.0


def floor_us(problem: Problem) -> float:
    orders = serial_orders(problem)
    assert orders is not None
    return simulate(problem, orders).value_us


@pytest.mark.parametrize(
    "problem",
    [
        uniform(4, 8),
        uniform(4, 8, budget=6),
        uniform(4, 8, budget=3, offload=HALF),
        uniform(4, 8, v_shape=True, budget=12),
    ],
)
def test_the_best_that_fits(problem: Problem) -> None:
    fallback = Fallback(problem, Limits(LIMIT_S))
    fallback.make()
    assert fallback.best.orders is not None
    simulation = simulate(problem, fallback.best.orders)
    assert simulation.value_us == fallback.best.value_us
    assert within_budgets(problem, fallback.best.orders, simulation)
    assert fallback.best.value_us < floor_us(problem)
    assert fallback.best.bound_us == lower_bound_us(problem)


@pytest.mark.parametrize(
    ("method", "text"), [("zb-9", "the methods are auto"), ("pattern", "microbatch_factors that repeat")]
)
def test_nothing_is_made_in_the_stead_of_a_method_that_cannot_begin(method: str, text: str) -> None:
    """A child that is late says so, too, and until then a schedule from here would look like what was asked for."""
    problem = unequal(2, 4, microbatch_factors=[{}, {"time": 2}, {}, {}])
    fallback = Fallback(problem, Limits(LIMIT_S), method)
    fallback.make()
    assert fallback.best.orders is None
    assert text in str(fallback.error)


def test_nothing_is_made_that_nobody_waits_for() -> None:
    fallback = Fallback(uniform(4, 8), Limits(LIMIT_S))
    fallback.stop()
    fallback.make()
    assert fallback.best.orders is None


def test_a_child_that_never_begins() -> None:
    problem = uniform(8, 64, budget=7)
    shared = SharedIncumbent(problem, Limits(LIMIT_S), None)
    offer_published(problem, shared)  # first, so that all of it is loaded when the fallback needs it
    limits, clock = Limits(LIMIT_S, workers=1), Clock()
    with Child("tests.solver.process.asleep") as child:
        result = solve_in_child(problem, "auto", limits, child=child)
    assert clock.seconds <= LIMIT_S + 2
    assert (result.reason, result.limit) == ("feasible", "time")
    assert result.schedule is not None
    assert verify(result.schedule).ok
    assert result.schedule.method == shared.best.method
    assert result.schedule.value_us == shared.best.value_us < floor_us(problem) / 2
