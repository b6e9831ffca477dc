"""Runs a worker script under torchrun, one process a rank, over gloo on the loopback."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

TIMEOUT_SECONDS = 300
"""Enough for a busy machine: alone a run takes some seconds."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
"""Environment of processes that talk over gloo on this machine alone, and share its cores."""


def torchrun(
    commands: Path,
    worker: Path,
    processes: int,
    *arguments: str,
    timeout_seconds: float = TIMEOUT_SECONDS,
    restarts: int = 0,
) -> str:
    """Run the worker to its end on every rank and return what they printed on stdout.

    What they printed on stderr is shown where one of them fails or takes too long. All are started again, at most
    `restarts` times, when one of them ends otherwise.
    """
    with start(commands, worker, processes, *arguments, restarts=restarts) as launcher:
        try:
            output, errors = launcher.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            errors = end(launcher)
            raise TimeoutError(f"{worker.name} took more than {timeout_seconds} s:\n{errors}") from None
        except BaseException:
            end(launcher)
            raise
    assert launcher.returncode == 0, errors
    return output


def start(commands: Path, worker: Path, processes: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    """The launcher, in a session of its own; whoever starts it ends it. All is forked (`tests.forked`)."""
    command = [str(commands / "torchrun")]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}", str(worker), *arguments]
    # Else processes that are started again look for those of before: torchrun keeps their addresses in one store.
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHON_EXEC": str(commands / "python")}
    return subprocess.Popen(
        command,
        env=os.environ | LOOPBACK | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(launcher: subprocess.Popen[str]) -> str:
    """End the launcher and its ranks, which would otherwise go on alone; returns what they had printed."""
    launcher.send_signal(signal.SIGTERM)  # it passes it on to its ranks
    try:
        return launcher.communicate(timeout=40)[1]
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        return launcher.communicate()[1]
