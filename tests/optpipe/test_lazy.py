"""Each package offers its names, however its modules are loaded, and loads nothing before one is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import api
import optpipe
import solver

HEAVY = {
    "numpy",
    "pydantic",
    "numba",
    "ortools",
    "highspy",
    "fastapi",
    "optpipe.problem",
    "solver.solve",
    "api.app",
}


def fresh(program: str) -> str:
    """Output of a program in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", [optpipe, solver, api], ids=lambda package: package.__name__)
def test_every_name_is_there_and_listed(package: object) -> None:
    offered = package.__all__
    assert set(offered) <= set(dir(package))
    assert all(getattr(package, name).__name__ == name for name in offered)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'no_such'"):
        _ = package.no_such


def test_nothing_is_loaded_before_a_name_is_used() -> None:
    loaded = set(fresh("import api, optpipe, solver, sys; print(*sys.modules)").split())
    assert not HEAVY & loaded


def test_help_loads_nothing_that_takes_long() -> None:
    program = "import sys; from optpipe.cli.app import run; run(['--help']); print('after:', *sys.modules)"
    shown, _, loaded = fresh(program).partition("after:")
    assert "calibrate" in shown
    assert not HEAVY & set(loaded.split())


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import optpipe.simulate, optpipe.verify",
        "from optpipe.simulate import simulate as s",
        "import solver.build",
    ],
)
def test_a_function_that_has_the_name_of_its_module(before: str) -> None:
    """Both ways to import it give the function, whichever comes first."""
    program = f"""
{before}
from optpipe import simulate, verify
from optpipe.simulate import Simulation, simulate as of_module
from optpipe.verify import verify as verify_of_module
import optpipe
assert simulate is of_module is optpipe.simulate and verify is verify_of_module is optpipe.verify
print(simulate.__name__, verify.__name__, Simulation.__name__)
"""
    assert fresh(program).split() == ["simulate", "verify", "Simulation"]


def test_the_names_solve_simulate_and_verify_a_problem() -> None:
    stages = [
        {
            "device": device,
            "forward_us": 1,
            "backward_input_us": 1,
            "backward_weight_us": 1,
            "activation_bytes": 1,
            "backward_weight_bytes": 1,
        }
        for device in (0, 1)
    ]
    data = {"format": "optpipe.problem/1", "microbatches": 2, "devices": [{"memory_bytes": None}] * 2, "stages": stages}
    problem = optpipe.Problem.from_data(data)
    schedule = solver.solve(problem, "1f1b", solver.Limits(time_limit_s=5))
    assert isinstance(schedule, optpipe.Schedule)
    assert optpipe.verify(schedule).ok
    assert optpipe.simulate(problem, schedule.orders).value_us == schedule.value_us
