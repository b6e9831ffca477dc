"""Leftovers of killed tests: the next ones clear them away, and leave alone those of tests that still run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.postgresql import remove_abandoned, server_folder

KILLED = """
import sys
from api.jobs.embedded import embedded_postgresql
from tests.postgresql import server_folder
with server_folder() as folder, embedded_postgresql(folder):
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_killed_test_leaves_nothing_for_long() -> None:
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        server = psutil.Process(int((left / "postgresql" / "postmaster.pid").read_text().split()[0]))
        remove_abandoned(left.parent)
        assert server.is_running()  # its owner lives
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    assert server.is_running()
    with server_folder() as mine:
        assert not left.exists()
        assert not server.is_running()
        remove_abandoned(mine.parent)
        assert mine.exists()
