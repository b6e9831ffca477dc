"""The kernels are compiled before a search's clock starts, and the user is told what takes so long."""

from __future__ import annotations

from optpipe.cli.output import doing


def compile_once() -> None:
    """Compile all kernels where that has not been done for this installation.

    In a process of its own, and out of reach of Ctrl-C: on an interrupt this process ends it, which says so itself.
    """
    from solver.warm_up import is_warm, warm_up_in_child

    if is_warm():
        return
    with doing("compiling kernels: once for an installation, up to a minute or two"):
        warm_up_in_child(start_new_session=True)
