"""Waits of a plan and memory curves, by hand; random plans are in `test_worst_case_memory`."""

from __future__ import annotations

from instances import uniform
from optpipe.costs import Effect
from optpipe.memory import curve, derive_waits
from optpipe.ops import DeviceOrders, Op
from optpipe.problem import Problem

PLAN = {
    "F0.0": (0, 1), "F0.1": (2, 3), "B0.0": (5, 6), "W0.0": (6, 7), "B0.1": (7, 8), "W0.1": (8, 9),
    "O0.0": (1, 2), "O0.1": (3, 4), "R0.0": (4, 5), "R0.1": (6, 7),
}  # fmt: skip
"""Both activations of 2 bytes leave and come back; B and W free one byte each."""


def waits_of(plan: dict[str, tuple[float, float]], **more: object) -> dict[str, list[str]]:
    """Waits by name on one device whose stage may offload an activation of 2 bytes."""
    data = uniform(1, 2).to_data() | more
    data["stages"][0]["offload"] = {"bytes": 2, "offload_us": 1, "reload_us": 1}
    planned = {Op.parse(name): times for name, times in plan.items()}
    streams = ([op for op in planned if op.stream == name] for name in ("compute", "offload", "reload"))
    waits = derive_waits(Problem.from_data(data), [DeviceOrders(*streams)], planned)
    return {str(op): [str(other) for other in others] for op, others in waits.items()}


def test_what_takes_memory_waits_for_the_last_release_before_it_on_each_other_stream() -> None:
    assert waits_of(PLAN) == {"F0.1": ["O0.0"], "R0.0": ["O0.1"], "R0.1": ["B0.0"]}


def test_an_offload_waits_for_reloads_where_the_host_is_limited() -> None:
    one_at_a_time = PLAN | {"R0.0": (2, 3), "O0.1": (3, 4)}
    assert "O0.1" not in waits_of(one_at_a_time)
    assert waits_of(one_at_a_time, host_memory_bytes=2)["O0.1"] == ["R0.0"]


def test_a_release_that_ends_later_is_not_waited_for() -> None:
    assert "F0.1" not in waits_of(PLAN | {"O0.0": (1, 2.5)})


def test_ops_without_length_at_one_instant_do_not_wait_for_one_another() -> None:
    plan = PLAN | {"O0.0": (2, 2), "F0.1": (2, 2)}
    assert "F0.1" not in waits_of(plan)
    assert waits_of(plan | {"F0.1": (2, 3)})["F0.1"] == ["O0.0"]


def test_at_one_instant_ends_count_before_starts() -> None:
    found = curve([(0.0, 2.0, Effect(5, -3)), (2.0, 4.0, Effect(4, -6)), (1.0, 1.0, Effect(1, 0))])
    assert (found.times_us.tolist(), found.bytes.tolist()) == ([0, 1, 2, 4], [5, 6, 7, 1])
    assert found.peak_bytes == 7
    assert curve([]).peak_bytes == 0
