"""A trace reads back as it was written, and is refused where it is not a step of its schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optpipe.errors import InputError
from optpipe.orders import Op
from optpipe.trace import Trace
from tests.optpipe.plot.schedules import pair
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
    expected = f"is a {kind} but a trace is needed. Maybe run 'optpipe train --trace FILE' on"
    with pytest.raises(InputError, match=expected):
        Trace.load(path)


def test_an_action_without_an_op_of_the_schedule_is_the_runtimes() -> None:
    data = trace_data(pair())
    data["devices"][0]["actions"].append(action(Op("RELEASE", 0, 1), 1.0, 2.0, 3.0))
    device = Trace.from_data(data).devices[0]
    assert [str(a.key) for a in device.lane("runtime") if a.action == "RELEASE"] == ["RELEASE0.1"]
    assert {a.action for a in device.lane("offload")} == {"O"}
