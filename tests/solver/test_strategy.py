"""Lanes end with their limits, whatever a search in them does."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.board import Board
from solver.lanes import Search, Turn, run_lanes
from solver.limits import Answer, Limits, Start
from solver.methods import METHODS, published_orders
from tests.problems import uniform

PROBLEM = uniform(4, 8)
OnAnswer = Callable[[Answer], None]


def answer_of(method: str) -> Answer:
    orders = published_orders(METHODS[method], PROBLEM)
    return Answer(orders, simulate(PROBLEM, orders).value_us, 0.0)


def test_a_search_that_heeds_nothing_is_not_waited_for() -> None:
    """What it had found before counts, what it finds after the limit does not."""
    go_on, ended = Event(), Event()

    def stubborn(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
        on_answer(answer_of("gpipe"))
        assert go_on.wait(60)
        on_answer(answer_of("zb-h1"))
        ended.set()
        return answer_of("zb-h1")

    board = Board(PROBLEM, Limits(1.0), None)
    run_lanes(PROBLEM, board, [[Turn("stubborn", stubborn, 1.0)]])
    assert not ended.is_set()
    assert board.stop.requested
    go_on.set()
    assert ended.wait(60)
    assert board.best.value_us == answer_of("gpipe").value_us > answer_of("zb-h1").value_us


def test_counted_work_is_waited_for() -> None:
    """Without a clock, an answer is the same however long it takes."""

    def slow(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
        Event().wait(1.0)
        return answer_of("zb-h1")

    board = Board(PROBLEM, Limits(0.01, deterministic_limit=1.0), None)
    run_lanes(PROBLEM, board, [[Turn("slow", slow, 1.0)]])
    assert board.best.value_us == answer_of("zb-h1").value_us


def test_a_failure_stops_the_other_lanes_and_is_raised() -> None:
    def fails(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
        raise ZeroDivisionError

    def waits(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
        stopped = Event()
        with limits.cancel.calling(stopped.set):
            assert stopped.wait(60)
        return answer_of("gpipe")

    board = Board(PROBLEM, Limits(60), None)
    with pytest.raises(ZeroDivisionError):
        run_lanes(PROBLEM, board, [[Turn("fails", fails, 1.0)], [Turn("waits", waits, 1.0)]])


def test_a_search_whose_kernels_are_being_compiled_lets_others_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, order = Event(), []

    def search(name: str, after: Callable[[], None]) -> Search:
        def run(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
            order.append(name)
            after()
            return answer_of("gpipe")

        return run

    local, cp_sat = search("local", lambda: None), search("cp-sat", compiled.set)
    monkeypatch.setattr("solver.lanes.is_ready", lambda search: search is not local or compiled.is_set())
    turns = [Turn("local", local, 0.1, once=True), Turn("cp-sat", cp_sat, 0.1, once=True)]
    run_lanes(PROBLEM, Board(PROBLEM, Limits(30), None), [turns])
    assert order == ["cp-sat", "local"]


def test_one_whose_kernels_are_never_ready_is_over_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solver.lanes.is_ready", lambda search: False)
    limits = Limits(0.3)
    board = Board(PROBLEM, limits, None)
    run_lanes(PROBLEM, board, [[Turn("search", METHODS["search"].search, 1.0)]])  # type: ignore[arg-type]
    assert board.best.orders is None
    assert 0.3 <= limits.seconds < 5
