"""Memory under any timing, and waits (docs/concepts/any-timing.md)."""

from __future__ import annotations

from dataclasses import replace

from examples.pictures.pipelines import optimal_orders, pipeline
from examples.pictures.sheet import Strip, sheet
from optpipe.plot.panel import Panel
from optpipe.problem import Problem
from optpipe.simulate import simulate

SLOWER, IN_WORDS = 2, "twice"
"""Slowdown of every offload over its planned time."""


def late_copies() -> Panel:
    """Draw a schedule as planned, and with slow offloads: without and with its waits."""
    problem = pipeline(8, 2, k=2 / 3)
    orders, late = optimal_orders(problem), with_slow_offloads(problem)
    runs = (
        ("As planned", simulate(problem, orders)),
        (f"Every offload {IN_WORDS} as long, order alone", simulate(late, replace(orders, waits={}))),
        (f"Every offload {IN_WORDS} as long, order and waits", simulate(late, orders)),
    )
    return sheet([Strip(f"{words}: {timed.value_us / 1000:g} ms", timed, (0,), (0,)) for words, timed in runs])[0]


def with_slow_offloads(problem: Problem) -> Problem:
    """Copy a problem with slower offloads."""
    data = problem.to_data()
    for stage in data["stages"]:
        if stage.get("offload"):
            stage["offload"]["offload_us"] *= SLOWER
    return Problem.from_data(data)


PICTURES = {"late-copies": late_copies}
