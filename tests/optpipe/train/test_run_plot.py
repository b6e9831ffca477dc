"""The picture of a run has every step, and marks what happened on the way."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from optpipe.plot.figure import FORMATS, settings
from optpipe.train import StepReport
from optpipe.train.config import PICTURES
from optpipe.train.result import OnlineEvent
from optpipe.train.run_plot import MANY_STEPS, MEDIANS, RunPlot, run_grid
from tests.optpipe.train.reports import step


def curve(axes: Axes, number: int = 0) -> list[list[float]]:
    return [[float(v) for v in np.asarray(part)] for part in axes.lines[number].get_data()]


def labels(steps: list[StepReport]) -> list[str]:
    with settings():
        figure = run_grid(steps, "a run").figure
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_every_step_is_drawn() -> None:
    steps = [step(k, seconds=1 + k) for k in range(3, 6)]
    with settings():
        loss, speed, seconds = run_grid(steps, "a run").axes
    assert curve(loss) == [[3, 4, 5], [s.loss for s in steps]]
    assert curve(speed) == [[3, 4, 5], [25, 20, pytest.approx(100 / 6)]]
    assert curve(seconds) == [[3, 4, 5], [4, 5, 6]]
    assert speed.get_ylim()[0] == seconds.get_ylim()[0] == 0


def test_many_steps_have_a_median_that_no_outlier_moves() -> None:
    steps = [step(k, seconds=60.0 if k == 30 else 3.0) for k in range(MANY_STEPS)]
    with settings():
        seconds = run_grid(steps, "a run").axes[2]
    assert max(curve(seconds)[1]) == 60
    assert set(curve(seconds, 1)[1]) == {3.0}


def test_a_step_without_a_loss_is_in_no_median() -> None:
    steps = [step(k, loss=math.nan if k == 30 else 3.0) for k in range(MANY_STEPS)]
    with settings():
        loss = run_grid(steps, "a run").axes[0]
    assert set(curve(loss, 1)[1]) == {3.0}


def test_a_long_run_has_no_more_medians_than_can_be_seen() -> None:
    steps = [step(k, 3 * MEDIANS) for k in range(3 * MEDIANS)]
    with settings():
        loss = run_grid(steps, "a run").axes[0]
    places, medians = curve(loss, 1)
    assert len(medians) == MEDIANS + 1
    assert (places[0], places[-1]) == (0, 3 * MEDIANS - 1)
    assert medians[MEDIANS // 2] == steps[int(places[MEDIANS // 2])].loss, "in the middle of its window"


def test_swaps_and_undone_updates_are_marked() -> None:
    plain = [step(0), step(1)]
    marked = [step(0, rolled_back=True), step(1, events=(OnlineEvent(1, "swapped", "a better one"),))]
    assert set(labels(marked)) - set(labels(plain)) == {"new schedule", "update undone"}
    other = [step(0), step(1, events=(OnlineEvent(1, "kept", "no better one"),))]
    assert labels(other) == labels(plain)


@pytest.mark.parametrize("suffix", PICTURES)
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    picture = RunPlot(path)
    picture.end()
    assert not path.exists()
    picture.step(step(0))
    picture.end()
    assert path.stat().st_size > 1000


def test_the_configuration_knows_all_formats() -> None:
    assert {suffix.removeprefix(".") for suffix in PICTURES} == set(FORMATS)
