"""Time to the first schedule: of the first `optpipe solve` of an installation, and of later ones.

`python -m benchmarks.first_solve first-solve` prints a Markdown table. An installation without compiled kernels is an
empty NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.markdown import Time, TimedRow, machine, seconds_text, table
from benchmarks.section import Section, Size, main, say
from instances import uniform
from optpipe.problem import Problem
from optpipe.units import TIME_UNITS
from solver.kernels import compiler_lock

COMMAND = "python -m benchmarks.first_solve first-solve"
EXAMPLE = Path("examples/problems/offload-p4-m8.json")
HEAD = ("problem", "ops", "kernels", "limit s", "first schedule s", "its value", "answer s", "its value", "processor s")

_PROGRESS = re.compile(r" s +([\d,.]+) (µs|ms|s)  bound ")

UNIT_US = {unit.name: unit.size for unit in TIME_UNITS}


@dataclass(frozen=True)
class Run:
    """Run of `optpipe solve`: elapsed seconds to its first schedule, whose value was `first_us`, and to its end."""

    first_s: float
    first_us: float | None
    end_s: float
    value_us: float
    processor_s: float


def measure(size: Size, _pictures: Path) -> str:
    """Solve each problem without compiled kernels, and again with them."""
    large = uniform(64, 1024, v_shape=True, budget=256)
    problems = [(Problem.load(EXAMPLE), 3.0)] + ([(large, 5.0)] if size == "full" else [])
    rows: list[TimedRow] = []
    compiled_s = []
    for problem, limit_s in problems:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = folder / "problem.json"
            path.write_text(problem.to_json())
            with patch.dict(os.environ, NUMBA_CACHE_DIR=str(folder / "numba"), XDG_CACHE_HOME=str(folder / "cache")):
                began = time.perf_counter()
                rows.append(_row(problem, "none", limit_s, _run(path, limit_s)))
                _wait_for_compiler()
                compiled_s.append(time.perf_counter() - began)
                rows.append(_row(problem, "compiled", limit_s, _run(path, limit_s)))
    after = ", ".join(f"{seconds:.0f} s" for seconds in compiled_s)
    note = (
        f"All kernels were compiled {after} after the start of the first solve. `{COMMAND} --size {size}`: {machine()}."
    )
    return f"{table(HEAD, rows, 1)}\n\n{note}"


def _run(path: Path, limit_s: float) -> Run:
    """Solve the problem and write the schedule."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "optpipe",
        "solve",
        path,
        "--time-limit",
        str(limit_s),
        "--no-cache",
        "--json",
    ]
    before = os.times()
    began = time.perf_counter()
    first_s = float("inf")
    first_us: float | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            found = _PROGRESS.search(line)
            if found and first_us is None:
                first_s = time.perf_counter() - began
                first_us = float(found[1].replace(",", "")) * UNIT_US[found[2]]
        summary = json.load(process.stdout)
    after = os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    run = Run(first_s, first_us, time.perf_counter() - began, summary["value_us"], used_s)
    say(f"{path.name}  {run}")
    return run


def _wait_for_compiler() -> None:
    lock = compiler_lock(wait=True)
    assert lock is not None, "the folder is ours"
    lock.close()


def _row(problem: Problem, kernels: str, limit_s: float, run: Run) -> TimedRow:
    ops = f"{3 * len(problem.stages) * problem.microbatches:,}"
    name = problem.name or f"V of {len(problem.devices)} devices, {problem.microbatches:,} microbatches"
    first = (seconds_text(run.first_s), "-" if run.first_us is None else Time(run.first_us))
    return (
        name,
        ops,
        kernels,
        f"{limit_s:g}",
        *first,
        seconds_text(run.end_s),
        Time(run.value_us),
        seconds_text(run.processor_s),
    )


SECTIONS = (
    Section(
        "first-solve",
        "The first solve of an installation",
        "From the start of `optpipe solve` to its first schedule, and to its end with a schedule written: "
        "while no kernel is compiled, and afterwards.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
