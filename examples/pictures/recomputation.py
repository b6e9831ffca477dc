"""Kept or recomputed (docs/concepts/recomputation.md)."""

from __future__ import annotations

from examples.pictures.pipelines import GIB, MS, optimal_orders, optimum, pipeline
from examples.pictures.sheet import Strip, figures_text, sheet
from optpipe.plot.panel import Panel
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.by_stage import ByStage
from solver.variants import variants

BUDGET_GIB = 2
CHOICES = {"Every microbatch is recomputed": (1, 1, 1, 1), "One choice a stage": (1, 1, 0, 0)}
"""Variant of each stage: 0 keeps, 1 recomputes ahead of the backward."""


def recomputing() -> Problem:
    """Build the pipeline of the offload page; of an activation a tenth may stay, and the rest be made anew in 1 ms."""
    data = pipeline(8, BUDGET_GIB).to_data()
    for stage in data["stages"]:
        stage["modes"] = [{"name": "full", "kept_bytes": GIB // 10, "recompute_us": MS}]
    return Problem.from_data(data)


def by_choice() -> Panel:
    """Draw the best schedules with nothing recomputed, with uniform choices, and with a free one."""
    problem, kept = recomputing(), optimum(pipeline(8, BUDGET_GIB))
    strips = [Strip(f"Nothing is recomputed: {figures_text(kept)}", kept, memory=(0,))]
    for words, numbers in CHOICES.items():
        chosen = [variants(stage)[number] for stage, number in zip(problem.stages, numbers, strict=True)]
        by_stage = ByStage(problem, chosen)
        orders = by_stage.with_modes(optimal_orders(by_stage.plain))
        assert orders is not None
        timed = simulate(problem, orders)
        strips.append(Strip(f"{words}: {figures_text(timed)}", timed, memory=(0,)))
    free = optimum(problem)
    strips.append(Strip(f"Decided for each microbatch: {figures_text(free)}", free, memory=(0,)))
    return sheet(strips)[0]


PICTURES = {"recomputation": by_choice}
