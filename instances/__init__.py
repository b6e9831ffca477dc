"""Problems with known values: the files of this folder, and uniform pipelines made from a few numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optpipe.problem import Problem

INSTANCES = Path(__file__).parent
REFERENCE: dict[str, Any] = json.loads((INSTANCES / "reference.json").read_text())
"""Public and proved values of the instances, by name."""

HALF = {"bytes": 1, "offload_us": 10, "reload_us": 10}
"""Offload of half the activation of a `uniform` stage; each copy takes as long as an op."""
WHOLE = {"bytes": 2, "offload_us": 10, "reload_us": 10}
"""Offload of the whole activation, in the same time."""


def instance(name: str) -> Problem:
    """Load the instance `name`. Raises InputError where there is none."""
    return Problem.load(INSTANCES / f"{name}.json")


def uniform(
    p: int,
    m: int,
    *,
    objective: str = "makespan",
    transfer_us: float = 1,
    activation_bytes: int = 2,
    backward_weight_bytes: int = 1,
    budget: int | None = None,
    offload: dict[str, Any] | None = None,
    v_shape: bool = False,
    **more: Any,
) -> Problem:
    """Build a problem of p devices with equal stages (F, B and W of 10 us each) and m microbatches.

    `budget` is the memory of each device in bytes, `offload` holds for every stage but the last, `more` are further
    fields of the problem.
    """
    devices = [*range(p), *reversed(range(p))] if v_shape else list(range(p))
    stages = [
        {
            "device": device,
            "forward_us": 10,
            "backward_input_us": 10,
            "backward_weight_us": 10,
            "activation_bytes": activation_bytes,
            "backward_weight_bytes": backward_weight_bytes,
            "offload": offload if s < len(devices) - 1 else None,
        }
        for s, device in enumerate(devices)
    ]
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": m,
            "objective": objective,
            "transfer_us": transfer_us,
            "devices": [{"memory_bytes": budget}] * p,
            "stages": stages,
            **more,
        }
    )
