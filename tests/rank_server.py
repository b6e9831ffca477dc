"""Loads torch and what trains with it once, and forks processes that run a script: ``python -m tests.rank_server``.

Each line on stdin asks for some processes, a JSON object for each: the script, its arguments, the environment, and the
files that take what it prints. A line on stdout tells their ids, and another one id and exit code of each that ends.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

LOADED = ("optpipe.train.loop", "solver.solve", "torch._dynamo")
"""The last is what every optimizer loads when it is made. None of them starts a thread: a fork would not have it."""


def main() -> None:
    """Serve until stdin ends; in each forked process, run its script."""
    load()
    while line := sys.stdin.readline():
        pids = []
        for process in json.loads(line):
            if not (pid := os.fork()):
                become(**process)
                return
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        for _ in pids:
            pid, status = os.wait()
            print(json.dumps([pid, os.waitstatus_to_exitcode(status)]), flush=True)


def load() -> None:
    """Load what forked processes are to share."""
    for name in LOADED:
        import_module(name)
    gc.freeze()  # or collecting garbage writes to, and so copies, every page that the processes share


def become(script: str, arguments: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Run the script as a process of its own would."""
    for stream, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        opened = os.open(path, flags | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
