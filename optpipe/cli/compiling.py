"""The kernels are compiled before a search's clock starts, and the user is told what takes so long."""

from __future__ import annotations

import os
import subprocess
import sys

from optpipe.cli.output import doing


def compile_once() -> None:
    """Compile all kernels where that has not been done for this installation.

    In a process of its own, and out of reach of Ctrl-C: on an interrupt this process ends it, which says so itself.
    """
    from solver.process import import_path
    from solver.warm_up import is_warm

    if is_warm():
        return
    command = [sys.executable, "-P", "-m", "solver.warm_up"]
    with doing("compiling kernels: once for an installation, up to a minute or two"):
        subprocess.run(command, env=os.environ | {"PYTHONPATH": import_path()}, check=False, start_new_session=True)
