"""The verifier, loaded before anybody waits for it: in the parent while the child starts, and in the child.

And what a solve does where no kernel is compiled yet.
"""

from __future__ import annotations

from importlib import import_module

import numba

from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from solver.size import count_ops

INTERPRETED_OPS = 2000
"""Ops up to which published schedules take about a second without compiled kernels."""


def load_uncompiled(problem: Problem, *modules: str) -> None:
    """Import modules while another process compiles their kernels; for a small problem these are interpreted here.

    A fraction of a second of Python is less than seconds of compiling. It is for a process that solves this problem
    alone. Searches are no part of it: they are imported when they begin, and their kernels are compiled by then.
    """
    # Numba looks at this where a kernel is defined; its stubs do not tell of it.
    numba.config.DISABLE_JIT = count_ops(problem) <= INTERPRETED_OPS  # type: ignore[attr-defined]
    try:
        for module in modules:
            import_module(module)
    finally:
        numba.config.DISABLE_JIT = False  # type: ignore[attr-defined]


def load_verifier() -> None:
    """Load what times and verifies schedules, compiled kernel included, by finishing the smallest one there is."""
    from solver.finish import finish  # most of what is slow

    stage = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 1,
            "devices": [{"memory_bytes": None}],
            "stages": [stage | {"activation_bytes": 0, "backward_weight_bytes": 0}],
        }
    )
    finish(problem, Orders.of_compute([[Op(kind, 0, 0) for kind in "FBW"]]), 0.0, "", 0.0)
