"""The kernels are compiled once for an installation: before what measures, beside a solve; the user is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.cli.output import doing, stderr

if TYPE_CHECKING:
    from optpipe.problem import Problem


def compile_once() -> None:
    """Compile all kernels where that has not been done for this installation.

    In a process of its own, and out of reach of Ctrl-C: on an interrupt this process ends it, which says so itself.
    """
    from solver.warm_up import is_warm, warm_up_in_child

    if is_warm():
        return
    with doing("compiling kernels: once for an installation, up to a minute or two"):
        warm_up_in_child(start_new_session=True)


def compile_meanwhile(problem: Problem) -> None:
    """Have the kernels compiled while a solve makes published schedules; its searches join as theirs are ready."""
    from solver.process.loading import load_uncompiled
    from solver.warm_up import warm_up_in_background

    if warm_up_in_background():
        stderr().print("compiling kernels meanwhile, once for an installation: searches join as theirs are ready")
        load_uncompiled(problem, "optpipe.simulate", "optpipe.any_timing")
