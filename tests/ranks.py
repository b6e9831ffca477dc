"""Runs a worker script as the ranks of a run that talk over gloo on the loopback, without torchrun.

What a rank does is the same as under `tests.torchrun`, and it is there sooner: it is forked from a process that has
loaded torch, which otherwise each rank, and torchrun itself, does anew: most of the time of a short run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.torchrun import LOOPBACK, TIMEOUT_SECONDS

TRAINING = Path(__file__).parent / "optpipe" / "train" / "ranks_worker.py"


class Ended(NamedTuple):
    """Outcome of a rank: its exit code, minus a signal's number, and what it printed."""

    code: int
    out: str
    err: str


class RunRanks:
    """Runs ranks, forked by the `python` in a folder of `tests.forked`."""

    def __init__(self, commands: Path) -> None:
        self.commands = commands

    def __call__(self, worker: Path, processes: int, *arguments: str) -> str:
        """Run the worker to its end on every rank and return what they printed on stdout.

        When one of them fails, the others are ended; what all printed on stderr is shown.
        """
        ended = self.each(worker, processes, *arguments, fail_together=True)
        assert not any(rank.code for rank in ended), "\n".join(f"{rank.code}: {rank.err}" for rank in ended)
        return "".join(rank.out for rank in ended)

    def train(self, module: str, processes: int, cases: Iterable[str]) -> list[dict[str, Any]]:
        """Train the cases of a module of tests; the findings of each rank (`tests.optpipe.train.ranks_worker`)."""
        with TemporaryDirectory() as folder:
            self(TRAINING, processes, folder, module, *cases)
            return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(processes)]

    def each(
        self,
        worker: Path,
        processes: int,
        *arguments: str,
        fail_together: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> list[Ended]:
        """Each rank when all have ended. With `fail_together` those that are left when one has failed are killed."""
        command = [str(self.commands / "python"), str(worker), *arguments]
        port, until = str(_free_port()), time.monotonic() + timeout_seconds
        with TemporaryDirectory() as name, ExitStack() as stack:
            files = [[Path(name) / f"{rank}.{stream}" for stream in ("out", "err")] for rank in range(processes)]
            ranks = []
            for rank, (out, err) in enumerate(files):
                streams = {"stdout": stack.enter_context(out.open("wb")), "stderr": stack.enter_context(err.open("wb"))}
                own = os.environ | LOOPBACK | _place(rank, processes, port)
                ranks.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, **streams))
                stack.callback(_kill, ranks[-1])
            while None in (codes := [rank.poll() for rank in ranks]):
                if fail_together and any(codes):
                    for rank in ranks:
                        rank.kill()
                if time.monotonic() > until:
                    errors = "".join(err.read_text() for _, err in files)
                    raise TimeoutError(f"{worker.name} took more than {timeout_seconds} s:\n{errors}")
                time.sleep(0.01)
            return [
                Ended(code, *(path.read_text() for path in paths)) for code, paths in zip(codes, files, strict=True)
            ]


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _place(rank: int, processes: int, port: str) -> dict[str, str]:
    world = str(processes)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
