"""A child process whose searches heed nothing: no limit, no cancel, no request to be kind to memory.

Run as ``python -m tests.promises.stubborn PARENT_PID`` in place of `solver.process.child`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

import numpy as np

from optpipe.problem import Problem
from solver.limits import Answer, Cancel, Limits, Start
from solver.methods import METHODS, Method
from solver.process.child import main
from solver.search.annealing.search import local_search

OnAnswer = Callable[[Answer], None]


def improve(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> None:
    """Report one schedule that is better than the published ones, and let it be sent."""
    free = Limits(workers=1, deterministic_limit=0.05, cancel=Cancel())
    on_answer(local_search(problem, free, start, lambda better: None))
    time.sleep(0.5)


def hang(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
    """Sleep in C for an hour without giving up Python's lock: no thread of this process gets a word in."""
    improve(problem, limits, start, on_answer)
    ctypes.PyDLL(None).sleep(3600)
    raise AssertionError("nobody waits for an hour")


def explode(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
    """Take more and more memory."""
    improve(problem, limits, start, on_answer)
    held = []
    while True:
        held.append(np.ones(8 << 20))
        time.sleep(0.01)


def exhaust(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
    """Ask for more memory than there is."""
    improve(problem, limits, start, on_answer)
    raise MemoryError


def crash(problem: Problem, limits: Limits, start: Start, on_answer: OnAnswer) -> Answer:
    """End as a bug in C++ does."""
    improve(problem, limits, start, on_answer)
    os.write(2, b"the invariant is broken")
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("the signal came late")


if __name__ == "__main__":
    for search in (hang, explode, exhaust, crash):
        name = search.__name__
        METHODS[name] = Method(name, "exact", search.__doc__ or "", "", search=search)
    main()
