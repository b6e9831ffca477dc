"""Published schedules as starts: all of them before anything else, the cheap ones first, counted in processor time."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from optpipe.errors import MethodError
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.board import Board
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.starts import WITH_KERNELS, WITHOUT_KERNELS, offer_published
from tests.problems import HALF, uniform

PUBLISHED = {method.name for method in METHODS.values() if method.orders}
IN_ORDER = [name for name in (*WITHOUT_KERNELS, *WITH_KERNELS) if "repeated" not in name]
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


def offered(problem: Problem, limits: Limits) -> Board:
    """A board with the starts of a problem."""
    board = Board(problem, limits, None)
    offer_published(problem, board)
    return board


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


def test_once_the_processor_time_is_used_up_the_first_that_fits_is_enough(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used_s = itertools.count(0, 10)
    monkeypatch.setattr(time, "thread_time", lambda: next(used_s))
    board = offered(PROBLEM, Limits(5))
    assert tried[-1] == board.method
    assert len(tried) < len(PUBLISHED)


def test_the_floor_is_for_where_nothing_published_fits() -> None:
    tight = uniform(2, 2, v_shape=True, offload=HALF, budget=3)
    assert offered(uniform(4, 8, budget=6), Limits(5)).method in PUBLISHED
    assert offered(tight, Limits(5)).best.orders is not None


def test_a_stop_ends_the_trying(tried: list[str]) -> None:
    board = Board(uniform(4, 8, budget=8), Limits(10), None)
    board.stop.request()
    offer_published(board.problem, board)
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
    board = offered(problem, Limits(0.01, began=time.perf_counter() - 60))
    for name in PUBLISHED:
        with suppress(MethodError):
            assert board.best.value_us <= simulate(problem, published_orders(METHODS[name], problem)).value_us


def test_what_is_not_filled_keeps_the_budget_all_the_same() -> None:
    """Filling keeps the peak of the block: what exceeds the budget is not filled, and refused with its bytes."""
    with pytest.raises(MethodError, match="v-zb needs 16 bytes on device 0, but its budget is 12"):
        published_orders(METHODS["v-zb"], uniform(4, 8, v_shape=True, budget=12))
