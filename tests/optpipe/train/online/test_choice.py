"""Which of two schedules is better, predicted and in fact."""

import pytest

from optpipe.problem import Problem
from optpipe.train.online.choice import FIRST_STEPS, STEPS_AFTER, Choice, Trial, choose
from solver.portfolio import solve
from tests.problems import uniform


@pytest.mark.parametrize(
    ("in_use_us", "found_us", "least_gain", "better"),
    [(100, 98, 0.01, True), (100, 99.5, 0.01, False), (100, 100, 0.0, False), (100, 101, 0.0, False)],
)
def test_only_what_saves_enough_is_better(in_use_us: float, found_us: float, least_gain: float, better: bool) -> None:
    assert Choice(in_use_us, found_us, least_gain).better is better


def test_both_are_timed_with_the_newest_costs() -> None:
    problem = uniform(4, 8)
    in_use, found = solve(problem, "1f1b"), solve(problem, "zb-h1")
    slower = Problem.from_data(
        problem.to_data()
        | {"stages": [stage.to_data() | {"forward_us": 3 * stage.forward_us} for stage in problem.stages]}
    )
    choice = choose(slower, in_use, found, 0.01)
    assert choice.in_use_us == solve(slower, "1f1b").value_us > in_use.value_us
    assert choice.found_us == solve(slower, "zb-h1").value_us
    assert choice.better


def _trial(before: list[float], after: list[float]) -> Trial:
    trial = Trial(before)
    for seconds in after:
        trial.add(seconds)
    return trial


def test_a_trial_waits_for_enough_steps() -> None:
    assert not _trial([1.0] * 9, [1.0] * (FIRST_STEPS + STEPS_AFTER - 1)).over
    assert _trial([1.0] * 9, [1.0] * (FIRST_STEPS + STEPS_AFTER)).over


def test_the_first_steps_after_a_change_do_not_count() -> None:
    trial = _trial([1.0, 1.1, 0.9, 1.0, 1.05], [9.0] * FIRST_STEPS + [0.8] * STEPS_AFTER)
    assert not trial.worse
    assert trial.figures == "steps take 0.800 s after the change, 1.000 s before it"


def test_longer_steps_are_worse_beyond_their_noise() -> None:
    before = [1.0, 1.1, 0.9, 1.0, 1.2, 1.05]
    assert _trial(before, [0.0] * FIRST_STEPS + [1.5] * STEPS_AFTER).worse
    assert not _trial(before, [0.0] * FIRST_STEPS + [1.06] * STEPS_AFTER).worse


def test_without_steps_before_there_is_nothing_to_compare() -> None:
    trial = _trial([], [1.0] * (FIRST_STEPS + STEPS_AFTER))
    assert not trial.worse
    assert trial.figures == "steps take 1.000 s after the change"


def test_too_few_steps_before_condemn_nothing() -> None:
    assert not _trial([1.0], [0.0] * FIRST_STEPS + [1.5] * STEPS_AFTER).worse
