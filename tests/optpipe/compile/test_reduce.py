"""REDUCE stands where the gradients of a stage are complete, and only if asked for."""

from __future__ import annotations

import pytest

from optpipe.compile import check_program, compile_schedule
from optpipe.errors import OrderError
from optpipe.schedule import Schedule
from tests.optpipe.compile.test_check import moved
from tests.optpipe.runtime.schedules import one_f_one_b, v_wave


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), one_f_one_b(2, 3, fused=True), v_wave(2, 3)])
def test_every_stage_is_reduced_once_right_after_its_last_weight_gradient(schedule: Schedule) -> None:
    program = compile_schedule(schedule, reduce_gradients=True)
    assert sorted(a.stage for a in program.actions() if a.kind == "REDUCE") == list(range(len(program.placement)))
    for actions in program.devices:
        for k, action in enumerate(actions):
            if action.kind == "REDUCE":
                assert actions[k - 1].kind in ("W", "BW")
                assert actions[k - 1].stage == action.stage
                assert not any(a.kind in ("W", "BW") and a.stage == action.stage for a in actions[k:])


def test_a_device_goes_on_with_its_other_stage_meanwhile() -> None:
    """V shape: the backward of the stage on the way up is over long before that of the stage on the way down."""
    compute = [str(a) for a in compile_schedule(v_wave(1, 2), reduce_gradients=True).devices[0] if a.kind != "F"]
    assert compute == ["B1.0", "W1.0", "B1.1", "W1.1", "REDUCE1.0", "B0.0", "W0.0", "B0.1", "W0.1", "REDUCE0.0"]


def test_without_asking_there_is_none() -> None:
    assert not any(a.kind == "REDUCE" for a in compile_schedule(one_f_one_b(2, 2)).actions())


def test_a_reduction_before_a_weight_gradient_is_refused() -> None:
    program = compile_schedule(one_f_one_b(2, 2), reduce_gradients=True)
    with pytest.raises(OrderError, match=r"runs REDUCE0\.0 at place 5, before W0\.0 at place 7"):
        check_program(moved(program, 0, "REDUCE0.0", 5))
