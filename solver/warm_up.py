"""Compiles every kernel before anybody waits for one: once for an installation.

Numba keeps what it compiles on disk. Without this the first solve would spend its time limit on compiling (48 s of one
core when measured), in a child process that may be killed before anything is kept. ``python -m solver.warm_up`` does
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

from optpipe.errors import MethodError
from optpipe.problem import Problem
from solver.kernels import forget_stale, is_marked, mark
from solver.process import import_path

WORK = 0.02
"""Units of work that each search gets on each toy: every kernel is called, nothing is solved."""


def is_warm() -> bool:
    """Whether `warm_up` has run for this state of the kernels, of Python and of numba."""
    return is_marked(_WARM)


def warm_up() -> None:
    """Let all that has kernels solve toy problems, so that each kernel is compiled and kept."""
    from optpipe.simulate import simulate
    from solver.finish import finish
    from solver.floor import serial_orders
    from solver.limits import Limits, Start
    from solver.methods import METHODS
    from solver.search.local import local_search
    from solver.search.pattern.search import pattern_search
    from solver.search.windows import improve_windows

    forget_stale()
    for problem in _toys():
        for method in METHODS.values():
            if method.orders is not None:
                with suppress(MethodError):
                    method.orders(problem)
        orders = serial_orders(problem)
        assert orders is not None, "toys have room for one microbatch at a time"
        value_us = simulate(problem, orders).value_us
        for search in (local_search, pattern_search, improve_windows):
            limits = Limits(workers=1, deterministic_limit=WORK)
            search(problem, limits, Start(0.0, 2 * value_us, orders, value_us), lambda _: None)
        finish(problem, orders, 0.0, "floor", 0.0)
    mark(_WARM)


def warm_up_in_child(start_new_session: bool = False) -> None:
    """`warm_up` in a process of its own, which a caller can leave behind or end; a failure is only printed there."""
    command = [sys.executable, "-P", "-m", "solver.warm_up"]
    environment = os.environ | {"PYTHONPATH": import_path()}
    subprocess.run(command, env=environment, check=False, start_new_session=start_new_session)


def _toys() -> Iterator[Problem]:
    """Linear, along a V and interleaved, with and without offload, for both objectives."""
    offload = {"bytes": 1, "offload_us": 10, "reload_us": 10}
    for placement, moves, objective in product(([0, 1], [0, 1, 1, 0], [0, 1, 0, 1]), (None, offload), _OBJECTIVES):
        stages: list[dict[str, Any]] = [
            {"device": device, "forward_us": 10, "backward_input_us": 10, "backward_weight_us": 10}
            | {"activation_bytes": 2, "backward_weight_bytes": 1, "offload": moves}
            for device in placement
        ]
        budget = {"memory_bytes": 3 * len(placement)}
        fields = {"microbatches": 6, "objective": objective, "devices": [budget] * 2, "stages": stages}
        yield Problem.from_data({"format": "optpipe.problem/1", "transfer_us": 1, **fields})


_OBJECTIVES = ("makespan", "device_span")
_WARM = "warm"


if __name__ == "__main__":
    warm_up()
