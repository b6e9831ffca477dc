"""A process that fails within an optimistic step: the others end too, with a message, in the time that is allowed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.optpipe.train.updates.failing_worker import TIMEOUT_SECONDS

WORKER = Path(__file__).parent / "failing_worker.py"
START_SECONDS = 120
"""For two processes to import torch on a busy machine."""


def start(how: str) -> list[subprocess.Popen[str]]:
    """The two processes, without torchrun, which would end one as soon as the other has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), how],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("how", "of_the_one"),
    [("killed", ""), ("error", "ValueError: the layer broke"), ("interrupt", "KeyboardInterrupt")],
)
def test_all_processes_end_with_a_message(how: str, of_the_one: str) -> None:
    processes = start(how)
    try:
        other, one = (process.communicate(timeout=START_SECONDS + TIMEOUT_SECONDS)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert of_the_one in one
    assert "TrainingError: " in other, other
    assert "Traceback" not in other
    assert [process.returncode for process in processes] == [1, -9 if how == "killed" else 1]
