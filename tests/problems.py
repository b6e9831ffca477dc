"""Problems for tests: the instances, uniform ones, those with known optima, and random ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from instances import HALF, INSTANCES, REFERENCE, WHOLE, instance, uniform
from optpipe.problem import Problem

__all__ = ["HALF", "INSTANCES", "KNOWN_OPTIMA", "REFERENCE", "WHOLE", "instance", "problems", "uniform"]

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
