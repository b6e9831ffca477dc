"""Runs a worker script under torchrun, one process a rank, over gloo on the loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 120


def torchrun(worker: Path, processes: int, *arguments: str) -> None:
    """Run the worker to its end on every rank; what it printed is shown where one of them fails."""
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={processes}", str(worker), *arguments]
    loopback = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=loopback, timeout=TIMEOUT_SECONDS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
