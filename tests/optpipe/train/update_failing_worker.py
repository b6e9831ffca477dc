"""Trains optimistically as one of several processes, of which rank 1 fails within a step.

Usage: update_failing_worker.py HOW, where HOW is killed, error or interrupt; rank, world and address are in the
environment. Each process prints the error that it ends with.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from optpipe.errors import RunFailedError, TrainingError
from optpipe.train.launch import launched
from tests.optpipe.train.cases import M
from tests.optpipe.train.update_cases import config_of, noisy_model, schedules

TIMEOUT_SECONDS = 30


def broken() -> None:
    raise ValueError("the layer broke")


WAYS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "error": broken,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
}


def main(how: str) -> None:
    torch.set_num_threads(1)
    with launched(2, TIMEOUT_SECONDS) as launch:
        model = noisy_model(config_of(schedules()["V"], clip_norm=None), launch, optimistic=True, without_loss=[])
        if launch.rank == 1:
            fail_in_step_three(model.stages[1].module, WAYS[how])
        for step in range(6):
            model.step(model.task.batch(step))
        model.settle()


def fail_in_step_three(module: torch.nn.Module, fail: Callable[[], None]) -> None:
    """In its second forward there, which comes before the validation of step two's update."""
    calls = iter(range(1000))

    def hook(*_: Any) -> None:
        if next(calls) == 3 * M + 1:
            fail()

    module.register_forward_pre_hook(hook)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (TrainingError, RunFailedError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
