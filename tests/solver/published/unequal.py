"""Random problems on a given placement: unequal costs and sizes, no budget, so that every schedule must be valid."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from optpipe.problem import Problem


@st.composite
def unequal(draw: st.DrawFn, placement: Sequence[int], max_microbatches: int = 9) -> Problem:
    """Stages on the devices of `placement`, with 1 to `max_microbatches` microbatches."""
    time = st.sampled_from([0, 1, 2.5, 3, 10])
    stages = [
        {
            "device": device,
            "forward_us": draw(time),
            "backward_input_us": draw(time),
            "backward_weight_us": draw(time),
            "activation_bytes": draw(st.integers(0, 6)),
            "backward_weight_bytes": draw(st.integers(0, 7)),
        }
        for device in placement
    ]
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": draw(st.integers(1, max_microbatches)),
            "objective": draw(st.sampled_from(["makespan", "device_span"])),
            "transfer_us": draw(st.sampled_from([0, 1, 20])),
            "devices": [{"memory_bytes": None}] * (max(placement) + 1),
            "stages": stages,
        }
    )
