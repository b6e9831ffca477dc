"""Searches that `auto` runs: to proof on small problems, no models on the largest, every core in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Event, Thread

import pytest

from instances import HALF, uniform
from instances.four_by_eight import four_by_eight
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds.lower_bound import best_bound
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.scale import count_ops
from solver.searches import Search
from solver.solution import OnSolution, Progress, Solution
from solver.strategy import (
    LARGE_OPS,
    MOST_MODEL_OPS,
    SMALL_OPS,
    SharedIncumbent,
    TimeSlice,
    auto_subsolvers,
    run_subsolvers,
)
from tests.recomputing import recomputing
from tests.unequal import unequal

SMALL, MEDIUM, LARGE, LARGEST = uniform(4, 8), uniform(8, 64), uniform(8, 1024), uniform(32, 1024)
TIGHT = uniform(16, 32, budget=8)
MODES_SMALL, MODES_LARGE, MODES_LARGEST = recomputing(4, 8), recomputing(8, 64), recomputing(32, 1024)
SLICES = {"count": 2, "factors": {"forward": [1, 2]}}
UNITS_SMALL, UNITS_LARGE, UNITS_LARGEST = (unequal(*size, slices=SLICES) for size in ((4, 4), (8, 32), (32, 512)))
UNSPLIT = unequal(4, 8, split_backward=False)
INTERLEAVED = four_by_eight(15)
LEAVES, ALL_LEAVE = uniform(8, 64, budget=8, offload=HALF), uniform(64, 256, budget=64, offload=HALF)
HOST = uniform(64, 256, budget=64, offload=HALF, host_memory_bytes=64)


def test_the_sizes_are_what_they_are_called() -> None:
    small, medium, large, largest = map(count_ops, (SMALL, MEDIUM, LARGE, LARGEST))
    assert small <= SMALL_OPS < medium <= LARGE_OPS < large <= MOST_MODEL_OPS < largest


def test_progress_is_reported_in_order_while_others_offer() -> None:
    """A callback may offer, wait for another thread that offers, and ask for the best; none is lost."""
    problem, reported = uniform(2, 2), []

    def on_progress(progress: Progress) -> None:
        reported.append(progress.solution.value_us)
        if len(reported) == 1:
            shared.offer(Solution(orders, 300.0))
            other = Thread(target=shared.offer, args=(Solution(orders, 200.0),))
            other.start()
            other.join(10)
            assert not other.is_alive()
            assert shared.best.value_us == 200

    shared = SharedIncumbent(problem, Limits(float("inf")), on_progress)
    orders = published_orders(METHODS["1f1b"], problem)
    shared.offer(Solution(orders, 400.0))
    shared.close()
    shared.offer(Solution(orders, 100.0))
    assert reported == [400, 300, 200]


def test_small_problems_with_copies_have_searches_for_schedules_beside_proofs() -> None:
    problem = four_by_eight(0)
    assert count_ops(problem) <= SMALL_OPS
    proving, finding = auto_subsolvers(problem, 2)
    assert {turn.method for turn in finding} == {"search", "windows"}
    assert {turn.method for turn in proving} == {"states", "cp-sat", "parts"}


@pytest.mark.parametrize(
    ("problem", "methods"),
    [
        (SMALL, {"search", "states", "parts", "cp-sat", "windows"}),
        (MEDIUM, {"search", "pattern", "windows", "relaxation", "parts"}),
        (INTERLEAVED, {"search", "states", "lists", "pattern", "cp-sat", "windows", "relaxation"}),
        (TIGHT, {"search", "pattern", "cp-sat", "windows", "relaxation", "parts"}),
        (LEAVES, {"search", "lists", "pattern", "windows", "relaxation", "parts"}),
        (ALL_LEAVE, {"search", "lists", "pattern"}),
        (HOST, {"search", "pattern"}),
        (LARGE, {"search", "pattern", "windows", "relaxation"}),
        (LARGEST, {"search", "pattern"}),
        (MODES_SMALL, {"search", "states", "parts", "cp-sat", "windows"}),
        (MODES_LARGE, {"search", "lists", "pattern", "windows", "cp-sat"}),
        (MODES_LARGEST, {"search", "lists", "pattern"}),
        (UNITS_SMALL, {"search", "states", "parts", "cp-sat", "windows"}),
        (UNITS_LARGE, {"search", "pattern", "cp-sat", "windows"}),
        (UNITS_LARGEST, {"search", "pattern"}),
        (UNSPLIT, {"search", "states", "parts", "cp-sat", "windows"}),
    ],
    ids=[
        "small",
        "medium",
        "interleaved",
        "tight",
        "leaves",
        "all leave",
        "all leave to a small host",
        "large",
        "largest",
        "modes, small",
        "modes, large",
        "modes, largest",
        "units, small",
        "units, large",
        "units, largest",
        "unsplit",
    ],
)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_searches_and_cores(problem: Problem, methods: set[str], workers: int) -> None:
    subsolvers = auto_subsolvers(problem, workers)
    assert {turn.method for subsolver in subsolvers for turn in subsolver} == methods
    assert all(round(sum(turn.share for turn in subsolver), 9) <= 1 for subsolver in subsolvers)
    assert sum(max(turn.workers for turn in subsolver) for subsolver in subsolvers) == workers


@pytest.mark.parametrize("problem", [SMALL, MEDIUM, TIGHT], ids=["small", "medium", "tight"])
def test_lanes_make_the_same_searches_and_begin_with_another(problem: Problem) -> None:
    lanes = [auto_subsolvers(problem, 2, lane) for lane in range(3)]
    longest = max(range(len(lanes[0])), key=lambda index: len(lanes[0][index]))
    firsts = [subsolvers[longest][0] for subsolvers in lanes]
    assert len(set(firsts)) == 3
    for subsolvers in lanes:
        assert [set(subsolver) for subsolver in subsolvers] == [set(subsolver) for subsolver in lanes[0]]


PROBLEM = uniform(4, 8)


def answer_of(method: str) -> Solution:
    orders = published_orders(METHODS[method], PROBLEM)
    return Solution(orders, simulate(PROBLEM, orders).value_us, 0.0)


def test_a_search_that_heeds_nothing_is_not_waited_for() -> None:
    """Its solutions before the limit count, those after it do not."""
    go_on, ended = Event(), Event()

    def stubborn(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
        on_solution(answer_of("gpipe"))
        assert go_on.wait(60)
        on_solution(answer_of("zb-h1"))
        ended.set()
        return answer_of("zb-h1")

    shared = SharedIncumbent(PROBLEM, Limits(3.0), None)
    run_subsolvers(PROBLEM, shared, [[TimeSlice("stubborn", stubborn, 1.0)]])
    assert not ended.is_set()
    assert shared.stop.requested
    go_on.set()
    assert ended.wait(60)
    assert shared.best.value_us == answer_of("gpipe").value_us > answer_of("zb-h1").value_us


def test_a_schedule_and_a_bound_are_recorded_as_whose_they_are() -> None:
    """Whoever passes one on, and whoever improves the other; a better schedule may come with a bound of another."""
    problem, reported = PROBLEM, list[tuple[float, float, str, str]]()

    def search(found: Solution | None, bound_us: float) -> Search:
        def run(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
            return replace(found or start, bound_us=max(start.bound_us, bound_us))

        return run

    def note(progress: Progress) -> None:
        best = progress.solution
        reported.append((best.value_us, best.bound_us, best.method, best.proved_by))

    shared = SharedIncumbent(problem, Limits(float("inf"), workers=1, deterministic_limit=1.0), note)
    first_us, gpipe, better = shared.best.bound_us, answer_of("gpipe"), answer_of("zb-h1")
    raised_us = (first_us + better.value_us) / 2
    searches = {"X": search(gpipe, 0.0), "Y": search(None, raised_us), "Z": search(better, 0.0), "V": search(None, 0.0)}
    run_subsolvers(problem, shared, [[TimeSlice(name, run, 0.1) for name, run in searches.items()]])
    own = best_bound(problem)[0]
    assert reported == [
        (gpipe.value_us, first_us, "X", own),
        (gpipe.value_us, raised_us, "X", "Y"),
        (better.value_us, raised_us, "Z", "Y"),
    ]


def test_counted_work_is_waited_for() -> None:
    """Without a clock, an answer is the same however long it takes."""

    def slow(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
        Event().wait(1.0)
        return answer_of("zb-h1")

    shared = SharedIncumbent(PROBLEM, Limits(0.01, deterministic_limit=1.0), None)
    run_subsolvers(PROBLEM, shared, [[TimeSlice("slow", slow, 1.0)]])
    assert shared.best.value_us == answer_of("zb-h1").value_us


def test_a_failure_stops_the_other_lanes_and_is_raised() -> None:
    def fails(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
        raise ZeroDivisionError

    def waits(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
        stopped = Event()
        with limits.cancel.calling(stopped.set):
            assert stopped.wait(60)
        return answer_of("gpipe")

    shared = SharedIncumbent(PROBLEM, Limits(60), None)
    with pytest.raises(ZeroDivisionError):
        run_subsolvers(PROBLEM, shared, [[TimeSlice("fails", fails, 1.0)], [TimeSlice("waits", waits, 1.0)]])


def test_a_search_that_found_nothing_has_another_turn_with_a_better_incumbent() -> None:
    """With the first there is nothing more to find; the answer comes long before the limit, once both know that."""
    seen, looked = list[float](), Event()

    def proof(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
        seen.append(start.value_us)
        looked.set()
        return start

    def finds(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
        assert looked.wait(60)
        return answer_of("gpipe")

    limits = Limits(600)
    lanes = [[TimeSlice("proof", proof, 0.1)], [TimeSlice("finds", finds, 0.1)]]
    run_subsolvers(PROBLEM, SharedIncumbent(PROBLEM, limits, None), lanes)
    assert seen == [float("inf"), answer_of("gpipe").value_us]
    assert limits.seconds < 300


def test_a_search_whose_kernels_are_being_compiled_lets_others_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, order = Event(), []

    def search(name: str, after: Callable[[], None]) -> Search:
        def run(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
            order.append(name)
            after()
            return answer_of("gpipe")

        return run

    local, cp_sat = search("local", lambda: None), search("cp-sat", compiled.set)
    monkeypatch.setattr("solver.strategy.is_ready", lambda search: search is not local or compiled.is_set())
    time_slices = [TimeSlice("local", local, 0.1, once=True), TimeSlice("cp-sat", cp_sat, 0.1, once=True)]
    run_subsolvers(PROBLEM, SharedIncumbent(PROBLEM, Limits(30), None), [time_slices])
    assert order == ["cp-sat", "local"]


def test_one_whose_kernels_are_never_ready_is_over_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solver.strategy.is_ready", lambda search: False)
    limits = Limits(0.3)
    shared = SharedIncumbent(PROBLEM, limits, None)
    run_subsolvers(PROBLEM, shared, [[TimeSlice("search", METHODS["search"].search, 1.0)]])  # type: ignore[arg-type]
    assert shared.best.orders is None
    assert 0.3 <= limits.seconds < 5
