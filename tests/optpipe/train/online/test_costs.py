"""Op times of training steps in place of those measured before."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe.compile.actions import Action
from optpipe.problem import Problem
from optpipe.runtime.trace import Timing
from optpipe.train.online.costs import drift, op_times, retimed
from tests.optpipe.train.online.measured import BEFORE, measured, spread


def _timing(kind: str, stage: int, microbatch: int, us: float) -> Timing:
    return Timing(stage, Action(kind, stage, microbatch), 0, 1000, 1000 + int(us * 1000))


def _alone(value: Any) -> list[Any]:
    return [value]


def test_each_kind_of_a_stage_gets_its_median_from_when_it_could_begin() -> None:
    timings = [_timing("F", 0, i, us) for i, us in enumerate((1.0, 5.0, 2.0))] + [_timing("W", 1, 0, 7.0)]
    found = op_times(timings, _alone)
    assert found[0]["F"].median_us == 2.0
    assert found[0]["F"].count == 3
    assert found[1]["W"].median_us == 7.0


def test_messages_are_not_ops() -> None:
    message = Timing(0, Action("SEND_F", 0, 0, peer=1), 0, 0, 9)
    assert op_times([message], _alone) == {}


def test_the_slowest_replica_counts() -> None:
    other = op_times([_timing("F", 0, 0, 30.0)], _alone)
    slow = {"0": {"F": {"median_us": 30.0, "lower_us": 30.0, "upper_us": 30.0, "count": 1}}}
    for found in (lambda mine: [mine, slow], lambda mine: [slow, mine]):
        assert op_times([_timing("F", 0, 0, 20.0)], found) == other


def test_timed_kinds_replace_and_others_are_scaled_as_they() -> None:
    times = retimed(measured(), {0: {"F": spread(20.0), "BW": spread(52.0)}}).stages[0].times
    assert {kind: spread.median_us for kind, spread in times.items()} == {
        kind: pytest.approx(2 * us) for kind, us in BEFORE.items()
    }


def test_a_stage_that_was_not_timed_stays() -> None:
    before = measured()
    assert retimed(before, {0: {"F": spread(20.0)}}).stages[1] == before.stages[1]


def _problem(**changes: float) -> Problem:
    data = measured().problem(4).to_data()
    data["stages"][1] |= changes
    return Problem.from_data(data)


def test_drift_is_of_the_device_that_changed_most() -> None:
    total = BEFORE["F"] + BEFORE["B"] + BEFORE["W"] + BEFORE["O"] + BEFORE["R"]
    assert drift(_problem(), _problem()) == 0
    assert drift(_problem(), _problem(forward_us=14.0)) == pytest.approx(4 / total)
    assert drift(_problem(), _problem(forward_us=14.0, backward_input_us=16.0)) == pytest.approx(8 / total)
