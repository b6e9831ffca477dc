"""Which device this process trains on: a GPU of its own where there is one, otherwise the CPU."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from optpipe.errors import TrainingError
from optpipe.train.config import DeviceChoice

CPU = torch.device("cpu")


class Place(NamedTuple):
    """This process among those of its host, counted from 0."""

    local_rank: int = 0
    processes: int = 1


def own_place() -> Place:
    """As torchrun says; without it, one process alone."""
    return Place(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def choose_device(choice: DeviceChoice, gpus: int, place: Place) -> torch.device:
    """The device for a process on a host with so many GPUs: that of its local rank. "auto" is CUDA if there is any.

    Raises TrainingError where "cuda" finds no GPU, and where processes would have to share one.
    """
    if choice == "cpu" or (choice == "auto" and not gpus):
        return CPU
    if not gpus:
        raise TrainingError(
            "device is 'cuda' but torch finds no CUDA device here. "
            "Maybe --device cpu, or a build of torch with CUDA and a driver for it."
        )
    if place.processes > gpus:
        raise TrainingError(
            f"torchrun started {place.processes} processes on this host but it has {gpus} CUDA device(s), and each "
            "needs its own. Maybe --device cpu, or more hosts, or leave torchrun out to run all devices on one GPU."
        )
    return torch.device("cuda", place.local_rank)


def own_device(choice: DeviceChoice) -> torch.device:
    """The device of this process."""
    return choose_device(choice, torch.cuda.device_count() if torch.cuda.is_available() else 0, own_place())


def hardware_name(device: torch.device, machine: str) -> str:
    """The GPU's name, or the CPU's kind, which is `machine`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine
