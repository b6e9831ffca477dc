"""Ranks that are forked say what became of them, and end together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RunRanks

WORKER = """
import os, sys, time
print(sys.argv[1], os.environ["RANK"], os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "1":
    {last}
"""


def worker(folder: Path, last: str) -> Path:
    path = folder / "worker.py"
    path.write_text(WORKER.format(last=last))
    return path


def test_what_all_print_comes_back(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(worker(tmp_path, "print('last')"), 2, "it is") == "it is 0 2\nit is 1 2\nlast\n"


def test_when_one_fails_all_end_and_its_error_is_shown(run_ranks: RunRanks, tmp_path: Path) -> None:
    failing = worker(tmp_path, "raise ValueError('broken')\nelse:\n    time.sleep(3600)")
    with pytest.raises(AssertionError, match=r"(?s)-9: .*1: .*ValueError: broken"):
        run_ranks(failing, 2, "")
