"""Compiles every kernel once for an installation.

Numba keeps what it compiles on disk. Without this the first solves would spend their time limits on compiling (two to
four minutes of one core), in child processes that may be killed before anything is kept. `python -m
solver.warm_up` does it. A solve need not wait for the end: published schedules come first, and a search joins as soon
as its own kernels are there (`solver.kernels.are_ready`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import product
from threading import Thread
from typing import Any

import numpy as np

from optpipe.errors import MethodError
from optpipe.problem import Overlap, Problem
from optpipe.spread import Gate, SpreadPass
from solver.kernels import WARM, are_being_compiled, compiler_lock, forget_stale, is_marked, mark
from solver.process import child_environment, module_command

WORK = 0.02
"""Units of work that each search gets on each toy: every kernel is called, nothing is solved."""

NICENESS = 10
"""Niceness of a background compiler, so that it yields to a solve."""

_BACKGROUND = "--background"
_COMMAND = module_command("solver.warm_up")


def is_warm() -> bool:
    """True if `warm_up` has run for this state of the kernels, of Python and of numba."""
    return is_marked(WARM)


def warm_up() -> None:
    """Let all that has kernels solve toy problems, so that each kernel is compiled and kept; searches first."""
    from optpipe.assignment import MemorySteps, Places
    from optpipe.simulate import simulate
    from optpipe.stage import UnitFactors
    from solver.build import build_schedule
    from solver.limits import Limits
    from solver.methods import METHODS
    from solver.searches import SEARCHES
    from solver.serial import serial_orders
    from solver.solution import Solution

    forget_stale()
    starts = []
    for problem in _toys():
        orders = serial_orders(problem)
        assert orders is not None, "toys have room for one microbatch at a time"
        value_us = simulate(problem, orders).value_us
        starts.append((problem, Solution(orders, value_us, 0.0)))
        build_schedule(problem, orders, 0.0, "floor", 0.0)
        nothing = MemorySteps(np.zeros(1, np.int64), np.zeros(1, np.int64), 0)
        Places(problem, orders, [nothing]).assign(np.ones((len(UnitFactors._fields), problem.microbatches)), 1)
    for search in SEARCHES.values():
        if search.kernels:
            for problem, start in starts:
                search(problem, Limits(workers=1, deterministic_limit=WORK), start, lambda _: None)
            mark(search.kernels)
    for problem, _ in starts:
        for method in METHODS.values():
            if method.orders is not None:
                with suppress(MethodError):
                    method.orders(problem)
    for problem in (_toy_with_passes(), _toy_with_blocks()):  # last: few problems have any
        SEARCHES["search"](problem, Limits(workers=1, deterministic_limit=WORK), Solution(), lambda _: None)
    mark(WARM)


def warm_up_in_child(start_new_session: bool = False) -> None:
    """`warm_up` in a process of its own, which a caller can leave behind or end; a failure is only printed there."""
    subprocess.run(_COMMAND, env=child_environment(), check=False, start_new_session=start_new_session)


def warm_up_in_background() -> bool:
    """Start `warm_up` in a process that outlives this one, unless it is done or one is at it; whether one is now.

    The next solve finds done what this one did not wait for. The lock goes over to the process.
    """
    if is_warm():
        return False
    forget_stale()
    lock = compiler_lock(wait=False)
    if lock is not None:
        with lock:
            process = subprocess.Popen(
                [*_COMMAND, _BACKGROUND],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[lock.fileno()],
                start_new_session=True,
            )
        Thread(target=process.wait, name="compiler", daemon=True).start()
    return are_being_compiled()


def _toys() -> Iterator[Problem]:
    """Linear, along a V and interleaved, with and without offload, for both objectives; one that may recompute."""
    offload = {"bytes": 1, "offload_us": 10, "reload_us": 10}
    recompute = {"name": "full", "kept_bytes": 1, "recompute_us": 10}
    kinds: list[tuple[Any, ...]] = [*product(([0, 1], [0, 1, 1, 0], [0, 1, 0, 1]), (None, offload), ([],), _OBJECTIVES)]
    kinds.append(([0, 1], None, [recompute], _OBJECTIVES[0]))
    for placement, moves, modes, objective in kinds:
        stages: list[dict[str, Any]] = [
            {"device": device, "forward_us": 10, "backward_input_us": 10, "backward_weight_us": 10}
            | {"activation_bytes": 2, "backward_weight_bytes": 1, "offload": moves, "modes": modes}
            for device in placement
        ]
        budget = {"memory_bytes": 3 * len(placement)}
        fields = {"microbatches": 6, "objective": objective, "devices": [budget] * 2, "stages": stages}
        yield Problem.from_data({"format": "optpipe.problem/1", "transfer_us": 1, **fields})


def _toy_with_blocks() -> Problem:
    """The first toy along a V, where a forward and a backward of a device may be one block."""
    toy = next(problem for problem in _toys() if len(problem.stages) > len(problem.devices))
    pairs = [(f, b) for stages in toy.stages_of for f, b in product(stages, stages)]
    return toy.replaced(overlaps=[Overlap(forward_stage=f, backward_stage=b, us=25) for f, b in pairs])


def _toy_with_passes() -> Problem:
    """The first toy, with a spread pass that its last backward waits for."""
    toy, last = next(_toys()), 1
    spread = SpreadPass.from_data({"name": "S", "us": [1, 1], "after": [{"op": "F", "stage": last}]})
    gate = Gate.from_data({"op": "B", "stage": last, "after": [{"pass": "S"}]})
    return toy.replaced(spread=[spread], gates=[gate])


_OBJECTIVES = ("makespan", "device_span")


if __name__ == "__main__":
    if _BACKGROUND in sys.argv:
        os.nice(NICENESS)
        warm_up()
    else:
        with compiler_lock(wait=True) or nullcontext():
            if not is_warm():
                warm_up()
