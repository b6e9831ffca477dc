"""Where RELEASE and PREPARE stand: late enough to hold up nothing, early enough for copies back to begin as planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optpipe.compile import Program, compile_schedule
from optpipe.orders import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from solver.finish import finish


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
    return compile_schedule(finish(problem, orders, 0.0, "by hand", 0.0))


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
