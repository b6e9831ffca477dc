"""The tables of the guide: one model in every placement, and a page that has a place for each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import which_schedule
from benchmarks.curves import MemoryChart, draw_bubble_over_memory
from benchmarks.marks import between
from benchmarks.which_schedule import ALL, BASE, CHUNKS, DOCUMENT, TABLES, UNIT_BYTES, Placement, Table
from solver.build import peak_budgets
from solver.methods import METHODS


@pytest.mark.parametrize("placement", CHUNKS)
def test_every_placement_holds_the_same_model(placement: Placement) -> None:
    numbers = replace(BASE, head=0.5, round_trip=1.0)
    problem, linear = numbers.problem(placement), numbers.problem("linear")
    assert sum(problem.work_us) == pytest.approx(sum(linear.work_us))
    assert sum(stage.activation_bytes for stage in problem.stages) == numbers.devices * UNIT_BYTES
    copies_us = [stage.offload.offload_us + stage.offload.reload_us for stage in problem.stages[:-1] if stage.offload]
    work_us = [stage.duration_us("F") + stage.duration_us("BW") for stage in problem.stages[:-1]]
    assert copies_us == pytest.approx(work_us)


def test_a_budget_of_one_is_what_1f1b_takes() -> None:
    problem = BASE.problem("linear")
    orders = METHODS["1f1b"].orders
    assert orders is not None
    assert max(peak_budgets(problem, orders(problem))) == problem.devices[0].memory_bytes


def test_cut_evenly_all_devices_have_the_same_work() -> None:
    numbers = replace(BASE, head=1.0, even=True)
    assert len(set(numbers.problem("V").work_us)) == 1
    assert sum(numbers.problem("V").work_us) == pytest.approx(sum(replace(numbers, even=False).problem("V").work_us))


def test_the_guide_has_every_table() -> None:
    guide = DOCUMENT.read_text()
    for table in TABLES:
        shown = between(guide, table.name)
        assert shown is not None
        assert all(f"| {label} |" in shown for label, _ in table.rows)


def test_a_table_shows_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.which_schedule.PUBLISHED", ["zb-v"])
    monkeypatch.setattr("benchmarks.which_schedule.TIME_LIMIT_S", {"quick": 0.5})
    charts = []

    def draw(chart: MemoryChart, path: Path, title: str) -> None:
        charts.append(chart)
        draw_bubble_over_memory(chart, path, title)

    monkeypatch.setattr(which_schedule, "draw_bubble_over_memory", draw)
    small = replace(BASE, devices=2, microbatches=2, budget=0.5, round_trip=1.0)
    shown = Table("one", "memory", [("0.5", small)], ALL).measure("quick", tmp_path)
    assert "| 0.5 | does not fit | zb-v" in shown
    assert (tmp_path / "one.png").is_file()
    assert "p = 4, m = 4, " in charts[0].subtitle, "the quick size"
