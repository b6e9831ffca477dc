"""The verifier's rules about activation modes: each has a schedule that breaks this rule alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from optpipe.errors import DeadlockError, OrderError
from optpipe.memory import planned_memory
from optpipe.ops import Op
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.verify import Verdict, verify
from tests.recomputing import COPY, every_mode

Data = dict[str, Any]


def op_of(data: Data, name: str) -> Data:
    op = Op.parse(name)
    streams = [
        stream for device in data["devices"] for stream in (device["compute"], device["offload"], device["reload"])
    ]
    rows = (row for stream in streams for row in stream)
    return next(row for row in rows if (row["op"], row["stage"], row["microbatch"]) == op)


def judged(data: Data) -> Verdict:
    """The verdict when every claimed figure is what the verifier finds."""
    verdict = verify(Schedule.from_data(data))
    data["value_us"], data["bound_us"], data["gap"], data["status"] = verdict.value_us, 0.0, 1.0, "feasible"
    for device, fact in zip(data["devices"], verdict.devices, strict=True):
        device |= {"peak_bytes": fact.peak_bytes, "busy_us": fact.busy_us, "bubble": fact.bubble}
        if fact.peak_bytes_any_timing is not None:
            device["peak_bytes_any_timing"] = fact.peak_bytes_any_timing
    return verify(Schedule.from_data(data))


def at(data: Data, name: str, start_us: float, end_us: float) -> None:
    op_of(data, name).update(start_us=start_us, end_us=end_us)


def without(data: Data, *names: str) -> None:
    for name in names:
        row = op_of(data, name)
        for device in data["devices"]:
            for stream in ("compute", "offload", "reload"):
                device[stream] = [other for other in device[stream] if other is not row]


def renamed(data: Data, name: str, new: str) -> Data:
    row = op_of(data, name)
    op = Op.parse(new)
    row.update(op=op.kind, stage=op.stage, microbatch=op.microbatch)
    return row


def added(data: Data, name: str, start_us: float, end_us: float) -> None:
    """Put an op on the stream of its device behind what starts no later."""
    op = Op.parse(name)
    row = {"op": op.kind, "stage": op.stage, "microbatch": op.microbatch, "start_us": start_us, "end_us": end_us}
    stream = data["devices"][op.stage][op.stream]
    stream.insert(sum(other["start_us"] < start_us for other in stream), row | {"waits": []})


def sort(data: Data) -> None:
    for device in data["devices"]:
        device["compute"].sort(key=lambda row: (row["start_us"], row["end_us"]))


def test_the_example_is_valid() -> None:
    data = every_mode().to_data()
    assert judged(data).ok
    assert data == every_mode().to_data() | {"bound_us": 0.0}
    assert {row["op"] for device in data["devices"] for row in device["compute"]} == {*"FCBW", "BW", "CB", "CBW"}


def whole_by_segments(data: Data) -> None:
    without(data, "C1.2")
    at(data, "BW1.2", 9, 12)
    renamed(data, "BW1.2", "CBW1.2")


def copies_of_full(data: Data) -> None:
    added(data, "O0.2", 5, 5)
    added(data, "R0.2", 7, 7)


def recomputed_after_the_backward(data: Data) -> None:
    at(data, "BW0.1", 8, 10)
    at(data, "C0.1", 10, 12)
    sort(data)


def recomputed_before_the_forward(data: Data) -> None:
    at(data, "C1.2", 8, 9)
    at(data, "F1.2", 9, 10)
    sort(data)


def weights_before_their_input(data: Data) -> None:
    at(data, "W0.2", 12, 13)
    at(data, "CB0.2", 13, 15)
    sort(data)


def recomputations_out_of_order(data: Data) -> None:
    at(data, "C0.0", 4, 5)
    added(data, "C0.2", 3, 4)
    at(data, "CB0.2", 12, 13)
    renamed(data, "CB0.2", "B0.2")


def backwards_out_of_order(data: Data) -> None:
    for name, start_us, end_us in (("F1.1", 2, 3), ("BW1.1", 3, 5), ("CBW1.0", 5, 8)):
        at(data, name, start_us, end_us)
    for name in ("B0.0", "W0.0", "C0.1", "BW0.1", "CB0.2", "W0.2"):
        row = op_of(data, name)
        at(data, name, row["start_us"] + 3, row["end_us"] + 3)
    sort(data)


@pytest.mark.parametrize(
    ("edit", "rules"),
    [
        (lambda d: without(d, "C0.0"), {"mode"}),
        (lambda d: added(d, "C1.1", 6, 6), {"mode"}),
        (lambda d: added(d, "C0.2", 11, 12), {"mode"}),
        (lambda d: op_of(d, "F0.0").update(mode="kept"), {"mode"}),
        (lambda d: op_of(d, "F0.0").pop("mode"), {"mode"}),
        (lambda d: op_of(d, "F1.1").update(mode="full"), {"mode"}),
        (lambda d: renamed(d, "BW1.1", "CBW1.1"), {"mode"}),
        (whole_by_segments, {"segments"}),
        (lambda d: without(d, "O0.1", "R0.1"), {"offload"}),
        (copies_of_full, {"offload"}),
        (lambda d: without(d, "R0.1"), {"presence"}),
        (lambda d: without(d, "W0.2"), {"presence"}),
        (lambda d: without(d, "CBW1.0"), {"presence", "mode"}),
        (lambda d: d["problem"]["stages"][0].update(split_backward=False), {"split"}),
        (lambda d: at(d, "C0.1", 7, 8.5), {"duration"}),
        (lambda d: at(d, "CB0.2", 12, 13), {"duration"}),
        (lambda d: at(d, "CBW1.0", 2, 4), {"duration"}),
        (lambda d: at(d, "O0.1", 2, 4), {"duration"}),
        (lambda d: op_of(d, "F0.0").update(mode="half"), {"duration", "offload"}),
        (lambda d: at(d, "R0.1", 6, 8), {"dependency"}),
        (lambda d: at(d, "O0.1", 1, 4), {"dependency"}),
        (lambda d: at(d, "CB0.2", 11, 13), {"dependency"}),
        (lambda d: at(d, "B0.0", 4, 5), {"dependency"}),
        (recomputed_after_the_backward, {"dependency", "deadlock"}),
        (recomputed_before_the_forward, {"dependency", "deadlock"}),
        (weights_before_their_input, {"dependency", "deadlock"}),
        (recomputations_out_of_order, {"microbatch-order"}),
        (backwards_out_of_order, {"microbatch-order"}),
    ],
)
def test_each_rule_is_broken_alone(edit: Callable[[Data], Any], rules: set[str]) -> None:
    data = every_mode().to_data()
    edit(data)
    assert {violation.rule for violation in judged(data).violations} == rules


def test_a_mode_keeps_its_budget_to_the_byte() -> None:
    """Device 0: 10 of the activation that C0.1 makes anew beside its workspace of 2, and what the others keep."""
    for device in range(2):
        data = every_mode().to_data()
        peak = every_mode().devices[device].peak_bytes_any_timing
        data["problem"]["devices"][device]["memory_bytes"] = peak
        assert judged(data).ok
        data["problem"]["devices"][device]["memory_bytes"] = peak - 1
        assert "budget-any-timing" in {violation.rule for violation in judged(data).violations}


@pytest.mark.parametrize("field", ["busy_us", "bubble", "peak_bytes", "peak_bytes_any_timing"])
def test_figures_count_recomputation(field: str) -> None:
    """Each figure is claimed as if nothing was recomputed."""
    data = every_mode().to_data()
    data["devices"][0][field] -= {"busy_us": 1 + 2 + 1, "bubble": -4 / 15}.get(field, 1)
    assert {violation.rule for violation in verify(Schedule.from_data(data)).violations} == {"claim"}


def test_the_host_holds_what_modes_send_there() -> None:
    assert verify(every_mode()).host_peak_bytes == COPY["bytes"]
    data = every_mode().to_data()
    data["problem"]["host_memory_bytes"] = 3
    assert {violation.rule for violation in judged(data).violations} == {"host-budget"}
    data["problem"]["host_memory_bytes"] = 4
    assert judged(data).ok


def test_whatever_a_document_says_is_judged() -> None:
    """Documents with random ops, modes and order are wrong in any number of ways, and never make the verifier fail."""
    rng, kinds = Random(0), ("F", "B", "W", "BW", "C", "CB", "CBW")
    verdicts = []
    for _ in range(300):
        data = every_mode().to_data()
        for _ in range(rng.randint(0, 4)):
            stream = rng.choice(data["devices"])["compute"]
            row = rng.choice(stream)
            change = rng.randrange(4)
            if change == 0:
                row["op"] = rng.choice(kinds)
            elif change == 1:
                stream.remove(row)
            elif change == 2:
                stream.insert(rng.randrange(len(stream)), dict(rng.choice(stream)))
            else:
                row["microbatch"] = rng.randrange(3)
        for device in data["devices"]:
            for row in device["compute"]:
                row.pop("mode", None)
                if row["op"] == "F" and rng.random() < 0.7:
                    row["mode"] = rng.choice(["kept", "full", "half", "whole"])
        schedule = Schedule.from_data(data)
        verdict = verify(schedule)
        verdicts.append(verdict.ok)
        assert [planned_memory(schedule, d).peak_bytes for d in range(2)] == [f.peak_bytes for f in verdict.devices]
        try:
            simulate(schedule.problem, schedule.orders)
        except (OrderError, DeadlockError):
            assert not verdict.ok
    assert not all(verdicts)


def test_a_schedule_without_ops_lacks_them_all() -> None:
    data = every_mode().to_data()
    for device in data["devices"]:
        device |= {"compute": [], "offload": [], "reload": []}
    assert "presence" in {violation.rule for violation in verify(Schedule.from_data(data)).violations}
