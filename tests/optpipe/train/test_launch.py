"""Another process dies outside a step: whatever this one then exchanges ends with one error that says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from instances.schedules import one_f_one_b
from optpipe.errors import CheckpointError, RunFailedError, TrainingError
from optpipe.profile.transfers import measure_transfers
from optpipe.runtime import MessageSpec
from optpipe.runtime.trace_step import align_clocks
from optpipe.train import ModelConfig, OnlineConfig, TrainingConfig, train
from optpipe.train.config import DeviceChoice
from optpipe.train.launch import CPU, Launch, Rank, backends, choose_device, gather_or_raise, launched, own_rank
from optpipe.train.resolve.initial import _from_rank_0

TIMEOUT_SECONDS = 120
"""For a process to begin on a busy machine."""

DYING = f"""
import os, signal
from optpipe.train.launch import launched
with launched(2, {TIMEOUT_SECONDS}) as launch:
    launch.gather("here")
    os.kill(os.getpid(), signal.SIGKILL)
"""
ENDED = r" did not come: .*Maybe another process has ended: see what it printed\.$"


def _rank_of_two(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Environment that torchrun gives to a rank of two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, forked: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1 of two, which dies after the first exchange; the test is rank 0."""
    _rank_of_two(monkeypatch, 0)
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([forked / "python", "-c", DYING], env=environment) as process:
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
    "together": lambda launch: gather_or_raise(launch, lambda: 0),
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
            gather_or_raise(launch, _unreadable)
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


@pytest.mark.parametrize(
    ("choice", "gpus", "place", "expected"),
    [
        ("auto", 0, Rank(), "cpu"),
        ("auto", 1, Rank(), "cuda:0"),
        ("auto", 4, Rank(3, 4), "cuda:3"),
        ("cpu", 4, Rank(3, 4), "cpu"),
        ("cpu", 0, Rank(3, 4), "cpu"),
        ("cuda", 1, Rank(), "cuda:0"),
        ("cuda", 8, Rank(2, 4), "cuda:2"),
    ],
)
def test_each_process_has_its_own(choice: DeviceChoice, gpus: int, place: Rank, expected: str) -> None:
    assert choose_device(choice, gpus, place) == torch.device(expected)


@pytest.mark.parametrize("place", [Rank(), Rank(0, 2)])
def test_cuda_that_is_not_there_is_refused(place: Rank) -> None:
    with pytest.raises(TrainingError, match=r"device is 'cuda' but torch finds no CUDA device here\. Maybe --device"):
        choose_device("cuda", 0, place)


@pytest.mark.parametrize("choice", ["auto", "cuda"])
@pytest.mark.parametrize("rank", range(3))
def test_processes_do_not_share_a_gpu(choice: DeviceChoice, rank: int) -> None:
    """Every one of them says so, not only those without."""
    with pytest.raises(TrainingError, match=r"started 3 processes on this host but it has 2 CUDA device.*Maybe"):
        choose_device(choice, 2, Rank(rank, 3))


def test_torchrun_says_where_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert own_rank() == Rank(0, 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert own_rank() == Rank(2, 4)


def test_gpus_keep_gloo_for_what_is_gathered_on_the_host() -> None:
    assert backends(CPU) == "gloo"
    assert backends(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_training_asks_for_the_device_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="no CUDA device"):
        train(TrainingConfig(one_f_one_b(1, 1), ModelConfig("tiny"), steps=1, device="cuda"))
    assert train(TrainingConfig(one_f_one_b(1, 1), ModelConfig("tiny"), steps=1, device="auto")).losses
