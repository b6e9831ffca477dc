"""A command ends with its exit code whatever its threads are doing."""

from __future__ import annotations

import subprocess
import sys

LEAVES_A_THREAD = """
import time
from threading import Thread
from ortools.sat.python.cp_model import CpModel, CpSolver
import optpipe.cli.app
from optpipe.cli import main

def solve_for_ever():
    while True:
        CpSolver().solve(CpModel())

def run(arguments):
    Thread(target=solve_for_ever, daemon=True).start()
    time.sleep(0.1)
    print("done")
    return 3

optpipe.cli.app.run = run
main()
"""


def test_a_thread_in_a_solver_does_not_abort_the_process() -> None:
    run = subprocess.run([sys.executable, "-c", LEAVES_A_THREAD], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (3, "done\n", "")
