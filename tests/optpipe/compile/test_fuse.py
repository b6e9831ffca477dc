"""BW in place of B and W side by side."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.compile import check_program, compile_schedule, fuse_adjacent
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.problem import Problem
from tests.optpipe.compile.player import play
from tests.optpipe.compile.test_streams import placed_problems
from tests.optpipe.runtime.schedules import one_f_one_b, random_schedule


def with_sizes(problem: Problem, budget: int | None, **stage_fields: object) -> Problem:
    data = problem.to_data()
    stages = [stage | stage_fields for stage in data["stages"]]
    return Problem.from_data(data | {"stages": stages, "devices": [{"memory_bytes": budget}] * len(data["devices"])})


def compute(actions: object) -> str:
    return " ".join(str(a) for a in actions if a.kind in ("F", "B", "W", "BW"))  # type: ignore[attr-defined]


def test_one_f_one_b_becomes_the_one_that_was_planned_fused() -> None:
    split, fused = one_f_one_b(3, 4), one_f_one_b(3, 4, fused=True)
    found = fuse_adjacent(compile_schedule(split), split.problem)
    check_program(found, split.problem)
    planned = compile_schedule(fused)
    assert [compute(actions) for actions in found.devices] == [compute(actions) for actions in planned.devices]


def test_only_the_stages_that_ask_for_it_are_fused() -> None:
    schedule = one_f_one_b(3, 2)
    found = fuse_adjacent(compile_schedule(schedule), schedule.problem, stages={1})
    check_program(found, schedule.problem)
    assert {a.stage for a in found.actions() if a.kind == "BW"} == {1}
    assert {a.stage for a in found.actions() if a.kind == "W"} == {0, 2}


def test_a_pair_whose_workspace_does_not_fit_stays_as_it_is() -> None:
    """Device 0 holds 3 activations of 2 bytes at its first backward, then 2, then 1."""
    schedule = one_f_one_b(3, 3)
    problem = with_sizes(schedule.problem, 8, workspace_bytes={"BW": 3})
    found = fuse_adjacent(compile_schedule(schedule), problem)
    check_program(found, problem)
    assert compute(found.devices[0]) == "F0.0 F0.1 F0.2 B0.0 W0.0 BW0.1 BW0.2"


def test_a_pair_with_memory_taken_or_given_back_between_stays_as_it_is() -> None:
    """W0.0 lets the memory of R0.1 go only when it is over: R0.1 waits for W0.0, PREPARE0.1 is behind it."""
    schedule = one_f_one_b(2, 3, moved=[(0, 0), (0, 1), (0, 2)])
    program = compile_schedule(schedule)
    stream = [a for a in program.devices[0] if a.stream == "compute"]
    apart = {a[1:3] for a, b in pairwise(stream) if a.kind == "B" and b.kind != "W"}
    found = fuse_adjacent(program, schedule.problem)
    check_program(found, schedule.problem)
    assert {a[1:3] for a in found.devices[0] if a.kind == "B"} == apart


@given(placed_problems(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_what_is_fused_runs_keeps_its_order_and_needs_no_more_memory(problem: Problem, seed: int) -> None:
    """Without workspace BW holds what B held before it, and what W left after it."""
    problem = with_sizes(problem, None, workspace_bytes={}, backward_weight_bytes=0)
    program = compile_schedule(random_schedule(problem, seed))
    found = fuse_adjacent(program, problem)
    check_program(found, problem)
    play(found, lambda op: 1.0)
    no_messages = [0] * (len(problem.stages) - 1)
    peaks = zip(*(planned_peaks_bytes(p, problem, no_messages) for p in (found, program)), strict=True)
    assert all(fused <= split for fused, split in peaks)
    for before, after in zip(program.devices, found.devices, strict=True):
        fused = {a[1:3] for a in after if a.kind == "BW"}
        kept = [a.key for a in before if a.kind not in ("B", "W", "BW") or a[1:3] not in fused]
        assert kept == [a.key for a in after if a.kind != "BW"]
