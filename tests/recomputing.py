"""Problems whose stages have activation modes, and orders that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem

FULL = {"name": "full", "kept_bytes": 1, "recompute_us": 1, "forward_workspace_bytes": 0, "segment_bytes": 9}
"""All but the input is recomputed: layer by layer in the forward, whole in the backward."""

COPY = {"bytes": 4, "offload_us": 3, "reload_us": 2}
LEAVES = {"name": "half", "kept_bytes": 6, "recompute_us": 2, "workspace_bytes": 2, "segment_bytes": 3, "offload": COPY}
"""Part is recomputed, part of the rest leaves to the host."""


def recomputing(
    devices: int, microbatches: int, modes: Sequence[dict[str, Any]] = (FULL,), budget: int | None = None, **stage: Any
) -> Problem:
    """A linear pipeline of unit times in which each stage has these modes; `stage` replaces fields of the stages."""
    fields = {
        "forward_us": 1,
        "backward_input_us": 1,
        "backward_weight_us": 1,
        "activation_bytes": 10,
        "backward_weight_bytes": 0,
        "modes": list(modes),
    }
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "devices": [{"memory_bytes": budget}] * devices,
            "stages": [{"device": s, **fields, **stage} for s in range(devices)],
        }
    )


def one_f_one_b(problem: Problem, backward: Callable[[int, int], str]) -> Orders:
    """1F1B whose backward of stage s and microbatch i is written as `backward(s, i)`: kinds such as "C BW".

    Each stage that recomputes is in its first mode that does.
    """
    stages, microbatches = problem.stages, problem.microbatches
    modes = np.zeros((len(stages), microbatches), np.int64)
    devices = []
    for s, stage in enumerate(stages):
        ahead = min(len(stages) - s, microbatches)
        order = [Op("F", s, i) for i in range(ahead)]
        for i in range(microbatches):
            kinds = backward(s, i).split()
            if any(kind.startswith("C") for kind in kinds):
                modes[s, i] = next(n for n, mode in enumerate(stage.choices) if mode.recomputes)
            order += [Op(kind, s, i) for kind in kinds]
            order += [Op("F", s, i + ahead)] if i + ahead < microbatches else []
        devices.append(DeviceOrders(order))
    return Orders(devices, modes=modes)


def ops(text: str) -> list[Op]:
    """Ops by name."""
    return [Op.parse(name) for name in text.split()]
