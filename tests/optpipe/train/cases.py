"""Cases for every way of running: linear and V placement, with offload and recomputation, both precisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
from torch import nn

from instances.schedules import one_f_one_b, v_wave
from optpipe.schedule import Schedule
from optpipe.train.result import CheckResult
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


def assert_plain_step(check: CheckResult | Mapping[str, Any] | None, dtype: str = "float64") -> None:
    """A check, or its JSON: gradients and loss of the plain step, peaks as planned, and nothing left."""
    assert check is not None
    found = asdict(check) if isinstance(check, CheckResult) else check
    assert not found["failures"], found["failures"]
    assert found["max_gradient_error"] <= MAX_ERROR[dtype]
    assert found["loss_error"] <= MAX_ERROR[dtype]
    for device in found["devices"]:
        assert not any(device["live_bytes"])
        assert device["peak_bytes"] == pytest.approx(device["planned_peak_bytes"], rel=0.02)
