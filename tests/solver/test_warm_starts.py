"""Published schedules as starts: before anything else, the cheapest first, in processor time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
from hypothesis import given, settings

from instances import HALF, instance, uniform
from optpipe.errors import MethodError, NoSolutionError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver import warm_starts
from solver.build import within_budgets
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.solve import search
from solver.strategy import SharedIncumbent
from solver.warm_starts import WITH_KERNELS, WITHOUT_KERNELS, lengthened, offer_published, repeated_published
from tests.problems import problems
from tests.recomputing import FULL, recomputing
from tests.sample import examples
from tests.unequal import unequal

RECOMPUTING = {"1f1b-recompute", "1f1b-recompute-ahead"}
"""1F1B with one choice of mode for each stage, as it is tried with every other such choice (`solver.by_stage`)."""
OF_SLICES = {"seq1f1b", "slimpipe"}
"""Tried where there are slices; without them it is 1F1B once more."""
PUBLISHED = {method.name for method in METHODS.values() if method.orders} - RECOMPUTING - OF_SLICES
IN_ORDER = [name for name in (*WITHOUT_KERNELS, *WITH_KERNELS) if "repeated" not in name and name not in OF_SLICES]
PROBLEM = uniform(4, 8, budget=6)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The published schedules that are made, in their order."""
    names: list[str] = []
    before = dict(METHODS)

    def make(name: str, problem: Problem) -> Orders:
        names.append(name)
        return published_orders(before[name], problem)

    for name in PUBLISHED:
        monkeypatch.setitem(METHODS, name, replace(before[name], orders=partial(make, name)))
    return names


def offered(problem: Problem, limits: Limits) -> SharedIncumbent:
    """A board with the starts of a problem."""
    shared = SharedIncumbent(problem, limits, None)
    offer_published(problem, shared)
    return shared


def test_every_published_schedule_has_its_place() -> None:
    assert sorted(IN_ORDER) == sorted(PUBLISHED)


@pytest.mark.parametrize("limit_s", [0.01, 10])
def test_all_are_tried_however_late_it_is(tried: list[str], limit_s: float) -> None:
    """A machine that gave no time to this process has used up the limit before anything was made."""
    offered(PROBLEM, Limits(limit_s, began=time.perf_counter() - 60))
    assert tried == IN_ORDER


def test_waiting_for_a_processor_leaves_none_out(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes no more processor time than ever, but long by the clock."""
    clock_s = itertools.count(time.perf_counter(), 30)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock_s))
    offered(PROBLEM, Limits(1))
    assert set(tried) == PUBLISHED


def costing(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let every entry of the list of published schedules take so much processor time, with kernels compiled before."""
    monkeypatch.setattr(warm_starts, "is_marked", lambda _: True)
    monkeypatch.setattr(time, "thread_time", itertools.count(0, seconds).__next__)


def test_what_takes_less_than_the_limit_together_is_all_tried(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    costing(monkeypatch, 0.1)
    offered(PROBLEM, Limits(5))
    assert tried == IN_ORDER


def test_none_is_begun_once_they_have_taken_the_limit(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheapest come first, so that what is left out is what takes longest."""
    costing(monkeypatch, 2)
    shared = offered(PROBLEM, Limits(5))
    assert tried == IN_ORDER[: len(tried)]
    assert 1 < len(tried) < len(IN_ORDER)
    assert shared.best.orders is not None


def test_nothing_that_fits_is_looked_for_beyond_the_limit(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every budget is too small for the cheap ones, a late answer is better than none."""
    costing(monkeypatch, 20)
    assert offered(uniform(4, 8, budget=1), Limits(5)).best.orders is None
    assert tried == IN_ORDER


def tried_before_searches(problem: Problem, tried: list[str]) -> list[str]:
    """The published schedules that were made when the first search of a solve begins."""
    before: list[str] = []
    limits = Limits(deterministic_limit=0.001)

    def note() -> None:
        before.extend(tried)
        limits.cancel.request()

    with suppress(NoSolutionError):
        search(problem, "auto", limits, on_searching=note)
    return before


def test_all_are_tried_before_the_first_search(tried: list[str]) -> None:
    assert tried_before_searches(PROBLEM, tried) == IN_ORDER


def test_searches_that_begin_too_early_would_be_seen(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where the order is broken."""
    monkeypatch.setattr(import_module("solver.solve"), "offer_published", lambda *_: None)
    assert tried_before_searches(PROBLEM, tried) == []


def test_the_floor_is_for_where_nothing_published_fits() -> None:
    tight = uniform(2, 2, v_shape=True, offload=HALF, budget=3)
    assert offered(uniform(4, 8, budget=6), Limits(5)).best.method in PUBLISHED
    assert offered(tight, Limits(5)).best.orders is not None


def test_a_stop_ends_the_trying(tried: list[str]) -> None:
    shared = SharedIncumbent(uniform(4, 8, budget=8), Limits(10), None)
    shared.stop.request()
    offer_published(shared.problem, shared)
    assert not tried


@pytest.mark.parametrize(
    "problem",
    [
        uniform(4, 8, budget=6),
        uniform(4, 8, budget=8, objective="device_span"),
        uniform(4, 8, budget=4, offload=HALF),
        uniform(4, 8, v_shape=True, budget=12),
        uniform(4, 40, v_shape=True, budget=12),
    ],
)
def test_the_best_is_no_worse_than_any_published_schedule_alone(problem: Problem) -> None:
    shared = offered(problem, Limits(0.01, began=time.perf_counter() - 60))
    for name in PUBLISHED:
        with suppress(MethodError):
            assert shared.best.value_us <= simulate(problem, published_orders(METHODS[name], problem)).value_us


def test_what_is_not_filled_keeps_the_budget_all_the_same() -> None:
    """Filling keeps the peak of the block: what exceeds the budget is not filled, and refused with its bytes."""
    with pytest.raises(MethodError, match="v-zb needs 16 B on device 0, but its budget is 12 B"):
        published_orders(METHODS["v-zb"], uniform(4, 8, v_shape=True, budget=12))


def with_microbatches(problem: Problem, microbatches: int) -> Problem:
    return Problem.from_data(problem.to_data() | {"microbatches": microbatches})


def repeated(name: str, problem: Problem) -> Orders:
    make = METHODS[name].orders
    assert make is not None
    return repeated_published(make, problem)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("zb-auto", uniform(4, 67, budget=8)),
        ("zb-v", uniform(4, 66, budget=16, v_shape=True)),
        ("v-half", uniform(4, 66, budget=12, v_shape=True)),
        ("v-zb", uniform(3, 72, v_shape=True)),
        ("zb-h1", with_microbatches(instance("zb-1.5b-p8-m24-mem1.5"), 256)),
    ],
)
def test_is_as_good_as_the_published_schedule_for_all_microbatches(name: str, problem: Problem) -> None:
    orders = repeated(name, problem)
    simulation = simulate(problem, orders)
    assert within_budgets(problem, orders, simulation)
    published = simulate(problem, published_orders(METHODS[name], problem)).value_us
    assert simulation.value_us == pytest.approx(published)


def test_few_microbatches_are_left_to_the_schedules_themselves() -> None:
    with pytest.raises(MethodError, match="31 microbatches are too few"):
        repeated("zb-auto", uniform(4, 31, budget=8))


def test_slices_begin_with_what_knows_them() -> None:
    """In the memory of n + p - 1 slices, which is less than GPipe takes."""
    problem = unequal(2, 4, budget=3 * 4, slices={"count": 2})
    shared = offered(problem, Limits(5, without=frozenset({"priority-lists"})))
    assert shared.best.method == "seq1f1b"
    assert shared.best.value_us == (4 + 1 / 2) * 6
    assert offered(problem, Limits(5)).best.value_us < shared.best.value_us


def test_every_published_schedule_still_comes() -> None:
    """The best on the board is at least as good as every published schedule that fits."""
    problem = uniform(4, 256, budget=12, v_shape=True)
    shared = SharedIncumbent(problem, Limits(30), None)
    offer_published(problem, shared)
    for method in METHODS.values():
        try:
            orders = published_orders(method, problem) if method.orders else None
        except MethodError:
            continue
        assert orders is None or shared.best.value_us <= simulate(problem, orders).value_us


def test_what_is_no_period_is_not_repeated() -> None:
    """GPipe runs all F first: between two of them there is no B."""
    problem = uniform(2, 8)
    assert lengthened(problem, published_orders(METHODS["gpipe"], problem), 3, 1, 5) is None


@settings(max_examples=examples(60))
@given(problems(max_microbatches=5))
def test_every_microbatch_of_a_serial_schedule_is_a_period(problem: Problem) -> None:
    """Repeating it gives the serial schedule of more microbatches, on any placement."""
    more = with_microbatches(problem, problem.microbatches + 3)
    for begin in range(problem.microbatches - 1):
        assert lengthened(problem, _serial(problem), begin, 1, 3) == _serial(more)


def _serial(problem: Problem) -> Orders:
    """One microbatch after another, without transfers."""
    stages = range(len(problem.stages))
    plan = [("F", s) for s in stages] + [(kind, s) for s in reversed(stages) for kind in "BW"]
    return Orders.of_compute(
        [Op(kind, s, i) for i in range(problem.microbatches) for kind, s in plan if problem.stages[s].device == d]
        for d in range(len(problem.devices))
    )


@pytest.mark.parametrize("problem", [uniform(4, 40, budget=4, offload=HALF), recomputing(4, 40, [FULL], 25)])
def test_a_large_problem_begins_with_lists_before_anything_published(
    problem: Problem, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may have no time for more, and the floor is far from what memory allows."""
    monkeypatch.setattr(warm_starts, "MOST_MODEL_OPS", 600)
    monkeypatch.setattr(warm_starts, "LEAST_S", -1.0)
    monkeypatch.setattr(warm_starts, "is_marked", lambda _: True)
    monkeypatch.setattr(warm_starts, "are_ready", lambda _: True)
    problem = with_microbatches(problem, 80)
    shared = SharedIncumbent(problem, Limits(60), None)
    offer_published(problem, shared, share=0.15)
    assert not tried
    assert shared.best.method == "first-lists"
    assert shared.best.gap < 0.4


def test_with_a_share_of_the_time_the_floor_does_where_nothing_published_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a large problem of little memory would try them all before its search."""
    problem, tried = uniform(4, 40, budget=2), list[int]()

    def made(*_: object, **__: object) -> Iterator[tuple[str, Callable[[], Orders | None]]]:
        for k in range(1000):
            yield "none fits", partial(tried.append, k)  # makes nothing

    monkeypatch.setattr(warm_starts, "starts", made)
    monkeypatch.setattr(warm_starts, "LEAST_S", -1.0)
    monkeypatch.setattr(warm_starts, "is_marked", lambda _: True)
    shared = SharedIncumbent(problem, Limits(60), None)
    offer_published(problem, shared, share=-1.0)
    assert not tried
    assert shared.best.method == "floor"
