"""Patience: after an outage, or a sleep, the silence of others says nothing for a while."""

from __future__ import annotations

from api.jobs.queue import HeartbeatGrace


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_after_an_outage() -> None:
    clock = Clock()
    patience = HeartbeatGrace(5.0, clock)
    assert not patience.asked_for
    patience.lost()
    clock.now_s += 60
    assert patience.asked_for
    patience.seen()
    clock.now_s += 1
    patience.seen()
    assert patience.asked_for
    for _ in range(4):
        clock.now_s += 1
        patience.seen()
    assert not patience.asked_for


def test_after_a_sleep() -> None:
    clock = Clock()
    patience = HeartbeatGrace(5.0, clock)
    patience.seen()
    clock.now_s += 8 * 3600
    assert patience.asked_for
    patience.seen()
    assert patience.asked_for


def test_on_a_machine_that_is_too_busy() -> None:
    clock = Clock()
    patience = HeartbeatGrace(5.0, clock)
    asked = []
    for _ in range(20):
        clock.now_s += 4  # always late
        asked.append(patience.asked_for)
        patience.seen()
    assert 5 <= asked.count(False) <= 15
