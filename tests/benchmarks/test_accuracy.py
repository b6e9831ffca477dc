"""docs/accuracy.md says what the machines as they ship predict."""

from __future__ import annotations

import re

import pytest

from benchmarks.accuracy import FOLDER, PAGE
from benchmarks.plan_regret import regrets
from benchmarks.schedule_ratios import ratios
from optpipe.cluster.calibrate import predict
from optpipe.cluster.machine import named_machines
from optpipe.cluster.rows import Row, read_rows

TEXT = PAGE.read_text()


@pytest.fixture(scope="module")
def steps() -> list[Row]:
    rows = read_rows(FOLDER / "steps.csv", FOLDER / "models.json")[0]
    return [row for row in rows if row.seconds is not None and row.machine in named_machines()]


def test_every_step_has_its_prediction(steps: list[Row]) -> None:
    table = TEXT.split("## Every step")[1]
    printed = {
        cells[0]: (cells[1], float(cells[3]), float(cells[4]))
        for line in table.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 7 and re.match(r"[\d.]+$", cells[3])
    }
    assert len(printed) > 1000
    by_name = {row.name: row for row in steps}
    for name, (machine, predicted, measured) in printed.items():
        row = by_name[name]
        assert row.machine == machine
        assert row.seconds == pytest.approx(measured, abs=0.006)
        assert predict(named_machines()[machine], row).seconds == pytest.approx(predicted, rel=0.005, abs=0.006)


def test_the_layout_that_is_ranked_first_is_among_the_best(steps: list[Row]) -> None:
    found = regrets((row, predict(named_machines()[row.machine], row).seconds) for row in steps)
    sheets = [one for one in found if one.job[0] == "aleph-alpha-layouts"]
    assert len(sheets) == 9
    assert sum(one.regret for one in sheets) / len(sheets) < 0.03
    assert sum(one.correlation for one in sheets) / len(sheets) > 0.8


def test_schedules_are_as_much_faster_as_on_gpus() -> None:
    """Papers' own costs and GPUs: the first few of the table."""
    found = list(ratios(most_devices=8))
    sources = [one.source for one in found]
    assert {source: sources.count(source) for source in sources} == {
        "Zero Bubble": 12,
        "PipeOffload": 2,
        "Vocabulary Parallelism": 18,
    }
    for one in found:
        if one.source == "Zero Bubble" or "256k" in one.model:  # of the others not all costs are known
            assert one.predicted == pytest.approx(one.measured, rel=0.05)
        assert f"| {one.base} | {one.schedule} | {one.measured:.3f} | {one.predicted:.3f} |" in TEXT
