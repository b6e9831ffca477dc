"""1F1B with every activation recomputed: within the backward, or ahead of it.

With m microbatches on p equal stages of forward F, recomputation C and fused backward BW, and no transfers, the first
takes ``(m + p - 1)(F + C + BW)``, as `torch.utils.checkpoint` in each stage does. The second lets C run while the
gradient is coming (Mario, PPoPP 2025; MindSpeed's recompute-in-advance): ``m (F + C + BW) + (p - 1)(F + BW)`` in
the same memory, stage i from 0 holding ``p - i`` times what is kept, and once what one recomputation makes.
"""

from __future__ import annotations

from optpipe.errors import MethodError
from optpipe.ops import Orders
from optpipe.problem import Problem
from solver.by_stage import ByStage
from solver.published.one_stage import one_f_one_b
from solver.published.passes import require_one_stage_a_device
from solver.variants import variants


def one_f_one_b_recompute(problem: Problem) -> Orders:
    """1F1B that recomputes after the gradient has come. Raises MethodError on placement or modes."""
    return _recomputed(problem, "1f1b-recompute", inside=True)


def one_f_one_b_recompute_ahead(problem: Problem) -> Orders:
    """1F1B that recomputes before the gradient comes. Raises MethodError on placement or modes."""
    return _recomputed(problem, "1f1b-recompute-ahead", inside=False)


def _recomputed(problem: Problem, name: str, *, inside: bool) -> Orders:
    require_one_stage_a_device(problem, name)
    chosen = []
    for s, stage in enumerate(problem.stages):
        able = [
            variant
            for variant in variants(stage)
            if variant.mode.recomputes and variant.inside == inside and not variant.mode.offload
        ]
        if not able:
            needed = "kept_bytes below activation_bytes, no offload" + (" and segment_bytes" if inside else "")
            raise MethodError(
                f"{name} needs a mode on every stage with {needed}; stages[{s}].modes has none. "
                f"Maybe use {'1f1b-recompute-ahead' if inside else 'cp-sat, which recomputes where it pays'}."
            )
        chosen.append(min(able, key=lambda variant: variant.mode.kept_bytes))
    # The order of 1F1B, in which times and sizes count for nothing: those of the plain problem may exceed its limits.
    orders = ByStage(problem, chosen).with_modes(one_f_one_b(problem))
    assert orders is not None, "without copies every order has its modes"
    return orders
