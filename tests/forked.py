"""A fork server for Python commands: it has loaded torch, what trains with it and the solvers, and forks for each.

Loading them takes most of the time of a short command. A client takes the place of `python`: it sends its arguments,
folder, environment and standard streams to the server, passes signals on, and ends as the command does; when it is
killed, the command is too. It runs as a script without site-packages, so that it starts at once.
"""

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
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

LOADED = ("optpipe.train.loop", "solver.solve", "torch._dynamo", "torch.distributed.run")
"""Every optimizer loads torch._dynamo when it is made. None of them starts a thread: a fork would not have it."""
SCRIPTS = ("optpipe", "torchrun")
"""Scripts of the virtual environment that are forked as well."""


@contextmanager
def forking(*options: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """A folder with `python` and SCRIPTS for a PATH, whose processes one with these options of Python forks.

    torchrun starts its ranks with the `python` that PYTHON_EXEC names.
    """
    root = Path(__file__).parents[1]
    with TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "server"
        code = f"from tests.forked import serve; serve({str(path)!r})"
        client = [sys.executable, "-I", "-S", __file__, str(path)]
        scripts = {script: [str(Path(sys.executable).parent / script)] for script in SCRIPTS}
        for command, first in ({"python": [], "python3": []} | scripts).items():
            (folder / command).write_text(f'#!/bin/sh\nexec {shlex.join([*client, *first])} "$@"\n')
            (folder / command).chmod(0o755)
        with subprocess.Popen(
            [sys.executable, "-P", *options, "-c", code],
            env=os.environ | {"PYTHONPATH": str(root)} | environment,
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


def client(server: str, arguments: list[str]) -> int:
    """Exit code of a command that the server runs."""
    request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(request)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
        code = int(connection.makefile().readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(path: str) -> None:
    """Run commands until stdin ends, which it does with the tests; in each forked process, run one to its end."""
    for name in LOADED:
        import_module(name)
    # What a command starts is forked as well; as the client is its parent's child, it does not look for its parent.
    sys.executable = str(Path(path).with_name("python"))
    import_module("solver.process.start").end_with_parent = lambda parent_pid: None  # type: ignore[attr-defined]
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
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))  # it has read the server's when it was loaded
    _python(request["arguments"])


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
        case ["-", *rest]:
            sys.argv = arguments
            sys.path.insert(0, "")
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.exit(client(sys.argv[1], sys.argv[2:]))
