"""Time windows of the mixed-integer program: longest paths, windows and implied orders by hand."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from instances import uniform
from optpipe.ops import Op
from solver.exact.milp.time_windows import longest_paths
from solver.exact.milp.variables import Options, Variables
from tests.sample import some


@pytest.mark.parametrize("seed", some(range(20)))
def test_longest_paths_are_those_over_all_numbers_of_steps(seed: int) -> None:
    rng, size = Random(seed), 9
    pairs = [(a, b) for a in range(size) for b in range(a) if rng.random() < 0.3]  # from larger to smaller numbers
    source, target = np.array(pairs, np.int64).reshape(-1, 2).T
    weight = np.array([rng.randint(0, 5) for _ in pairs], np.float64)
    longest = np.where(np.eye(size, dtype=bool), 0.0, -np.inf)
    for _ in range(size):
        for a, b, more in zip(source, target, weight, strict=True):
            longest[:, b] = np.maximum(longest[:, b], longest[:, a] + more)
    distance = longest_paths(size, source, target, weight)
    assert distance is not None
    assert distance.tolist() == longest.tolist()


def test_a_cycle_has_no_longest_paths() -> None:
    assert longest_paths(3, np.array([0, 1, 2]), np.array([1, 2, 1]), np.zeros(3)) is None


def test_windows_of_one_microbatch_leave_slack_to_the_last_w_alone() -> None:
    """F, B and W of 10 us on two devices, 1 us between them: 52 us, of which W of stage 1 may use the last 21."""
    windows = (variables := Variables(uniform(2, 1), 52.0, 52.0, Options())).windows
    starts = {
        str(op): (round(early * variables.unit_us, 6), round(late * variables.unit_us, 6))
        for op, early, late in zip(variables.ops, windows.earliest.tolist(), windows.latest.tolist(), strict=True)
    }
    fixed = {"F0.0": 0, "F1.0": 11, "B1.0": 21, "B0.0": 32, "W0.0": 42}
    assert starts == {name: (us, us) for name, us in fixed.items()} | {"W1.0": (31, 42)}


@pytest.mark.parametrize(("budget", "ended"), [(2, "W"), (3, "B"), (4, None)])
def test_budgets_imply_what_ends_before_the_next_forward(budget: int, ended: str | None) -> None:
    """Activations of 2 bytes, half of which B frees; without windows no such order is stated."""
    problem = uniform(1, 2, budget=budget)
    for windows in (True, False):
        variables = Variables(problem, 120.0, 120.0, Options(windows=windows))
        before = [
            kind
            for kind in "BW"
            if variables.windows.implies(variables.index[Op(kind, 0, 0)], variables.index[Op("F", 0, 1)])
        ]
        assert before == (["B", "W"][: "BW".index(ended) + 1] if windows and ended else [])
