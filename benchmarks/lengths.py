"""Order of microbatches whose lengths change with every step: what is lost without one, and what finding it takes.

`python -m benchmarks.lengths lengths --size quick` prints the table.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import thread_time
from typing import NamedTuple

import numpy as np

from benchmarks.markdown import machine, table
from benchmarks.section import Section, Size, main
from instances import uniform
from optpipe.assignment import CHANGES, Places
from optpipe.compile import compile_schedule
from optpipe.compile.memory import memory_steps
from optpipe.problem import Floats, Problem
from optpipe.stage import UnitFactors
from solver.solve import solve

NAME = "lengths"
COMMAND = f"python -m benchmarks.lengths {NAME}"
DEVICES, MICROBATCHES = 8, 64
BUDGETS = (None, 1.5)
"""Memory of a device, in multiples of what 1F1B holds of microbatches of mean length."""
STEPS = {"quick": 3, "full": 40}
LENGTHS = {"log-normal": (1.0, 0.6), "bimodal": (0.25, 4.0)}


class Loss(NamedTuple):
    """Medians over steps: bubbles in the given order, the best likely one and the one found; processor seconds."""

    given: float
    likely: float
    found: float
    median_s: float
    longest_s: float


def lengths(name: str, rng: np.random.Generator) -> Floats:
    """Lengths of a step's microbatches as multiples of the mean."""
    if name == "log-normal":
        drawn = np.exp(rng.normal(0, LENGTHS[name][1], MICROBATCHES))
    else:
        drawn = np.where(rng.random(MICROBATCHES) < 0.2, LENGTHS[name][1], LENGTHS[name][0])
    return np.asarray(drawn / drawn.mean())


def measure(method: str, name: str, budget: float | None, steps: int) -> Loss:
    """Put the microbatches of so many steps in order under a published schedule; times and bytes are as the lengths."""
    alike = uniform(DEVICES, MICROBATCHES)
    stages = [stage | {"forward_us": 1000, "backward_input_us": 1000} for stage in alike.to_data()["stages"]]
    stages = [stage | {"backward_weight_us": 1000, "activation_bytes": 10**6} for stage in stages]
    memory = None if budget is None else round(budget * DEVICES * 10**6)
    problem = Problem.from_data(alike.to_data() | {"stages": stages, "devices": [{"memory_bytes": memory}] * DEVICES})
    schedule = solve(problem, method)
    places = Places(problem, schedule.orders, memory_steps(compile_schedule(schedule), problem))
    rng, losses, seconds = np.random.default_rng(0), [], []
    places.assign(np.ones((3, MICROBATCHES)), 1)  # compiles, or loads what is compiled
    for _ in range(steps):
        drawn = lengths(name, rng)
        factors, work_us = np.array([drawn] * len(UnitFactors._fields)), 3000 * drawn.sum()
        begin = thread_time()
        found = places.assign(factors)
        seconds.append(thread_time() - begin)
        orders = range(MICROBATCHES), places.assign(factors, 0), found
        losses.append([1 - work_us / places.value_us(factors, order) for order in orders])
    given, likely, best = np.median(losses, axis=0).tolist()
    return Loss(given, likely, best, median(seconds), max(seconds))


def _measure(size: Size, _: Path) -> str:
    head = ["schedule", "lengths", "memory", "as given", "likely order", "order found", "ms", "ms at most"]
    rows = []
    for method in ("1f1b", "zb-h1"):
        for name in LENGTHS:
            for budget in BUDGETS:
                loss = measure(method, name, budget, STEPS[size])
                bubbles = [f"{100 * bubble:.1f} %" for bubble in loss[:3]]
                seconds = [f"{1000 * value:.0f}" for value in (loss.median_s, loss.longest_s)]
                rows.append([method, name, f"{budget:g}" if budget else "no limit", *bubbles, *seconds])
    return f"{table(head, rows, text_columns=2)}\n\n`{COMMAND} --size {size}`: {machine()}; {STEPS[size]} steps."


SECTIONS = (
    Section(
        NAME,
        "Other lengths in every step",
        f"{DEVICES} devices, {MICROBATCHES} microbatches of other lengths in each step: log-normal (deviation of the "
        "logarithm 0.6) or a fifth of them sixteen times as long as the others; times and activations in proportion. "
        f"Bubbles in the order given, in the best of the likely orders, and after {CHANGES} changes for each "
        "microbatch, medians over the steps; and the milliseconds of a processor that finding it takes between two "
        "steps. Memory: of a device, in multiples of what 1F1B needs for microbatches of the mean length.",
        COMMAND,
        _measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
