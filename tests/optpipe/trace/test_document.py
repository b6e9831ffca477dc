"""A trace reads back as it was written, and is refused where it is not a step of its schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instances import uniform
from optpipe.errors import InputError
from optpipe.ops import Op
from optpipe.schedule import Schedule
from optpipe.trace import Trace
from optpipe.trace.document import ActionRow, Part, assemble
from tests.optpipe.plot.schedules import all_forwards_first, pair
from tests.optpipe.trace.traces import action, crossings, trace_data, trace_of


@pytest.fixture
def data() -> dict[str, Any]:
    return json.loads(json.dumps(trace_data(pair())))  # type: ignore[no-any-return]


def test_round_trip(data: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data))
    trace = Trace.load(path)
    assert trace.to_data() == data
    assert Trace.from_json(trace.to_json()) == trace


def test_each_message_ties_its_send_to_the_op_that_used_it() -> None:
    trace = trace_of(pair())
    found = [(str(send.key), str(user.key)) for send, user in trace.messages()]
    forward = [(f"SEND_F0.{i}", f"F1.{i}") for i in range(4)]
    assert sorted(found) == sorted(forward + [(f"SEND_B1.{i}", f"B0.{i}") for i in range(4)])
    assert len(found) == crossings(trace.schedule.problem)


def test_devices_ran_at_once_only_in_processes_of_their_own() -> None:
    assert trace_of(pair()).devices_ran_at_once
    assert not trace_of(pair(), processes=False).devices_ran_at_once


Change = Callable[[dict[str, Any]], None]


def _last_op(data: dict[str, Any]) -> dict[str, Any]:
    last: dict[str, Any] = data["devices"][1]["actions"][-2]
    assert last["action"] == "BW"
    return last


CHANGES: dict[str, tuple[Change, str]] = {
    "lacks an op": (lambda d: _last_op(d).update(action="REDUCE"), r"devices\[1\].actions lacks BW1.3"),
    "an op twice": (
        lambda d: d["devices"][1]["actions"].append(_last_op(d)),
        r"devices\[1\].actions has more than once BW1.3",
    ),
    "another op": (
        lambda d: d["devices"][1]["actions"].append(_last_op(d) | {"action": "W"}),
        r"devices\[1\].actions has beyond the schedule W1.3",
    ),
    "another stage": (
        lambda d: d["devices"][0]["actions"].append(_last_op(d) | {"action": "REDUCE", "stage": 2}),
        r"devices\[0\].actions\[\d+\].stage is 2 of 2 stages",
    ),
    "another microbatch": (
        lambda d: d["devices"][0]["actions"].append(_last_op(d) | {"action": "REDUCE", "microbatch": 4}),
        r"devices\[0\].actions\[\d+\].microbatch is 4 of 4",
    ),
    "nobody to use a message": (
        lambda d: d["devices"][1]["actions"].append(_last_op(d) | {"action": "SEND_F"}),
        r"is SEND_F1.3, but the schedule has no op that would use it",
    ),
    "time runs backwards": (
        lambda d: _last_op(d).update(end_us=0.0),
        r"devices\[1\].actions\[\d+\] \(BW1.3\) has turn_us .*, end_us 0.0, which must not decrease",
    ),
    "a device too few": (lambda d: d["devices"].pop(), "devices has 1 entries but the schedule 2"),
    "uneven memory": (
        lambda d: d["devices"][0]["memory"]["bytes"].append(1),
        r"devices\[0\].memory has 1 times_us but 2 bytes",
    ),
    "memory backwards": (
        lambda d: d["devices"][0].update(memory={"times_us": [1, 0], "bytes": [0, 0]}),
        r"devices\[0\].memory has times_us that decrease",
    ),
    "a misspelt field": (
        lambda d: d["devices"][0].update(proces=0),
        r"devices\[0\].proces is not a field. Maybe you meant process",
    ),
    "no name of an action": (lambda d: _last_op(d).update(action="send it"), r"actions\[\d+\].action is 'send it'"),
    "not a digest": (lambda d: d.update(program="12"), "program is '12'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_no_step_of_the_schedule_is_refused(data: dict[str, Any], name: str) -> None:
    change, message = CHANGES[name]
    change(data)
    with pytest.raises(InputError, match=message):
        Trace.from_data(data)


@pytest.mark.parametrize(("document", "kind"), [(pair(), "schedule"), (pair().problem, "problem")])
def test_other_documents_are_named(document: Any, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(document.to_json())
    expected = f"is a {kind} but a measured step is needed\\. Maybe "
    with pytest.raises(InputError, match=expected):
        Trace.load(path)


def test_an_action_without_an_op_of_the_schedule_is_the_runtimes() -> None:
    data = trace_data(pair())
    data["devices"][0]["actions"].append(action(Op("RELEASE", 0, 1), 1.0, 2.0, 3.0))
    device = Trace.from_data(data).devices[0]
    assert [str(a.key) for a in device.lane("runtime") if a.action == "RELEASE"] == ["RELEASE0.1"]
    assert {a.action for a in device.lane("offload")} == {"O"}


EARLY_NS = 5_000_000


def schedule() -> Schedule:
    return all_forwards_first(uniform(2, 1))


def parts() -> list[Part]:
    """Two processes; memory rises to 30 bytes on device 0, and 4 bytes are taken between two of its actions."""
    first = [
        ActionRow("F", 0, 0, None, EARLY_NS, EARLY_NS, EARLY_NS + 10_000, 30, 20),
        ActionRow("SEND_F", 0, 0, 1, EARLY_NS + 10_000, EARLY_NS + 10_000, EARLY_NS + 11_500, 20, 16),
        ActionRow("RECV_B", 0, 0, 1, EARLY_NS + 11_500, EARLY_NS + 11_500, EARLY_NS + 11_600, 20, 20),
        ActionRow("B", 0, 0, None, EARLY_NS + 12_000, EARLY_NS + 50_000, EARLY_NS + 60_000, 28, 8),
        ActionRow("W", 0, 0, None, EARLY_NS + 60_000, EARLY_NS + 60_000, EARLY_NS + 70_000, 8, 0),
    ]
    second = [
        ActionRow("RECV_F", 1, 0, 0, EARLY_NS + 100, EARLY_NS + 100, EARLY_NS + 200, 4, 4),
        ActionRow("F", 1, 0, None, EARLY_NS + 200, EARLY_NS + 13_000, EARLY_NS + 23_000, 9, 9),
        ActionRow("B", 1, 0, None, EARLY_NS + 23_000, EARLY_NS + 23_000, EARLY_NS + 33_000, 9, 9),
        ActionRow("SEND_B", 1, 0, 0, EARLY_NS + 33_000, EARLY_NS + 33_000, EARLY_NS + 34_000, 9, 5),
        ActionRow("W", 1, 0, None, EARLY_NS + 34_000, EARLY_NS + 34_000, EARLY_NS + 44_000, 5, 0),
    ]
    return [Part(0, 0.5, {0: first}), Part(1, 2.0, {1: second})]


def assembled(found: list[Part]) -> Trace:
    return assemble(found, schedule(), program="a" * 64, step=7, planned_peak_bytes=[30, 12], source="here")


def test_times_count_from_the_first_start_in_microseconds() -> None:
    trace = assembled(parts())
    first, second = trace.devices
    assert [(str(a.key), a.turn_us, a.start_us, a.end_us) for a in first.actions][:2] == [
        ("F0.0", 0.0, 0.0, 10.0),
        ("SEND_F0.0", 10.0, 10.0, 11.5),
    ]
    assert (second.actions[1].turn_us, second.actions[1].start_us) == (0.2, 13.0)
    assert trace.step_us == 70.0
    assert trace.clock_error_us == 2.0
    assert [device.process for device in trace.devices] == [0, 1]
    assert (first.actions[1].peer, first.actions[0].peer) == (1, None)


def test_memory_rises_at_starts_and_falls_at_ends_to_zero() -> None:
    first, second = assembled(parts()).devices
    levels = dict(zip(first.memory.times_us, first.memory.bytes, strict=True))
    assert [levels[time] for time in (0.0, 10.0, 50.0, 60.0, 70.0)] == [30, 20, 28, 8, 0]
    assert (first.peak_bytes, first.planned_peak_bytes) == (30, 30)
    assert (second.peak_bytes, second.planned_peak_bytes) == (9, 12)
    assert second.memory.bytes[-1] == 0


def test_parts_travel_as_json() -> None:
    for part in parts():
        assert Part.from_data(json.loads(json.dumps(part.to_data()))) == part


def test_a_part_that_is_missing_is_an_error() -> None:
    with pytest.raises(InputError, match=r"devices\[1\].actions lacks B1.0"):
        assembled(parts()[:1])
