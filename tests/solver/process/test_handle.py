"""A child from outside: nothing is left behind."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from solver.process import Child


def test_a_child_that_cannot_be_started_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-python"))
    with pytest.raises(FileNotFoundError):
        Child()
    assert list(tmp_path.iterdir()) == []
