"""Exchanges of a vocabulary layer between processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import RunRanks


@pytest.mark.torchrun
def test_memory_of_an_exchange_is_the_callers_alone_after_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Where cores are busy, gloo's thread holds what it was given after its work has ended in every tenth exchange."""
    run_ranks(Path(__file__).parent / "collectives_worker.py", 2, str(tmp_path))
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)] == [0, 0]
