"""Evaluation: forwards alone, on any placement."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.compile import compile_forward
from tests.optpipe.compile.player import play


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_any_placement_runs_every_forward_once(placement: list[int], microbatches: int) -> None:
    program = compile_forward(placement, microbatches)  # checked as every program is: it cannot deadlock
    times = play(program, lambda op: 1.0)
    forwards = [op for op in times if op.kind == "F"]
    assert sorted(forwards) == sorted(("F", s, i) for s in range(len(placement)) for i in range(microbatches))
    assert {action.kind for action in program.actions()} <= {"F", "SEND_F", "RECV_F"}
    for kind, s, i in forwards:
        assert not s or times[kind, s - 1, i][1] <= times[kind, s, i][0]  # type: ignore[index]


def test_a_linear_pipeline_is_full_after_its_warm_up() -> None:
    """4 stages and 10 microbatches take 4 + 10 - 1 forwards of time where messages take none."""
    times = play(compile_forward([0, 1, 2, 3], 10), lambda op: 1.0 if op.kind == "F" else 0.0)
    assert max(end for _, end in times.values()) == 13


def test_devices_without_a_stage_have_empty_lists() -> None:
    assert [len(actions) for actions in compile_forward([0, 2], 2, devices=4).devices] == [4, 0, 4, 0]
