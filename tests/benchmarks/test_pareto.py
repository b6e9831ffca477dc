"""The Pareto front of memory and time: more memory never takes longer, and every point keeps its budget."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.pareto import memory_curve, patterns_found, with_budget
from instances import uniform
from optpipe.simulate import simulate
from solver.build import within_budgets


def test_the_curve_falls_with_memory() -> None:
    problem = uniform(4, 24, v_shape=True, transfer_us=0, backward_weight_bytes=2, budget=16)
    patterns = patterns_found(problem, [60, 90], width=4)
    points = memory_curve(problem, patterns, [1, 6, 8, 12])
    assert [point.budget_bytes for point in points][-2:] == [8, 12]
    periods = [point.pattern.period_us for point in points]
    assert periods == sorted(periods, reverse=True)
    for point in points:
        simulation = simulate(problem, point.orders)
        assert simulation.value_us == pytest.approx(point.value_us)
        assert within_budgets(with_budget(problem, point.budget_bytes, 24), point.orders, simulation)


def test_another_number_of_microbatches_is_other_work() -> None:
    problem = uniform(2, 4, budget=8)
    work_us = np.array(problem.work_us)
    other = with_budget(problem, 6, 12)
    assert other == uniform(2, 12, budget=6)
    assert (np.array(other.work_us) == 3 * work_us).all()
