"""A process computes on its own GPU, on the CPU, or says what is missing."""

from __future__ import annotations

import pytest
import torch

from optpipe.errors import TrainingError
from optpipe.train import ModelConfig, TrainingConfig, train
from optpipe.train.config import DeviceChoice
from optpipe.train.hardware import CPU, Place, choose_device, own_place
from optpipe.train.launch import backends
from tests.optpipe.runtime.schedules import one_f_one_b


@pytest.mark.parametrize(
    ("choice", "gpus", "place", "expected"),
    [
        ("auto", 0, Place(), "cpu"),
        ("auto", 1, Place(), "cuda:0"),
        ("auto", 4, Place(3, 4), "cuda:3"),
        ("cpu", 4, Place(3, 4), "cpu"),
        ("cpu", 0, Place(3, 4), "cpu"),
        ("cuda", 1, Place(), "cuda:0"),
        ("cuda", 8, Place(2, 4), "cuda:2"),
    ],
)
def test_each_process_has_its_own(choice: DeviceChoice, gpus: int, place: Place, expected: str) -> None:
    assert choose_device(choice, gpus, place) == torch.device(expected)


@pytest.mark.parametrize("place", [Place(), Place(0, 2)])
def test_cuda_that_is_not_there_is_refused(place: Place) -> None:
    with pytest.raises(TrainingError, match=r"device is 'cuda' but torch finds no CUDA device here\. Maybe --device"):
        choose_device("cuda", 0, place)


@pytest.mark.parametrize("choice", ["auto", "cuda"])
@pytest.mark.parametrize("rank", range(3))
def test_processes_do_not_share_a_gpu(choice: DeviceChoice, rank: int) -> None:
    """Every one of them says so, not only those without."""
    with pytest.raises(TrainingError, match=r"started 3 processes on this host but it has 2 CUDA device.*Maybe"):
        choose_device(choice, 2, Place(rank, 3))


def test_torchrun_says_where_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert own_place() == Place(0, 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert own_place() == Place(2, 4)


def test_gpus_keep_gloo_for_what_is_gathered_on_the_host() -> None:
    assert backends(CPU) == "gloo"
    assert backends(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_training_asks_for_the_device_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="no CUDA device"):
        train(TrainingConfig(one_f_one_b(1, 1), ModelConfig("tiny"), steps=1, device="cuda"))
    assert train(TrainingConfig(one_f_one_b(1, 1), ModelConfig("tiny"), steps=1, device="auto")).losses
