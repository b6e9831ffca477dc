"""Whether bounds of schedules with split backwards hold for all schedules."""

from __future__ import annotations

from optpipe.problem import Problem


def split_backward_suffices(problem: Problem) -> bool:
    """Whether some optimum has no fused backward, so that what is proved of split ones holds for all.

    B with W right behind it does all that BW does, no later, and hands its gradient over earlier. The microbatches stay
    in order: a BW counts as a B (docs/adr/0006), and the W of a stage may be put in order among themselves, since all
    of them are alike. Only where a budget counts and BW needs less memory beside the activation than B and W do,
    fusing can be worth it.
    """
    for stage in problem.stages:
        work, grows = stage.workspace_bytes, stage.backward_weight_bytes - stage.activation_bytes
        split = max(work.B, grows, grows + work.W)
        if split > work.BW and problem.devices[stage.device].memory_bytes is not None:
            return False
    return True
