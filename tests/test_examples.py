"""The examples run, with little time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo
from tests.torchrun import torchrun


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path), "--time-limit", "2", "--steps", "1"])
    demo.main()
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png"}
    shown = capsys.readouterr().out
    assert "largest gradient error against the reference step" in shown
    assert shown.count("optpipe (") == 2


@pytest.mark.torchrun
def test_a_schedule_that_offloads_beside_torchs_under_fsdp(tmp_path: Path) -> None:
    schedule, problem = tmp_path / "schedule.json", "examples/problems/v-p2-m8.json"
    command = [sys.executable, "-m", "optpipe", "solve", problem, "-o", str(schedule), "--time-limit", "10"]
    subprocess.run(command, check=True, capture_output=True)
    assert '"op": "O"' in schedule.read_text()
    shown = torchrun(Path("examples/fsdp_offload.py"), 4, str(schedule))
    found = re.findall(r"(\w+): loss (\S+), peaks \[(.+)\] MiB", shown)
    assert [name for name, _, _ in found] == ["PlannedSchedule", "ScheduleZBVZeroBubble"], shown
    losses = [float(loss) for _, loss, _ in found]
    assert abs(losses[0] - losses[1]) < 1e-4, shown
    peaks = [[float(peak.strip("' ")) for peak in peaks.split(",")] for _, _, peaks in found]
    assert all(a < 0.9 * b for a, b in zip(*peaks, strict=True)), shown
    assert len(peaks[0]) == 4
    assert re.search(r"a step takes [\d.]+ times as long as torch's on the host", shown)
