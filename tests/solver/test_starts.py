"""Published schedules as starts: on large problems what is slow, or all but one, is left out when it is late."""

from __future__ import annotations

import time

import pytest

from optpipe.orders import Orders
from optpipe.problem import Problem
from solver import starts
from solver.board import Board
from solver.limits import Limits
from solver.methods import METHODS, Method, published_orders
from solver.starts import SLOW, offer_published
from tests.problems import uniform

PUBLISHED = {method.name for method in METHODS.values() if method.orders}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The published schedules that are made, in their order."""
    names: list[str] = []

    def noted(method: Method, problem: Problem) -> Orders:
        names.append(method.name)
        return published_orders(method, problem)

    monkeypatch.setattr(starts, "published_orders", noted)
    return names


def offered(seconds_ago: float) -> Board:
    """A board with the starts of a problem, for a solve of 10 s that began so long ago."""
    board = Board(uniform(4, 8, budget=6), Limits(10, began=time.perf_counter() - seconds_ago), None)
    offer_published(board.problem, board)
    return board


def test_all_are_tried_in_time(tried: list[str]) -> None:
    offered(seconds_ago=0)
    assert set(tried) == PUBLISHED
    assert tried[-len(SLOW) :] == list(SLOW)


def test_late_all_are_tried_on_a_tiny_problem(tried: list[str]) -> None:
    offered(seconds_ago=9)
    assert set(tried) == PUBLISHED


def test_late_the_quick_ones_are_tried_on_a_small_problem(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "TINY_OPS", 0)
    board = offered(seconds_ago=9)
    assert set(tried) == PUBLISHED - set(SLOW)
    assert board.best.orders is not None


def test_late_on_a_large_problem_the_first_that_fits_is_enough(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "TINY_OPS", 0)
    monkeypatch.setattr(starts, "SMALL_OPS", 0)
    board = offered(seconds_ago=9)
    assert tried[-1] == board.method
    assert set(tried) < PUBLISHED - set(SLOW)


def test_a_stop_ends_the_trying(tried: list[str]) -> None:
    board = Board(uniform(4, 8, budget=8), Limits(10), None)
    board.stop.request()
    offer_published(board.problem, board)
    assert len(tried) <= 2  # gpipe, which does not fit, and the first that does
