"""The verifier, loaded before anybody waits for it: in the parent while the child starts, and in the child."""

from __future__ import annotations

from optpipe.orders import Op, Orders
from optpipe.problem import Problem


def load_verifier() -> None:
    """Load what times and verifies schedules, compiled kernel included, by finishing the smallest one there is."""
    from solver.finish import finish  # most of what is slow

    stage = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 1,
            "devices": [{"memory_bytes": None}],
            "stages": [stage | {"activation_bytes": 0, "backward_weight_bytes": 0}],
        }
    )
    finish(problem, Orders.of_compute([[Op(kind, 0, 0) for kind in "FBW"]]), 0.0, "", 0.0)
