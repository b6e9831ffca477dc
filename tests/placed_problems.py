"""Random problems on the placements that published schedules are made for, where memory is scarce and much may leave.

`tests.problems.problems` draws any placement and budget: few of its problems suit a schedule that wants a V or chunks,
and in hardly any does a budget ask for an offload. Here a good part of them does.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from optpipe.problem import Problem


@st.composite
def placed_problems(draw: st.DrawFn, most_microbatches: int = 6) -> Problem:
    """Unequal stages along a line, in chunks, along a V or anywhere, with budgets from hardly enough to ample."""
    placement = draw(_placements())
    devices = max(placement) + 1
    microbatches = draw(st.integers(1, most_microbatches))
    stages = [_stage(draw, device) for device in placement]
    scarce = draw(_shares(devices))
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "objective": draw(st.sampled_from(["makespan", "device_span"])),
            "transfer_us": draw(st.integers(0, 3)),
            "devices": [{"memory_bytes": _budget(scarce[d], stages, d, microbatches)} for d in range(devices)],
            "stages": stages,
            "copy_channels": draw(_channels(devices)),
            "host_memory_bytes": draw(st.none() | st.integers(0, 60)),
        }
    )


@st.composite
def _placements(draw: st.DrawFn) -> list[int]:
    """The device of each stage; devices are numbered along the pipeline or not."""
    p = draw(st.sampled_from([1, 2, 2, 3, 3, 4]))
    chunks = draw(st.integers(2, 3 if p < 4 else 2))
    anywhere = draw(st.permutations([*range(p), *draw(st.lists(st.integers(0, p - 1), max_size=3))]))
    line, v = list(range(p)), [*range(p), *reversed(range(p))]
    chosen: list[int] = draw(st.sampled_from([line, line * chunks, v, anywhere]))
    return chosen


def _shares(devices: int) -> st.SearchStrategy[list[float]]:
    """Each device's share of the memory for everything: the same, or each its own."""
    share = st.sampled_from([0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.0])
    return share.map(lambda same: [same] * devices) | st.lists(share, min_size=devices, max_size=devices)


def _stage(draw: st.DrawFn, device: int) -> dict[str, Any]:
    times = st.one_of(st.integers(1, 9), st.sampled_from([0, 0.5, 2.25]))
    held = draw(st.integers(1, 6))
    copied = {"bytes": draw(st.integers(1, held)), "offload_us": draw(times), "reload_us": draw(times)}
    workspace = {kind: draw(st.integers(0, 1)) for kind in ("F", "B", "W", "BW")}
    return {
        "device": device,
        **{name: draw(times) for name in ("forward_us", "backward_input_us", "backward_weight_us")},
        "activation_bytes": held,
        "backward_weight_bytes": draw(st.integers(0, held + 1)),
        "workspace_bytes": workspace if draw(st.booleans()) else {},
        "offload": copied if draw(st.integers(0, 4)) else None,
    }


def _budget(share: float, stages: list[dict[str, Any]], device: int, microbatches: int) -> int | None:
    """Between room for the largest activation alone and for all of them; no limit where that is all the same."""
    held = [stage["activation_bytes"] for stage in stages if stage["device"] == device]
    if not held or share == 1.0:
        return None
    least, most = max(held) + 2, microbatches * sum(held) + 2
    return least + round(share * (most - least))


def _channels(devices: int) -> st.SearchStrategy[dict[str, Any]]:
    pairs = [[d, d + 1] for d in range(0, devices - 1, 2)]
    groups = st.sampled_from([[], pairs, [list(range(devices))]])
    return st.fixed_dictionaries({"duplex": st.booleans(), "shared_by": groups})
