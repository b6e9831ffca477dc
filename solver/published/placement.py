"""What a published schedule asks of the placement."""

from __future__ import annotations

from optpipe.errors import MethodError
from optpipe.problem import Problem


def require_one_stage_a_device(problem: Problem, method: str) -> None:
    """Raise MethodError unless every device holds exactly one stage (in whichever order)."""
    for d, stages in enumerate(problem.stages_of):
        if len(stages) != 1:
            raise MethodError(
                f"{method} places one stage on each device, but device {d} has {len(stages)}. "
                "Maybe use zb-auto's relatives for V placement, or an exact method, which take any placement."
            )
