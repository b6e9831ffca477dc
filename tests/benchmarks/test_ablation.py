"""Every part of `auto` has its code in the table, and what is lost is counted by rows of the sample."""

from __future__ import annotations

import pytest

from benchmarks.ablation import CODE, SAMPLE, Loss, code_lines, instance_of
from solver.components import NAMES
from solver.solution import Solution


@pytest.mark.parametrize("name", NAMES)
def test_code_of_each_part(name: str) -> None:
    assert 0 < code_lines(tuple(CODE[name])) < 3_000


def test_every_instance_is_there_with_its_changes() -> None:
    problems = [instance_of(one) for row in SAMPLE["full"] for one in row]
    assert len({name for name, _ in problems}) == len(problems)
    sizes = {(len(problem.devices), problem.units) for _, problem in problems}
    assert max(sizes) == (64, 64)
    assert (32, 512) in sizes


def test_losses_are_of_equal_rows() -> None:
    def answer(gap: float) -> Solution:
        return Solution(None, 100.0, 100.0 - 100 * gap)

    loss = Loss()
    loss.add(1.0, answer(0.0), answer(0.04))
    loss.add(0.5, answer(0.02), answer(0.0))
    assert (loss.rows, loss.proofs) == (2, 0)
    assert (loss.gap, loss.most) == (pytest.approx(0.03), 0.04)
