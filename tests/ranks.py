"""Runs a worker script as the ranks of a run that talk over gloo on the loopback, without torchrun.

What a rank does is the same as under `tests.torchrun`, and it is there sooner: it is forked from a process that has
loaded torch, which otherwise each rank, and torchrun itself, does anew: most of the time of a short run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.torchrun import LOOPBACK, TIMEOUT_SECONDS


class Ended(NamedTuple):
    """Outcome of a rank: its exit code, minus a signal's number, and what it printed."""

    code: int
    out: str
    err: str


class RunRanks:
    """Runs ranks, one run at a time, forked by a server that the first run starts; see `ranks`."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def __call__(self, worker: Path, processes: int, *arguments: str) -> str:
        """Run the worker to its end on every rank and return what they printed on stdout.

        When one of them fails, the others are ended; what all printed on stderr is shown.
        """
        ended = self.each(worker, processes, *arguments, fail_together=True)
        assert not any(rank.code for rank in ended), "\n".join(f"{rank.code}: {rank.err}" for rank in ended)
        return "".join(rank.out for rank in ended)

    def each(
        self,
        worker: Path,
        processes: int,
        *arguments: str,
        fail_together: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> list[Ended]:
        """Each rank when all have ended. With `fail_together` those that are left when one has failed are killed."""
        with TemporaryDirectory() as name:
            files = [(Path(name) / f"{rank}.out", Path(name) / f"{rank}.err") for rank in range(processes)]
            port = str(_free_port())
            wanted = [
                {
                    "script": str(worker),
                    "arguments": arguments,
                    "environment": os.environ | LOOPBACK | _place(rank, processes, port),
                    "out": str(out),
                    "err": str(err),
                }
                for rank, (out, err) in enumerate(files)
            ]
            try:
                codes = self._codes(wanted, fail_together, time.monotonic() + timeout_seconds)
            except BaseException as error:
                self.end()
                if isinstance(error, TimeoutError):
                    errors = "".join(err.read_text() for _, err in files if err.exists())
                    raise TimeoutError(f"{worker.name} took more than {timeout_seconds} s:\n{errors}") from None
                raise
            return [
                Ended(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, files, strict=True)
            ]

    def end(self) -> None:
        """End the server, and the ranks that still run."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None

    def _codes(self, wanted: list[dict[str, Any]], fail_together: bool, until: float) -> list[int]:
        """Start the processes, and wait for the exit code of each."""
        if self._server is None:
            self._server = _start_server()
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(wanted).encode() + b"\n")
        self._server.stdin.flush()
        pids: list[int] = _told(self._server, until)
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            pid, code = _told(self._server, until)
            codes[pid] = code
            if code and fail_together:
                _kill(set(pids) - codes.keys())
        return [codes[pid] for pid in pids]


@contextmanager
def ranks() -> Iterator[RunRanks]:
    """Context in which ranks can be run."""
    run = RunRanks()
    try:
        yield run
    finally:
        run.end()


def _start_server() -> subprocess.Popen[bytes]:
    """In a group of its own with all that it forks."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.rank_server"],
        env=os.environ | LOOPBACK,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _told(server: subprocess.Popen[bytes], until: float) -> Any:
    """The next line of the server."""
    assert server.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([server.stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
            raise TimeoutError
        byte = os.read(server.stdout.fileno(), 1)  # no more: what is buffered, select does not see
        assert byte, "the server of ranks has ended"
        line += byte
    return json.loads(line)


def _place(rank: int, processes: int, port: str) -> dict[str, str]:
    world = str(processes)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
