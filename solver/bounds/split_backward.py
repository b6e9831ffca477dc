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
    return not any(fusing_may_help(problem, s) for s in range(len(problem.stages)))


def fusing_may_help(problem: Problem, s: int) -> bool:
    """Whether BW of a stage may keep a budget that B and W of it do not: on the other stages all may be split."""
    stage = problem.stages[s]
    work, grows = stage.workspace_bytes, stage.backward_weight_bytes - stage.activation_bytes
    return max(work.B, grows, grows + work.W) > work.BW and problem.devices[stage.device].memory_bytes is not None
