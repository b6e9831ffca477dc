"""Places of RELEASE and PREPARE: late enough to hold up nothing, early enough for copies back to begin as planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import instance
from instances.schedules import one_f_one_b
from optpipe.compile import Program, compile_schedule
from optpipe.compile.offload import HostPlan, plan_slabs
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule
from solver.solve import solve
from tests.sample import examples


def one_stage(microbatches: int, offload_us: float, reload_us: float) -> Problem:
    """One device with one stage: F, B and W take 10 us each."""
    stage = {
        **{"device": 0, "forward_us": 10, "backward_input_us": 10, "backward_weight_us": 10},
        **{"activation_bytes": 4, "backward_weight_bytes": 2},
        "offload": {"bytes": 3, "offload_us": offload_us, "reload_us": reload_us},
    }
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "devices": [{"memory_bytes": None}],
            "stages": [stage],
        }
    )


def ops(names: str) -> list[Op]:
    return [Op.parse(name) for name in names.split()]


def compiled(
    problem: Problem, compute: str, offload: str, reload: str, waits: Mapping[str, Sequence[str]] | None = None
) -> Program:
    parsed = {Op.parse(op): [Op.parse(other) for other in others] for op, others in (waits or {}).items()}
    orders = Orders([DeviceOrders(ops(compute), ops(offload), ops(reload))], parsed)
    return compile_schedule(build_schedule(problem, orders, 0.0, "by hand", 0.0))


def compute_stream(program: Program) -> str:
    return " ".join(str(action) for action in program.devices[0] if action.stream == "compute")


ORDER = "F0.0 F0.1 F0.2 B0.0 W0.0 B0.1 W0.1 B0.2 W0.2"


def test_a_release_stands_right_before_the_op_that_waits_for_it() -> None:
    """Not before F0.1, during which the copy is under way."""
    program = compiled(one_stage(3, 8, 5), ORDER, "O0.0", "R0.0", {"F0.2": ["O0.0"], "R0.0": ["F0.2"]})
    assert compute_stream(program).startswith("F0.0 F0.1 RELEASE0.0 F0.2 PREPARE0.0 B0.0")


def test_a_release_that_nobody_waits_for_comes_with_its_own_reload() -> None:
    program = compiled(one_stage(3, 8, 5), ORDER, "O0.0", "R0.0", {"R0.0": ["F0.2"]})
    assert compute_stream(program).startswith("F0.0 F0.1 F0.2 RELEASE0.0 PREPARE0.0 B0.0")


def test_releases_keep_the_order_of_the_copies_out() -> None:
    """F0.2 waits for O0.1 alone, which is over only when O0.0 is."""
    waits = {"F0.2": ["O0.1"], "R0.0": ["F0.2"]}
    program = compiled(one_stage(3, 5, 5), ORDER, "O0.0 O0.1", "R0.0 R0.1", waits)
    assert compute_stream(program).startswith("F0.0 F0.1 RELEASE0.0 RELEASE0.1 F0.2")


def test_a_reload_that_waits_for_an_offload_has_its_release_before_its_memory() -> None:
    """R0.0 may take its memory only when that of microbatch 1 is given back; no compute op waits for that."""
    program = compiled(one_stage(3, 5, 5), ORDER, "O0.0 O0.1", "R0.0 R0.1", {"R0.0": ["O0.1"]})
    stream = compute_stream(program).split()
    assert stream.index("RELEASE0.1") < stream.index("PREPARE0.0")


def test_memory_is_prepared_before_the_op_beside_which_the_copy_back_is_planned() -> None:
    """R0.0 runs from 30 to 35 and B0.0 until 45; R0.1 begins when R0.0 is over, beside B0.0."""
    program = compiled(one_stage(3, 1, 5), ORDER, "O0.0 O0.1", "R0.0 R0.1", {"R0.0": ["F0.2"]})
    assert "RELEASE0.0 PREPARE0.0 RELEASE0.1 PREPARE0.1 B0.0" in compute_stream(program)


def test_a_copy_back_with_time_to_spare_waits_for_the_op_that_a_release_would_hold_up() -> None:
    """O0.2 ends at 35, within B0.0, and R0.2 could begin then; B0.2 needs it at 70 only."""
    program = compiled(one_stage(3, 5, 5), ORDER, "O0.2", "R0.2")
    assert "F0.2 B0.0 RELEASE0.2 PREPARE0.2 W0.0" in compute_stream(program)


def test_where_both_cost_something_the_cheaper_is_taken() -> None:
    """O0.2 ends 1 us after B0.0 begins; its copy back takes all the time there is until B0.2."""
    program = compiled(one_stage(3, 1, 39), ORDER, "O0.2", "R0.2")
    assert "F0.2 RELEASE0.2 PREPARE0.2 B0.0" in compute_stream(program)


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
@settings(max_examples=examples(100))
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
@settings(max_examples=examples(100))
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
    [("d-p4-m8-o1-mo1-b1o2-interleaved4-make", "po-f"), ("d-p4-m8-o1-mo1-b1o2-vshape-make", "ada-offload")],
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
