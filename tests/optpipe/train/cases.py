"""What every way of running must show: linear and V placement, with offload and recomputation, both precisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from instances.schedules import one_f_one_b, v_wave
from optpipe.schedule import Schedule
from tests.recomputing import EXECUTABLE, random_executable

M = 4

MAX_ERROR = {"float32": 1e-5, "float64": 1e-12}


def everything(stages: int) -> list[tuple[int, int]]:
    """All microbatches of all stages but the last."""
    return [(s, i) for s in range(stages - 1) for i in range(M)]


def schedules(p: int) -> dict[str, Schedule]:
    """Schedules on p devices by placement, with and without offload; one with every activation mode."""
    return {
        "linear": one_f_one_b(p, M),
        "linear, offload": one_f_one_b(p, M, moved=everything(p)),
        "V": v_wave(p, M),
        "V, offload": v_wave(p, M, moved=everything(2 * p)),
        "recomputed": random_executable(range(p), M, seed=0, modes=EXECUTABLE),
    }


def decaying(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups of an optimizer in which biases and the weights of norms do not decay."""
    parameters = list(parameters)
    vectors = [p for p in parameters if p.dim() <= 1]
    return [{"params": [p for p in parameters if p.dim() > 1]}, {"params": vectors, "weight_decay": 0.0}]
