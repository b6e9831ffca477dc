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
    losses = re.findall(r"loss (\S+) as planned, (\S+) by torch", shown)
    peaks = re.findall(r"peak (\S+) MiB as planned, (\S+) MiB by torch", shown)
    assert (len(losses), len(peaks)) == (5, 4), shown
    assert all(abs(float(a) - float(b)) < 1e-4 for a, b in losses), shown
    assert all(float(a) < 0.9 * float(b) for a, b in peaks), shown
    assert re.search(r"a step takes [\d.]+ times as long as torch's on the host", shown)
