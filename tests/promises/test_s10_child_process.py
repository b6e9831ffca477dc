"""S10: the child process has no shell, its own session, its own temporary folder, and dies with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from solver.process import Child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

HANGS = """
from solver.limits import Limits
from solver.process import Child, solve_in_child
from solver.solution import Progress
from tests.promises.harness import PROBLEM

seen = 0

def tell(event):
    global seen
    seen += isinstance(event, Progress) and event.solution.method == "hang"
    if seen == 1:
        print(child.pid, flush=True)

with Child("tests.promises.stubborn") as child:
    solve_in_child(PROBLEM, "hang", Limits(60, workers=1), on_event=tell, child=child)
"""
WAITS = """
from time import sleep
from solver.process import Child

with Child() as child:
    print(child.pid, flush=True)
    sleep(60)
"""


@pytest.fixture
def child() -> Iterator[Child]:
    with Child() as child:
        yield child


def test_no_shell_and_its_own_session(child: Child) -> None:
    command = b""
    while not command:  # some kernels show it only when the program runs
        command = Path(f"/proc/{child.pid}/cmdline").read_bytes()
    assert command.split(b"\0")[0] == sys.executable.encode()
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
    assert os.getsid(child.pid) != os.getsid(0)


def test_its_own_folder_which_does_not_outlive_it(child: Child) -> None:
    environment = _environment(child.pid).split(b"\0")
    assert f"TMPDIR={child.folder}".encode() in environment
    assert os.readlink(f"/proc/{child.pid}/cwd") == os.path.realpath(child.folder)
    assert os.listdir(child.folder) == ["stderr.txt"]
    with child:
        pass
    assert not os.path.exists(child.folder)
    assert not _alive(child.pid)


def _environment(pid: int) -> bytes:
    """The environment of a process; it reads as empty while the process is still taking on its program."""
    for _ in range(200):
        if found := Path(f"/proc/{pid}/environ").read_bytes():
            return found
        time.sleep(0.05)
    raise AssertionError("the child never began")


@pytest.mark.parametrize("program", [HANGS, WAITS], ids=["solving", "waiting"])
def test_dies_with_its_parent(program: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _alive(pid)
        time.sleep(1)  # long enough for the solver that hangs to take Python's lock for good
        parent.kill()
    for _ in range(200):
        if not _alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the child outlived its parent")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
