"""Command line: one file per command. The only package that imports all three others.

Exit codes: 0 success; 1 the run completed with a negative result; 2 bad usage or bad input; 3 proved infeasible; 4 no
schedule found within the time limit; 130 interrupted.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
from typing import NoReturn


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code; errors become one message, never a traceback.

    Without `arguments` it is the program of this process.
    """
    prepare_streams()
    try:
        from optpipe.cli.app import run  # a second or more, in which Ctrl-C must not print a traceback

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        code = 130
    if arguments is None and any(thread.daemon for thread in threading.enumerate()):
        _end_process(code)
    sys.exit(code)


def _end_process(code: int) -> NoReturn:
    """End as `sys.exit` does, but leave daemon threads as they are.

    The interpreter ends each of them where it next asks for its lock. In a compiled kernel or a solver that is in the
    middle of C++, which aborts the process: after all was done and written, its exit code would be 134.
    """
    if searches := sys.modules.get("solver.strategy"):
        atexit.unregister(searches.end_searches)  # which waits for those of them that are searches
    threading._shutdown()  # type: ignore[attr-defined]  # ends pools and waits for their threads, as at every exit
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except OSError:
        code = code or 120  # as Python itself
    os._exit(code)


def prepare_streams() -> None:
    """Open closed standard streams on /dev/null, and escape characters that a stream's encoding lacks.

    The descriptors of closed streams would be reused for the next files opened, and a solver's library could print
    into one of those.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the end)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
