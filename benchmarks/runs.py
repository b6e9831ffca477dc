"""Measured runs: solves with everything loaded and compiled beforehand, and worker scripts under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.section import say
from instances import HALF, uniform
from optpipe.problem import Problem
from solver.limits import Limits
from solver.regression.run import MeasuredRun, measure


def warm_up(methods: Sequence[str]) -> None:
    """Load the methods and compile their kernels."""
    for method in methods:
        measure(uniform(2, 2, budget=4, offload=HALF), method, Limits(1))


def run(name: str, problem: Problem, method: str, time_limit_s: float) -> MeasuredRun:
    """Run a method on all cores. Ctrl-C ends the whole benchmark, as half a table would mislead."""
    measured = measure(problem, method, Limits(time_limit_s))
    if measured.interrupted:
        raise KeyboardInterrupt
    figures = measured.figures
    say(f"{name}  {method}  {measured.seconds:.1f} s  {figures.value_us if figures else measured.why_not}")
    return measured


def solve_by_command(problem: Problem, time_limit_s: float) -> tuple[float, dict[str, Any]]:
    """Seconds of the whole command `optpipe solve`, and what it says of its schedule (`Schedule.figures`)."""
    with tempfile.TemporaryDirectory() as folder:
        source, answer = Path(folder) / "problem.json", Path(folder) / "schedule.json"
        source.write_text(json.dumps(problem.to_data()))
        command = [sys.executable, "-m", "optpipe", "solve", str(source), "-o", str(answer), "--no-cache", "--json"]
        began = time.perf_counter()
        done = subprocess.run([*command, "--time-limit", str(time_limit_s)], check=True, capture_output=True)
        return time.perf_counter() - began, json.loads(done.stdout)


def torchrun(worker: Path, processes: int, *arguments: str) -> None:
    """Run a worker script on every rank, over gloo on the loopback, with one thread per rank.

    Raises CalledProcessError if a rank fails; stderr of the ranks is shown.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += ["--local-addr=127.0.0.1", f"--nproc-per-node={processes}", str(worker), *arguments]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL) as launcher:
        try:
            code = launcher.wait()
        except BaseException:
            launcher.terminate()  # the launcher ends its ranks, which would otherwise keep running
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)
