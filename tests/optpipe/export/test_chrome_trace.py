"""A trace says exactly what the schedule says, in strict JSON with the structure that viewers need."""

from __future__ import annotations

import json
from typing import Any

import pytest

from instances import uniform
from optpipe.document import parse_json
from optpipe.export.chrome_trace import chrome_trace
from optpipe.kinds import STREAMS
from optpipe.schedule import Schedule
from solver.solve import solve
from tests.optpipe.plot.schedules import all_forwards_first, pair
from tests.recomputing import every_mode
from tests.unequal import unequal

Event = dict[str, Any]


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return pair(name="a <pair> of $devices$")


@pytest.fixture(scope="module")
def events(schedule: Schedule) -> list[Event]:
    found: list[Event] = chrome_trace(schedule)["traceEvents"]
    return found


def _of(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def test_every_op_is_one_complete_event_at_its_times(schedule: Schedule, events: list[Event]) -> None:
    found = [
        (event["pid"], STREAMS[event["tid"]], event["name"], event["ts"], event["dur"], event["args"])
        for event in _of(events, "X")
    ]
    expected = [
        (
            d,
            stream,
            str(op.key),
            op.start_us,
            op.end_us - op.start_us,
            {"op": op.op, "stage": op.stage, "microbatch": op.microbatch, "waits": op.waits},
        )
        for d, device in enumerate(schedule.devices)
        for stream, ops in device.streams()
        for op in ops
    ]
    assert found == expected
    assert {op for _, stream, op, *_ in found if stream != "compute"} == {"O0.1", "O0.3", "R0.1", "R0.3"}
    assert any(args["waits"] for *_, args in found)


def test_slices_are_named_by_microbatch_and_slice() -> None:
    events = chrome_trace(solve(unequal(2, 2, slices={"count": 3}), "seq1f1b"))["traceEvents"]
    ops = _of(events, "X")
    assert [event["name"] for event in ops if event["args"]["op"] == "F" and event["pid"] == 0] == [
        *("F0.0/0", "F0.0/1", "F0.0/2", "F0.1/0", "F0.1/1", "F0.1/2")
    ]
    [last] = [event["args"] for event in ops if event["name"] == "BW1.1/2"]
    assert (last["microbatch"], last["slice"]) == (1, 2)


def test_memory_counters_reach_the_peak_and_end_at_zero(schedule: Schedule, events: list[Event]) -> None:
    for d, device in enumerate(schedule.devices):
        levels = [event["args"]["bytes"] for event in _of(events, "C") if event["pid"] == d]
        assert max(levels) == device.peak_bytes
        assert levels[-1] == 0


def test_processes_and_threads_are_named_and_sorted(events: list[Event]) -> None:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in _of(events, "M") if e["name"] == "thread_name"}
    assert names == {(d, thread): stream for d in range(2) for thread, stream in enumerate(STREAMS)}
    processes = {e["pid"]: e["args"] for e in _of(events, "M") if e["name"] == "process_name"}
    assert processes == {0: {"name": "device 0"}, 1: {"name": "device 1"}}
    order = [e["args"]["sort_index"] for e in _of(events, "M") if e["name"] == "thread_sort_index"]
    assert order == [0, 1, 2, 0, 1, 2]


def _running(events: list[Event], process: int, ts: float) -> str:
    """The compute op that a viewer ties an arrow at `ts` to: the one that has begun and not ended."""
    [op] = [
        e["name"]
        for e in _of(events, "X")
        if e["pid"] == process and e["tid"] == 0 and e["ts"] <= ts < e["ts"] + e["dur"]
    ]
    return str(op)


def test_arrows_tie_each_hand_over_between_devices(events: list[Event]) -> None:
    receivers = {event["id"]: event for event in _of(events, "f")}
    arrows = {
        (_running(events, e["pid"], e["ts"]), _running(events, receivers[e["id"]]["pid"], receivers[e["id"]]["ts"]))
        for e in _of(events, "s")
    }
    forward = {(f"F0.{i}", f"F1.{i}") for i in range(4)}
    backward = {(f"BW1.{i}", f"B0.{i}") for i in range(4)}
    assert arrows == forward | backward
    assert len(_of(events, "s")) == len(receivers) == 8


def test_no_arrow_where_a_device_hands_over_to_itself() -> None:
    trace = chrome_trace(all_forwards_first(uniform(2, 1, v_shape=True)))
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 4  # stages 0-1 and 2-3, forward and backward; stages 1 and 2 share device 1


def test_strict_json_with_the_schedules_figures(schedule: Schedule) -> None:
    trace = chrome_trace(schedule)
    assert parse_json(json.dumps(trace, allow_nan=False).encode()) == trace
    assert trace["otherData"] == {
        "problem": "a <pair> of $devices$",
        "method": "by hand",
        "status": schedule.status,
        "objective": "makespan",
        "value_us": schedule.value_us,
        "bound_us": schedule.bound_us,
        "gap": schedule.gap,
        "solve_seconds": 0.0,
        "bubble": schedule.bubble,
        "shift_us": 0,
    }


def test_negative_times_are_moved_together(schedule: Schedule) -> None:
    data = schedule.to_data()
    for device in data["devices"]:
        for op in (op for stream in STREAMS for op in device[stream]):
            op["start_us"] -= 50.0
            op["end_us"] -= 50.0
    moved = chrome_trace(Schedule.from_data(data))
    assert moved["otherData"]["shift_us"] == 50.0
    assert [e for e in moved["traceEvents"] if e["ph"] in "XC"] == [
        e for e in chrome_trace(schedule)["traceEvents"] if e["ph"] in "XC"
    ]


def test_recomputation_is_shown_and_hands_gradients_over() -> None:
    events = chrome_trace(every_mode())["traceEvents"]
    ops = {event["name"]: event for event in _of(events, "X")}
    assert {"C0.0", "CB0.2", "CBW1.0"} <= ops.keys()
    assert ops["F0.0"]["args"]["mode"] == "full"
    assert "mode" not in ops["F1.1"]["args"]
    receivers = {event["id"]: event for event in _of(events, "f")}
    arrows = {_running(events, receivers[e["id"]]["pid"], receivers[e["id"]]["ts"]) for e in _of(events, "s")}
    assert arrows == {f"F1.{i}" for i in range(3)} | {"B0.0", "BW0.1", "CB0.2"}
    for d in range(2):
        levels = [event["args"]["bytes"] for event in _of(events, "C") if event["pid"] == d]
        assert max(levels) == every_mode().devices[d].peak_bytes
        assert levels[-1] == 0
