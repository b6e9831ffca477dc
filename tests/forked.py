"""A fork server for Python commands: it has loaded what they need (torch and the solvers), and forks for each.

Loading them takes most of the time of a short command, and so does unloading them: a command whose work is done ends
at once. A client (`tests.forked_client`) takes the place of `python`.
"""

import atexit
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

COMMANDS = (
    *("optpipe.train.loop", "optpipe.cli.console", "optpipe.plot.gantt", "transformers.modeling_utils"),
    *("solver.methods", "solver.searches", "ortools.sat.python.cp_model", "scipy.optimize", "pulp"),
    *("torch._dynamo", "torch.distributed.run"),
)
"""Modules that the command line needs. Every optimizer loads torch._dynamo when it is made."""
SERVICES = ("api.app", "api.analysis", "api.logging", "optpipe.export.launch", "solver.layout.fitting")
"""Modules that a service and its pool need. None of all these starts a thread: a fork would not have it."""
SCRIPTS = ("optpipe", "torchrun")
"""Scripts of the virtual environment that are forked as well."""


@contextmanager
def forking(
    *options: str, environment: Mapping[str, str] | None = None, loaded: Sequence[str] = COMMANDS
) -> Iterator[Path]:
    """A folder with `python` and SCRIPTS for a PATH, whose processes one with these options of Python forks.

    It has loaded these modules.

    torchrun starts its ranks with the `python` that PYTHON_EXEC names.
    """
    root = Path(__file__).parents[1]
    with TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "server"
        code = f"from tests.forked import serve; serve({str(path)!r}, {loaded!r})"
        client = [sys.executable, "-I", "-S", str(root / "tests" / "forked_client.py"), str(path)]
        scripts = {script: [str(Path(sys.executable).parent / script)] for script in SCRIPTS}
        for command, first in ({"python": [], "python3": []} | scripts).items():
            (folder / command).write_text(f'#!/bin/sh\nexec {shlex.join([*client, *first])} "$@"\n')
            (folder / command).chmod(0o755)
        with subprocess.Popen(
            [sys.executable, "-P", *options, "-c", code],
            env=os.environ | {"PYTHONPATH": str(root)} | (environment or {}),
            stdin=subprocess.PIPE,
            start_new_session=True,
        ) as server:
            try:
                while not path.exists():
                    assert server.poll() is None, "the server of commands has ended"
                    time.sleep(0.05)
                yield folder
            finally:
                os.killpg(server.pid, signal.SIGKILL)


def serve(path: str, loaded: Sequence[str]) -> None:
    """Run commands until stdin ends, which it does with the tests; in each forked process, run one to its end."""
    for name in loaded:
        import_module(name)
    _load_kernels()
    # What a command starts is forked as well; as the client is its parent's child, it does not look for its parent.
    sys.executable = str(Path(path).with_name("python"))
    for name in ("solver.process.start", "solver.process"):
        import_module(name).end_with_parent = lambda parent_pid: None  # type: ignore[attr-defined]
    gc.freeze()  # or collecting garbage writes to, and so copies, every page that the processes share
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path + ".new")
        listening.listen(64)
        os.rename(path + ".new", path)  # a socket that is seen accepts connections
        while True:
            if sys.stdin in select.select([listening, sys.stdin], [], [])[0]:
                return
            connection, _ = listening.accept()
            while _ended_child():
                pass
            if not os.fork():
                listening.close()
                break
            connection.close()
    _answer(connection)


def _load_kernels() -> None:
    """Load those that time and place ops, and what any kernel needs: half a second for each process otherwise."""
    from instances import uniform
    from optpipe.verify import verify
    from solver.solve import solve

    for method in ("1f1b", "zb-auto", "ada-offload"):
        verify(solve(uniform(2, 2), method))


def _ended_child() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _answer(connection: socket.socket) -> None:
    """Run the command of a connection in a forked process, and send its exit code, minus a signal's number."""
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    request = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(pid)
        while ended not in select.select([connection, ended], [], [])[0]:
            number = connection.recv(1)
            os.kill(pid, number[0] if number else signal.SIGKILL)
        with suppress(BrokenPipeError):
            connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threads, torch = os.environ.get("OMP_NUM_THREADS"), sys.modules.get("torch")
    if threads and torch:
        torch.set_num_threads(int(threads))  # it has read the server's when it was loaded
    _end(_exit_code(request["arguments"]))


def _exit_code(arguments: list[str]) -> int:
    try:
        _python(arguments)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        raise
    return 0


def _end(code: int) -> None:
    """End as Python does, but for what it only frees, which would copy every page that the processes share."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # which says what is wrong with a stream
    os._exit(code & 0xFF)


def _python(arguments: list[str]) -> None:
    """Do what `python` does with the arguments."""
    match arguments:
        case ["-u", *rest]:
            _python(rest)
        case ["-W", action, *rest]:
            warnings.simplefilter(action)  # type: ignore[arg-type]
            _python(rest)
        case ["-P", "-m", module, *rest] | ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep) if arguments[0] == "-P" else [os.getcwd()]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-", *_]:
            _program(sys.stdin.read(), arguments)
        case ["-c", code, *rest]:
            _program(code, ["-c", *rest])
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")


def _program(code: str, arguments: list[str]) -> None:
    sys.argv = arguments
    sys.path.insert(0, "")
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
