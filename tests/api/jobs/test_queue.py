"""Patience: after an outage, or a sleep, the silence of others says nothing for a while."""

from __future__ import annotations

from api.jobs.queue import HeartbeatGrace


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_after_an_outage() -> None:
    clock = Clock()
    grace = HeartbeatGrace(5.0, clock)
    assert not grace.active
    grace.database_lost()
    clock.now_s += 60
    assert grace.active
    grace.database_answered()
    clock.now_s += 1
    grace.database_answered()
    assert grace.active
    for _ in range(4):
        clock.now_s += 1
        grace.database_answered()
    assert not grace.active


def test_after_a_sleep() -> None:
    clock = Clock()
    grace = HeartbeatGrace(5.0, clock)
    grace.database_answered()
    clock.now_s += 8 * 3600
    assert grace.active
    grace.database_answered()
    assert grace.active


def test_on_a_machine_that_is_too_busy() -> None:
    clock = Clock()
    grace = HeartbeatGrace(5.0, clock)
    asked = []
    for _ in range(20):
        clock.now_s += 4  # always late
        asked.append(grace.active)
        grace.database_answered()
    assert 5 <= asked.count(False) <= 15
