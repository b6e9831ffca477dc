"""A measured step as a Chrome trace: everything that ran, once, at its time, in the structure that viewers need."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest

from instances.schedules import v_wave
from optpipe.document import parse_json
from optpipe.export.chrome_trace import chrome_trace, measured_chrome_trace
from optpipe.trace import Trace
from optpipe.train import ModelConfig, OutputConfig, TrainingConfig, train
from tests.optpipe.trace.traces import crossings

Event = dict[str, Any]

LANES = ["compute", "offload", "reload", "runtime"]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A real step with offload, two stages a device, and messages both ways."""
    schedule = v_wave(2, 3, moved=[(0, 0), (0, 2), (1, 1), (2, 1)])
    found = train(TrainingConfig(schedule, ModelConfig("tiny"), output=OutputConfig(trace_step=0), steps=1)).trace
    assert found is not None
    return found


@pytest.fixture(scope="module")
def events(trace: Trace) -> list[Event]:
    read = parse_json(json.dumps(measured_chrome_trace(trace), allow_nan=False))
    found: list[Event] = read["traceEvents"]
    return found


def _of(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def test_every_op_of_the_schedule_is_there_once_on_the_plans_process_and_thread(
    trace: Trace, events: list[Event]
) -> None:
    found = Counter((e["pid"], e["tid"], e["name"]) for e in _of(events, "X") if LANES[e["tid"]] != "runtime")
    planned = _of(chrome_trace(trace.schedule)["traceEvents"], "X")
    assert found == Counter((e["pid"], e["tid"], e["name"]) for e in planned)
    assert set(found.values()) == {1}


def test_ops_stand_at_their_times_with_what_they_waited(trace: Trace, events: list[Event]) -> None:
    found = {(e["pid"], e["name"]): (e["ts"], e["dur"], e["args"]["waited_us"]) for e in _of(events, "X")}
    expected = {
        (d, str(a.key)): (a.start_us, a.end_us - a.start_us, a.start_us - a.turn_us)
        for d, device in enumerate(trace.devices)
        for a in device.actions
    }
    assert found == expected


def test_one_arrow_a_message_from_its_send_to_the_op_that_used_it(trace: Trace, events: list[Event]) -> None:
    leaves, arrives = ({e["id"]: e for e in _of(events, phase)} for phase in "sf")
    assert leaves.keys() == arrives.keys()
    assert len(leaves) == len(_of(events, "s")) == len(_of(events, "f")) == crossings(trace.schedule.problem)
    tied = {(_slice(events, leaves[i])["name"], _slice(events, arrives[i])["name"]) for i in leaves}
    forward = {(f"SEND_F{s}.{i}", f"F{s + 1}.{i}") for s in (0, 2) for i in range(3)}
    assert tied == forward | {(f"SEND_B{s}.{i}", f"B{s - 1}.{i}") for s in (1, 3) for i in range(3)}
    assert all(leaves[i]["ts"] <= arrives[i]["ts"] for i in leaves)


def _slice(events: list[Event], arrow: Event) -> Event:
    """The event on the arrow's thread that is running at its time: what a viewer ties the arrow to."""
    [found] = [
        e
        for e in _of(events, "X")
        if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"]) and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
    ]
    return found


def test_memory_reaches_the_peak_and_ends_at_zero(trace: Trace, events: list[Event]) -> None:
    for d, device in enumerate(trace.devices):
        counter = [e for e in _of(events, "C") if e["pid"] == d]
        levels = [e["args"]["bytes"] for e in counter]
        assert max(levels) == device.peak_bytes > 0
        assert levels[-1] == 0
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(counter))


def test_names_are_those_of_the_plan_and_one_thread_more(trace: Trace, events: list[Event]) -> None:
    def names(events: list[Event], kind: str) -> dict[tuple[int, int], str]:
        return {(e["pid"], e["tid"]): e["args"]["name"] for e in _of(events, "M") if e["name"] == kind}

    planned = chrome_trace(trace.schedule)["traceEvents"]
    assert names(events, "process_name") == names(planned, "process_name")
    more = {(d, 3): "runtime" for d in range(2)}
    assert names(events, "thread_name") == names(planned, "thread_name") | more


REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
"""By the Trace Event Format: the keys of each phase that a viewer reads."""


@pytest.mark.parametrize("which", ["planned", "measured"])
def test_events_are_what_the_format_asks_for(trace: Trace, which: str) -> None:
    document = measured_chrome_trace(trace) if which == "measured" else chrome_trace(trace.schedule)
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert event.keys() - {"ph"} == REQUIRED[event["ph"]]
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid"))
        assert event.get("ts", 0.0) >= 0.0
        assert event.get("dur", 0.0) >= 0.0
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():  # slices of a thread nest or stand apart; ours stand apart
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(sorted(slices)))
