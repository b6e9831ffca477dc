"""A child process whose published schedules take most of the limit each, the last one being the best.

Run as ``python -m tests.solver.process.slow_methods PARENT_PID`` in place of `solver.process.child`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from optpipe.errors import MethodError
from optpipe.ops import Orders
from optpipe.problem import Problem
from solver.methods import METHODS
from solver.process.child import main
from solver.published.one_stage import gpipe

SECONDS = 0.9
SLOW = ("1f1b", "gpipe", "zb-h1")


def slow(problem: Problem) -> Orders:
    """A poor schedule after a while."""
    time.sleep(SECONDS)
    return gpipe(problem)


def none(problem: Problem) -> Orders:
    """No schedule."""
    raise MethodError("this one is left out.")


if __name__ == "__main__":
    best = METHODS["zb-h2"]
    for method in [method for method in METHODS.values() if method.orders]:
        METHODS[method.name] = replace(method, orders=slow if method.name in SLOW else none)
    METHODS["zb-h2"] = best  # comes after all of SLOW
    main()
