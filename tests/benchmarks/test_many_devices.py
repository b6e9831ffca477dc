"""The table of many devices has a row for each problem, with what the command says of its schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import many_devices
from benchmarks.many_devices import KINDS, measure


def test_each_problem_is_solved_by_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(many_devices, "TIME_LIMIT_S", {"quick": 0.5})
    monkeypatch.setattr(many_devices, "warm_up", lambda _: None)
    monkeypatch.setattr(many_devices, "DEVICES", {"quick": (2,)})
    monkeypatch.setattr(many_devices, "MICROBATCHES", {"quick": (2, many_devices.MOST_OPS // 5)})
    rows = [line.strip("| ").split(" | ") for line in measure("quick", tmp_path).splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == [kind for kind in KINDS for _ in range(2)]
    for row in rows[2::2]:
        bubble, bound, gap = (float(text.rstrip(" %")) / 100 for text in row[4:7])
        assert 0 < bound <= bubble < 1
        assert gap == pytest.approx(1 - (1 - bubble) / (1 - bound), abs=1e-3)
    for row in rows[3::2]:
        assert row[4:] == ["-"] * 4


def test_modes_leave_the_rest_of_the_problem_as_it_is() -> None:
    offload, modes = (build(4, 8) for build in KINDS.values())
    assert [device.memory_bytes for device in modes.devices] == [10 * device.memory_bytes for device in offload.devices]
    assert {stage.modes[0].name for stage in modes.stages} == {"full"}
