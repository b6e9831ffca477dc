"""Host buffers: never two live activations in one slab, and few slabs of little more than what is there at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.compile import compile_schedule
from optpipe.compile.slabs import HostPlan, plan_slabs
from optpipe.orders import Op
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.portfolio import solve
from tests.optpipe.runtime.schedules import one_f_one_b
from tests.problems import instance

Times = dict[Op, tuple[float, float]]


def offloading(sizes: Iterable[int], microbatches: int) -> Problem:
    """One device with a stage for each size, all of which may leave."""
    common = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    stages = [
        common
        | {"activation_bytes": size, "backward_weight_bytes": 0}
        | {"offload": {"bytes": size, "offload_us": 1, "reload_us": 1}}
        for size in sizes
    ]
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "devices": [{"memory_bytes": None}],
            "stages": stages,
        }
    )


@st.composite
def stays(draw: st.DrawFn, sizes: st.SearchStrategy[list[int]]) -> tuple[Problem, Times]:
    """Copies out and back at random times, some of them without length."""
    problem = offloading(draw(sizes), microbatches := draw(st.integers(1, 8)))
    planned: Times = {}
    for s in range(len(problem.stages)):
        for i in range(microbatches):
            begin, out, there, back = (draw(st.integers(0, n)) for n in (30, 2, 9, 2))
            planned[Op("O", s, i)] = begin, begin + out
            planned[Op("R", s, i)] = begin + out + there, begin + out + there + back
    return problem, planned


EQUAL = st.integers(1, 4).map(lambda stages: [5] * stages)
ANY = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def users(plan: HostPlan) -> dict[int, list[tuple[int, int]]]:
    found = defaultdict(list)
    for activation, slab in plan.slab_of.items():
        found[slab].append(activation)
    return found


def most_bytes(problem: Problem, planned: Times) -> int:
    """The largest sum of sizes that are on the host at one time, ends counting before starts."""
    changes = [
        ((start, 1, problem.stages[s].offload.bytes) if kind == "O" else (end, 0, -problem.stages[s].offload.bytes))
        for (kind, s, _), (start, end) in planned.items()
        if problem.stages[s].offload
    ]
    level = peak = 0
    for *_, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak


@given(stays(ANY))
@settings(max_examples=100, deadline=None)
def test_two_activations_in_one_slab_never_overlap_and_fit(case: tuple[Problem, Times]) -> None:
    problem, planned = case
    plan = plan_slabs(problem, planned)
    assert len(plan.slab_of) == len(problem.stages) * problem.microbatches
    for slab, activations in users(plan).items():
        size_bytes, stages = plan.slabs[0][slab]
        assert size_bytes == max(problem.stages[s].activation_bytes for s, _ in activations)
        assert stages == tuple(sorted({s for s, _ in activations}))
        spans = sorted((planned[Op("O", *a)][0], planned[Op("R", *a)][1], a) for a in activations)
        for (_, end, before), (begin, _, after) in pairwise(spans):
            assert end <= begin
            assert plan.waits[Op("O", *after)] == Op("R", *before)


@given(stays(EQUAL))
@settings(max_examples=100, deadline=None)
def test_equal_sizes_need_as_many_slabs_as_there_are_activations_at_once(case: tuple[Problem, Times]) -> None:
    problem, planned = case
    at_instants = {op for op, (start, end) in planned.items() if start == end}
    slabs = len(plan_slabs(problem, planned).slabs[0])
    if not at_instants:
        assert slabs == most_bytes(problem, planned) // 5
    assert slabs >= most_bytes(problem, planned) // 5


def test_transfers_that_take_no_time_at_one_instant_do_not_share() -> None:
    """Either could wait for the other: which of them comes first, times cannot tell."""
    planned: Times = {Op(kind, 0, i): (1.0, 1.0) for kind in "OR" for i in range(2)}
    assert plan_slabs(offloading([5], 2), planned).slab_of == {(0, 0): 0, (0, 1): 1}


def test_a_slab_that_was_free_for_longer_is_taken_first() -> None:
    """Its reload may come late without holding the next offload up."""
    spans = [(0, 9), (1, 5), (10, 20)]
    planned: Times = {}
    for i, (begin, end) in enumerate(spans):
        planned |= {Op("O", 0, i): (begin, begin + 1), Op("R", 0, i): (end - 1, end)}
    plan = plan_slabs(offloading([5], 3), planned)
    assert plan.waits == {Op("O", 0, 2): Op("R", 0, 1)}


@pytest.mark.parametrize(
    ("name", "method"),
    [("d-p8-m16-o1-mo1-b1o4-interleaved4-make", "po-f"), ("d-p8-m16-o1-mo1-b1o2-vshape-make", "ada-offload")],
)
@pytest.mark.parametrize("sizes", ["equal", "unequal"])
def test_slabs_take_little_more_than_what_is_there_at_once(name: str, method: str, sizes: str) -> None:
    schedule = solve(instance(name), method)
    simulation = simulate(schedule.problem, schedule.orders)
    spans = zip(simulation.start_us.tolist(), simulation.end_us.tolist(), strict=True)
    planned = {op: span for op, span in zip(simulation.ops, spans, strict=True) if op.kind in "OR"}
    problem = schedule.problem if sizes == "equal" else with_unequal_sizes(schedule.problem)
    plan = plan_slabs(problem, planned)
    for d, slabs in enumerate(plan.slabs):
        mine = {op: span for op, span in planned.items() if problem.stages[op.stage].device == d}
        assert sum(slab.size_bytes for slab in slabs) <= 1.25 * most_bytes(problem, mine)


def with_unequal_sizes(problem: Problem) -> Problem:
    """Stage s may offload a part of its activation that differs from that of its neighbours."""
    data = problem.to_data()
    for s, stage in enumerate(data["stages"]):
        if stage["offload"]:
            stage["offload"]["bytes"] = stage["offload"]["bytes"] * (5 + s * 7 % 6) // 10
    return Problem.from_data(data)


def test_a_program_names_its_slabs_and_events_keep_them_apart() -> None:
    program = compile_schedule(one_f_one_b(2, 3, moved=[(0, 0), (0, 1), (0, 2)]))
    offloads = [a for a in program.devices[0] if a.kind == "O"]
    assert [a.slab for a in offloads] == [0, 1, 0]
    assert program.slabs == (((2, (0,)), (2, (0,))), ())
