"""A child process whose searches heed nothing: no limit, no cancel, no request to be kind to memory.

Run as ``python -m tests.promises.stubborn PARENT_PID`` in place of `solver.process.child`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np

from optpipe.problem import Problem
from solver.kernels import WARM, are_ready
from solver.limits import Cancel, Limits
from solver.methods import METHODS, Method
from solver.process import child
from solver.process.channel import Message
from solver.process.child import Outbox
from solver.search.annealing.search import local_search
from solver.solution import OnSolution, Solution

sent_us: list[float] = []
"""Values of the incumbents that have left this process."""


class TellingOutbox(Outbox):
    """Notes what has been sent."""

    def _write(self, message: Message) -> None:
        super()._write(message)
        if message["type"] == "incumbent":
            sent_us.append(message["value_us"])


def wait_until_sent(value_us: float) -> None:
    """The thread that sends may come late; a search that keeps the process to itself would never let it."""
    while value_us not in sent_us:
        time.sleep(0.01)


def improve(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> None:
    """Send one schedule that is better than the published ones, after the best of these."""
    wait_until_sent(start.value_us)
    free = Limits(workers=1, deterministic_limit=0.05, cancel=Cancel())
    better = local_search(problem, free, start, lambda better: None)
    on_solution(better)
    wait_until_sent(better.value_us)


def hang(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Sleep in C for an hour without giving up Python's lock: no thread of this process gets a word in."""
    improve(problem, limits, start, on_solution)
    ctypes.PyDLL(None).sleep(3600)
    raise AssertionError("nobody waits for an hour")


def explode(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Take more and more memory."""
    improve(problem, limits, start, on_solution)
    held = []
    while True:
        held.append(np.ones(8 << 20))
        time.sleep(0.01)


def exhaust(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Ask for more memory than there is."""
    improve(problem, limits, start, on_solution)
    raise MemoryError


def crash(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """End as a bug in C++ does."""
    improve(problem, limits, start, on_solution)
    os.write(2, b"the invariant is broken")
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("the signal came late")


def fail(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Raise what no caller expects, as a bug in Python does."""
    improve(problem, limits, start, on_solution)
    raise AssertionError("the invariant is broken")


def load() -> None:
    """Load what a solve needs, and leave a file to say so."""
    load_now()
    Path("loaded").touch()


load_now = child._load

if __name__ == "__main__":
    child.Outbox, child._load = TellingOutbox, load  # type: ignore[misc]
    if not are_ready(WARM):
        Path("loaded").touch()  # nothing is loaded ahead of time
    for search in (hang, explode, exhaust, crash, fail):
        name = search.__name__
        METHODS[name] = Method(name, "exact", search.__doc__ or "", "", search=search)
    child.main()
