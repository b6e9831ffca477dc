"""TensorBoard's scalars, where it is installed; where it is not, that is said before the first step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optpipe.errors import MissingExtraError
from optpipe.train.output.scalars import Scalars
from tests.optpipe.train.output.reports import step


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"needs tensorboard, which is not installed\. Maybe pip install"):
        Scalars(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for numbers in (range(5), range(3, 6)):
        scalars = Scalars(tmp_path)
        for number in numbers:
            scalars(step(number, bubble=0.25))
        scalars.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [entry.step for entry in events.Scalars("loss")] == list(range(6))
    assert {entry.value for entry in events.Scalars("bubble")} == {0.25}
