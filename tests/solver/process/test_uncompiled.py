"""Published schedules, bounds and exact answers before any kernel is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from instances import uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver import kernels
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.process import solve_in_child
from solver.process.parent import INTERPRETED_OPS
from solver.scale import count_ops
from solver.solution import Progress, Solution
from tests.sample import some

EXAMPLE = Problem.load(Path(__file__).parents[3] / "examples/problems/offload-p4-m8.json")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for compiled kernels, empty as after an installation, with a compiler that never gets anything done."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lock = kernels.compiler_lock(wait=False)
    assert lock is not None
    with lock:
        yield tmp_path / "numba"


def compiled(folder: Path) -> set[str]:
    """The kernels that numba keeps."""
    return {path.name.split("-")[0] for path in folder.rglob("*.nbi")}


def solved(problem: Problem, folder: Path, limit_s: float) -> list[tuple[Solution, set[str]]]:
    """Every incumbent, with the kernels that were compiled when it came."""
    heard: list[tuple[Solution, set[str]]] = []

    def listen(event: object) -> None:
        if isinstance(event, Progress):
            heard.append((event.solution, compiled(folder)))

    result = solve_in_child(problem, "auto", Limits(limit_s, workers=1), on_event=listen)
    assert result.schedule is not None
    assert verify(result.schedule).ok
    assert result.schedule.value_us <= heard[0][0].value_us
    return heard


def test_a_small_problem_is_answered_without_any_kernel(kept: Path) -> None:
    """Also with offload, for which nothing but ada-offload is published on one stage a device."""
    published_us = simulate(EXAMPLE, published_orders(METHODS["ada-offload"], EXAMPLE)).value_us
    heard = solved(EXAMPLE, kept, limit_s=10.0)
    first, _ = heard[0]  # the newest one is sent: a busy machine may skip what is published
    assert first.method == "ada-offload" or first.value_us < published_us
    assert (first.bound_us, published_us) == (29_000, 30_000)
    assert heard[-1][0].value_us in (29_000, 30_000), "CP-SAT, which has no kernels, may prove the optimum"
    assert compiled(kept) == set()


@pytest.mark.parametrize("v_shape", some([False, True]))
def test_a_large_one_needs_the_simulator_s_alone(kept: Path, v_shape: bool) -> None:
    problem = uniform(8, 128, v_shape=v_shape, budget=32)
    assert count_ops(problem) > INTERPRETED_OPS
    heard = solved(problem, kept, limit_s=5.0)
    first, there = heard[0]
    # Any published schedule: only the newest is sent, so a busy machine skips the first ones.
    assert METHODS[first.method.removesuffix(", unfilled")].kind == "published"
    assert there == {"simulate._earliest_starts"}
    assert first.gap < 0.2
