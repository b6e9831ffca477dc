"""The examples run, with little time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples import demo


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path), "--time-limit", "2", "--steps", "1"])
    demo.main()
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png"}
    shown = capsys.readouterr().out
    assert "largest gradient error against the plain step" in shown
    assert shown.count("optpipe (") == 2
