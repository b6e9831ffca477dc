"""What processes recorded becomes one document on one clock."""

from __future__ import annotations

import json

import pytest

from optpipe.errors import InputError
from optpipe.schedule import Schedule
from optpipe.trace import Trace
from optpipe.trace.assemble import ActionRow, Part, assemble
from tests.optpipe.plot.schedules import all_forwards_first
from tests.problems import uniform

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
