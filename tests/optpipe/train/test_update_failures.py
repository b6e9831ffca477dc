"""A process that fails within an optimistic step: the others end too, with a message, in the time that is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.optpipe.train.update_failing_worker import TIMEOUT_SECONDS
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "update_failing_worker.py"
START_SECONDS = 120
"""For two processes to begin on a busy machine, the first of a session after torch is loaded."""


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("how", "of_the_one"),
    [("killed", ""), ("error", "ValueError: the layer broke"), ("interrupt", "KeyboardInterrupt")],
)
def test_all_processes_end_with_a_message(run_ranks: RunRanks, how: str, of_the_one: str) -> None:
    other, one = run_ranks.each(WORKER, 2, how, timeout_seconds=START_SECONDS + TIMEOUT_SECONDS)
    assert of_the_one in one.out + one.err
    told = other.out + other.err
    assert re.search("^(TrainingError|RunFailedError): ", told, re.MULTILINE), told
    assert "Traceback" not in told
    assert [other.code, one.code] == [1, -9 if how == "killed" else 1]
