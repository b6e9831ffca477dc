"""Start of Python processes: the command and environment in the parent, and what the child does before its work.

Solves, the service's process pool, its workers and the compiler of kernels all start here. `-P` keeps the
working folder out of the import path, and PYTHONPATH hands over what the parent imports from, so a child runs the same
code whatever folder it is started in.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a program in this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with its import path and `variables`."""
    import_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return os.environ | {"PYTHONPATH": import_path} | variables


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, where it can (Linux).

    The end of stdin tells the same everywhere, but goes unnoticed while a solver keeps Python's lock. Also makes this
    process the first that the kernel ends where memory is short, and turns off core dumps: the image of a process that
    held much memory would fill the disk.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getppid() != parent_pid:  # it ended before the first line
        sys.exit("the parent has gone")


def claim_stdout() -> BinaryIO:
    """The pipe to the parent, for answers only: from now on what a library prints goes to stderr."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe
