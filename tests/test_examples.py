"""The examples run, with little time."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from examples import demo
from optpipe.problem import Problem
from optpipe.schedule import schedule_text
from optpipe.train import ModelConfig, TrainingConfig
from solver.limits import Limits
from solver.solve import solve
from tests.ranks import RunRanks


@pytest.mark.usefixtures("forked_children")
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path), "--time-limit", "1", "--steps", "1"])
    tiny = partial(TrainingConfig, model=ModelConfig("tiny"))
    monkeypatch.setattr(demo, "TrainingConfig", tiny)
    demo.main()
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png"}
    shown = capsys.readouterr().out
    assert "largest gradient error against the reference step" in shown
    assert "strategies rated" in shown
    assert re.search(r"^1f1b-recompute +20.2\d s", shown, re.MULTILINE)
    assert re.search(r"^optpipe .* no schedule is faster than 14\.\d+ s", shown, re.MULTILINE)


@pytest.mark.torchrun
def test_a_schedule_that_offloads_beside_torchs_under_fsdp(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Ranks as torchrun starts them; its own command is on a page of the documentation, which runs too."""
    path, problem = tmp_path / "schedule.json", Problem.load("examples/problems/v-p2-m8.json")
    schedule = solve(problem, "auto", Limits(workers=1, deterministic_limit=0.5))
    assert any(device.offload for device in schedule.devices)
    path.write_text(schedule_text(schedule))
    shown = run_ranks(Path("examples/fsdp_offload.py"), 4, str(path))
    found = re.findall(r"(\w+): loss (\S+), peaks \[(.+)\] MiB", shown)
    assert [name for name, _, _ in found] == ["PlannedSchedule", "ScheduleZBVZeroBubble"], shown
    losses = [float(loss) for _, loss, _ in found]
    assert abs(losses[0] - losses[1]) < 1e-4, shown
    peaks = [[float(peak.strip("' ")) for peak in peaks.split(",")] for _, _, peaks in found]
    assert all(a < 0.9 * b for a, b in zip(*peaks, strict=True)), shown
    assert len(peaks[0]) == 4
    assert re.search(r"a step takes [\d.]+ times as long as torch's on the host", shown)
