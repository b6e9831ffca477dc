"""A program that ends while a search is in C++ ends with its own exit code."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SEARCHES = """
import os, signal, sys, time
from threading import Event, Thread
from ortools.sat.python.cp_model import CpModel, CpSolver
from instances import HALF, uniform
from solver import Limits, solve
from solver.methods import METHODS, Method

began, leaving = Event(), Event()

def in_cpp(problem, limits, start, on_solution):
    "Solves models until it is asked to stop, and for half a second after the program has begun to end."
    model, solver = CpModel(), CpSolver()
    model.add_all_different([model.new_int_var(0, 30, "") for _ in range(30)])
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False
    began.set()
    if sys.argv[1] == "interrupted":
        leaving.set()
        os.kill(os.getpid(), signal.SIGINT)
    while not (leaving.is_set() and limits.cancel.requested):
        solver.solve(model)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        solver.solve(model)
    return start

METHODS["in-cpp"] = Method("in-cpp", "exact", "", "", search=in_cpp)

def search(seconds):
    return solve(uniform(4, 8, budget=4, offload=HALF), "in-cpp", Limits(seconds, workers=1))

"""
ENDS = {
    "outlived": ("print(search(1.0).status)\nleaving.set()\nsys.exit(3)", 3, "feasible\n"),
    "interrupted": ("search(600)", -signal.SIGINT, ""),
    "in a daemon thread": (
        "Thread(target=search, args=[600], daemon=True).start()\nbegan.wait()\nleaving.set()\nsys.exit(3)", 3, ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_a_search_in_cpp_does_not_abort_the_process(how: str) -> None:
    program, code, printed = ENDS[how]
    run = subprocess.run([sys.executable, "-c", SEARCHES + program, how], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (code, printed), run.stderr
    assert run.stderr.strip().rpartition("\n")[2] == ("KeyboardInterrupt" if how == "interrupted" else "")
