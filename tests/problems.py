"""Problems for tests: the instances that are measured or have known optima, uniform ones, and random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from optpipe.problem import Problem

INSTANCES = Path(__file__).parent / "instances"
REFERENCE: dict[str, Any] = json.loads((INSTANCES / "reference.json").read_text())


def instance(name: str) -> Problem:
    """A problem of tests/instances by name."""
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
    """p devices with equal stages (F, B and W of 10 us each); `offload` for every stage but the last."""
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


HALF = {"bytes": 1, "offload_us": 10, "reload_us": 10}
"""Half of the activation of `uniform` may leave, each way as long as an op."""
WHOLE = {"bytes": 2, "offload_us": 10, "reload_us": 10}

KNOWN_OPTIMA = {
    "makespan": (uniform(4, 8, budget=8), 282),
    "device_span": (uniform(4, 8, budget=16, objective="device_span"), 242),
    "offload": (uniform(4, 8, budget=4, offload=HALF), 356),
}
"""Problems with their proved optimum in us, which every exact method must find."""


@st.composite
def problems(draw: st.DrawFn, max_devices: int = 3, max_stages: int = 4, max_microbatches: int = 3) -> Problem:
    """Random problems: unequal stages, any placement, tight and loose budgets, workspace, offload, every channel."""
    count = draw(st.integers(1, max_devices))
    placement = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=max_stages))
    times = st.one_of(st.integers(1, 9), st.sampled_from([0.5, 2.25, 0.1]), st.integers(0, 2))
    stages = [draw(_stages(device, times)) for device in placement]
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": draw(st.integers(1, max_microbatches)),
            "objective": draw(st.sampled_from(["makespan", "device_span"])),
            "transfer_us": draw(_transfers(len(stages) - 1)),
            "devices": [{"memory_bytes": draw(st.none() | st.integers(2, 30))} for _ in range(count)],
            "stages": stages,
            "copy_channels": draw(_channels(count)),
            "host_memory_bytes": draw(st.none() | st.integers(0, 12)),
        }
    )


@st.composite
def _stages(draw: st.DrawFn, device: int, times: st.SearchStrategy[float]) -> dict[str, Any]:
    activation = draw(st.integers(0, 6))
    offload = {
        "bytes": draw(st.integers(0, activation)),
        "offload_us": draw(times),
        "reload_us": draw(times),
    }
    workspace = {kind: draw(st.integers(0, 2)) for kind in ("F", "B", "W", "BW")}
    return {
        "device": device,
        "forward_us": draw(times),
        "backward_input_us": draw(times),
        "backward_weight_us": draw(times),
        "activation_bytes": activation,
        "backward_weight_bytes": draw(st.integers(0, 7)),
        "workspace_bytes": workspace if draw(st.booleans()) else {},
        "offload": offload if draw(st.booleans()) else None,
    }


@st.composite
def _transfers(draw: st.DrawFn, boundaries: int) -> Any:
    one = st.integers(0, 3) | st.fixed_dictionaries({"forward": st.integers(0, 3), "backward": st.integers(0, 3)})
    return draw(one | st.lists(one, min_size=boundaries, max_size=boundaries))


@st.composite
def _channels(draw: st.DrawFn, devices: int) -> dict[str, Any]:
    group = draw(st.sampled_from([[], [[0]], [list(range(devices))]]))
    return {"duplex": draw(st.booleans()), "shared_by": group}
