"""Another process dies outside a step: whatever this one then exchanges ends with one error that says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from optpipe.errors import CheckpointError, RunFailedError, TrainingError
from optpipe.profile.transfers import measure_transfers
from optpipe.runtime import MessageSpec
from optpipe.runtime.trace_clock import align_clocks
from optpipe.train import OnlineConfig
from optpipe.train.checkpoints.together import together
from optpipe.train.launch import Launch, launched
from optpipe.train.online.first import _from_rank_0
from tests.optpipe.runtime.schedules import one_f_one_b

TIMEOUT_SECONDS = 120
"""For a process to import torch on a busy machine."""

DYING = f"""
import os, signal
from optpipe.train.launch import launched
with launched(2, {TIMEOUT_SECONDS}) as launch:
    launch.gather("here")
    os.kill(os.getpid(), signal.SIGKILL)
"""
ENDED = r" did not come: .*Maybe another process has ended: see what it printed\.$"


def _rank_of_two(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """What torchrun tells a process of where it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1 of two, which dies after the first exchange; the test is rank 0."""
    _rank_of_two(monkeypatch, 0)
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", DYING], env=environment) as process:
        yield process
        process.kill()


def _bereft(launch: Launch, other: subprocess.Popen[bytes]) -> None:
    assert launch.gather("here") == ["here", "here"]
    assert other.wait(TIMEOUT_SECONDS) == -signal.SIGKILL


def _unreadable() -> None:
    raise CheckpointError("the file is damaged.")


EXCHANGES: dict[str, Callable[[Launch], object]] = {
    "gather": lambda launch: launch.gather(0),
    "gather_pipeline": lambda launch: launch.gather_pipeline(0),
    "broadcast": lambda launch: launch.broadcast(0),
    "sum": lambda launch: launch.sum(torch.ones(1)),
    "together": lambda launch: together(launch, lambda: 0),
    "clocks": lambda launch: align_clocks(),
    "transfers": lambda launch: measure_transfers([0, 1], [MessageSpec((2,), torch.float32)], torch.device("cpu")),
}


def _each_fails(other: subprocess.Popen[bytes]) -> None:
    with launched(2, TIMEOUT_SECONDS) as launch:
        _bereft(launch, other)
        for exchange in EXCHANGES.values():
            with pytest.raises(RunFailedError, match=ENDED):
                exchange(launch)


def _errors_on_their_way(other: subprocess.Popen[bytes]) -> None:
    with launched(2, TIMEOUT_SECONDS) as launch:
        _bereft(launch, other)
        with pytest.raises(RunFailedError, match=r"^the file is damaged\. Then what all processes .*" + ENDED):
            together(launch, _unreadable)
        with pytest.raises(TrainingError, match="no solver was given"):
            _from_rank_0(OnlineConfig(), one_f_one_b(2, 2).problem, 0, launch, None, lambda: False)
        raise ZeroDivisionError


@pytest.mark.torchrun
def test_every_exchange_and_the_exit_say_that_another_process_has_ended(other: subprocess.Popen[bytes]) -> None:
    with pytest.raises(RunFailedError, match="the end of all processes" + ENDED):
        _each_fails(other)


@pytest.mark.torchrun
def test_an_error_on_its_way_is_not_hidden_by_those_that_follow_from_it(other: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ZeroDivisionError):
        _errors_on_their_way(other)


def test_processes_that_never_come_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 looks for a rank 0 that is not there."""
    _rank_of_two(monkeypatch, 1)
    with pytest.raises(RunFailedError, match=r"the connections between all processes" + ENDED), launched(2, 1):
        pass
