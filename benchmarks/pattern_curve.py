"""Smallest period and bubble against memory on a V placement, between the memory of V-Min and of 1F1B.

`python -m benchmarks.pattern_curve pattern-curve --size quick` prints the table and draws the curve.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.curves import Mark, MemoryChart, MemoryLine, draw_bubble_over_memory
from benchmarks.markdown import Time, TimedRow, conditions, table
from benchmarks.pareto import CurvePoint, memory_curve, minimum_period_us, patterns_found, with_budget
from benchmarks.runs import run
from benchmarks.section import Section, Size, main, say
from instances import instance
from optpipe.problem import Problem
from optpipe.units import share_text
from solver.search.modulo.pattern import Pattern

NAME = "pattern-curve"
COMMAND = f"python -m benchmarks.pattern_curve {NAME}"
INSTANCE = "zbv-6.2b-p16-m48-vmin"
WIDTH: dict[Size, int] = {"quick": 10, "full": 60}
"""Width of the beam searches for patterns."""
TIME_LIMIT_S: dict[Size, float] = {"quick": 2, "full": 30}
"""Time limit of `auto` at the memory of a public schedule."""
LONGEST, STEP = 1.27, 0.01
"""Largest period tried, in units of the work of a microbatch."""
MICROBATCHES = (48, 64, 128)
MANY = 1024
"""Microbatches with which warm-up and cool-down hardly count."""

PUBLIC = {
    48: {"V-Min": 0.3300, "V-Half": 0.1847},
    64: {"V-Min": 0.3008, "V-Half": 0.1453},
    128: {"V-Min": 0.2512, "V-Half": 0.0784},
}
"""Bubbles of the public schedulers (of arXiv 2405.15362) on this profile, by microbatches."""


@dataclass(frozen=True)
class Profile:
    """Problem whose budget and microbatches are varied. Memory counts in whole microbatches of a device."""

    problem: Problem

    @cached_property
    def microbatch_bytes(self) -> int:
        """Largest activations of one microbatch on a device: the unit of memory."""
        stages = self.problem.stages
        return max(sum(stages[s].activation_bytes for s in here) for here in self.problem.stages_of)

    @cached_property
    def work_us(self) -> float:
        """Work of the busiest device for one microbatch."""
        return max(self.problem.work_us) / self.problem.microbatches

    @property
    def public_memory(self) -> dict[str, int]:
        """Microbatches that fit with the public schedules along a V, and with 1F1B."""
        p = len(self.problem.devices)
        return {"V-Min": (p + 4) // 3, "V-Half": (p + 2) // 2, "1F1B": p}

    @property
    def budgets_bytes(self) -> list[int]:
        """From V-Min's memory to 1F1B's in steps of half a microbatch."""
        memory = self.public_memory
        return [int(half * self.microbatch_bytes / 2) for half in range(2 * memory["V-Min"], 2 * memory["1F1B"] + 1)]

    def patterns(self, width: int) -> list[Pattern]:
        """Find patterns over all periods by a beam of `width`."""
        periods = [self.work_us * share for share in np.arange(1.0, LONGEST, STEP)]
        return patterns_found(self.problem, periods, width)

    def curve(self, patterns: Sequence[Pattern], microbatches: int) -> list[CurvePoint]:
        """Return the best schedule of so many microbatches for each budget."""
        return memory_curve(with_budget(self.problem, 0, microbatches), patterns, self.budgets_bytes)

    def memory(self, point: CurvePoint) -> float:
        """Budget of a point in microbatches of activations."""
        return point.budget_bytes / self.microbatch_bytes

    def bubble(self, point: CurvePoint, microbatches: int) -> float:
        """Bubble of a point with so many microbatches."""
        return 1 - microbatches * self.work_us / point.value_us

    def bubble_of_period(self, point: CurvePoint) -> float:
        """Bubble of the periodic part, independent of the number of microbatches."""
        return 1 - self.work_us / point.pattern.period_us


Curves = Mapping[int, Sequence[CurvePoint]]
"""Points of a curve by microbatches; points with the same index have the same budget and smallest period."""


def measure(size: Size, pictures: Path) -> str:
    """The table, the check of values against periods, and the picture."""
    profile = Profile(instance(INSTANCE))
    began = time.perf_counter()
    patterns = profile.patterns(WIDTH[size])
    found_s = time.perf_counter() - began
    say(f"{len(patterns)} patterns in {found_s:.1f} s")
    curves = {}
    for m in (*MICROBATCHES, MANY):
        curves[m] = profile.curve(patterns, m)
        say(f"m = {m}: {time.perf_counter() - began:.1f} s")
    _draw(profile, curves, pictures / f"{NAME}.png")
    seconds = f"{len(patterns)} patterns in {found_s:.0f} s and {len(curves)} curves of them in "
    seconds += f"{time.perf_counter() - began - found_s:.0f} s, on one core"
    public = _public_schedules(profile, curves, TIME_LIMIT_S[size])
    parts = [
        _table(profile, curves),
        _ends_text(curves),
        "At the memory of the public schedules, in bubbles:",
        public,
    ]
    return "\n\n".join([*parts, f"{conditions(f'{COMMAND} --size {size}', TIME_LIMIT_S[size])} {seconds}."])


def _table(profile: Profile, curves: Curves) -> str:
    head = ["memory, microbatches", "least period possible", "period", "bubble of the period"]
    head += [f"bubble, m = {m}" for m in curves]
    return table(head, [_row(profile, curves, k) for k in range(len(curves[MANY]))], text_columns=0)


def _row(profile: Profile, curves: Curves, k: int) -> TimedRow:
    point = curves[MANY][k]
    least_us = minimum_period_us(with_budget(profile.problem, point.budget_bytes, 1))
    period = (Time(least_us), Time(point.pattern.period_us), share_text(profile.bubble_of_period(point)))
    bubbles = [share_text(profile.bubble(curve[k], m)) for m, curve in curves.items()]
    return [f"{profile.memory(point):g}", *period, *bubbles]


def _ends_text(curves: Curves) -> str:
    """Difference of the values from m periods and one block."""
    parts = []
    for m, curve in curves.items():
        off = [point.value_us / (m * point.pattern.period_us + point.pattern.block_us) - 1 for point in curve]
        parts.append(f"{share_text(min(off))} to {share_text(max(off))} at m = {m}")
    return f"Of m periods and one block a value differs by {', '.join(parts)}."


def _public_schedules(profile: Profile, curves: Curves, limit_s: float) -> str:
    """Bubbles at the memory of each public schedule: the pattern alone, `auto`, the public schedule, and the bound."""
    rows = []
    for m, public in PUBLIC.items():
        for name, bubble in public.items():
            memory = profile.public_memory[name]
            point = next(point for point in curves[m] if profile.memory(point) == memory)
            problem = with_budget(profile.problem, point.budget_bytes, m)
            found = run(f"m = {m} at the memory of {name}", problem, "auto", limit_s)
            assert found.figures is not None, found.why_not
            least = 1 - m * profile.work_us / found.figures.bound_us
            shares = profile.bubble(point, m), found.figures.bubble, bubble, least
            rows.append([str(m), f"{name}, {memory}", *map(share_text, shares)])
    head = ["m", "memory, microbatches", "pattern alone", "auto", "public", "least possible"]
    return table(head, rows, text_columns=2)


def _draw(profile: Profile, curves: Curves, path: Path) -> None:
    lines = [
        MemoryLine(f"m = {m}", [(profile.memory(point), profile.bubble(point, m)) for point in curves[m]])
        for m in MICROBATCHES
    ]
    repeating = [(profile.memory(point), profile.bubble_of_period(point)) for point in curves[MANY]]
    memory = profile.public_memory
    marks = [
        Mark(memory[name], bubble, f"{name}, m = {m}") for m, known in PUBLIC.items() for name, bubble in known.items()
    ]
    lines.append(MemoryLine("what repeats", repeating))
    subtitle = "smallest period found within each budget, its ends completed   ·   no transfers to the host"
    chart = MemoryChart(INSTANCE.rsplit("-m", 1)[0], subtitle, "memory of a device, in microbatches", lines, marks)
    draw_bubble_over_memory(chart, path, "Bubble over memory")


SECTIONS = (
    Section(
        NAME,
        "What memory buys",
        f"The smallest period of a pattern, and the bubble of schedules made of it, on the measured profile of "
        f"`{INSTANCE}`, for every budget between the memory of V-Min, (p + 4) // 3 microbatches, and that of 1F1B, p. "
        "These are patterns alone, without the searches that `auto` adds. The least period possible is what the "
        "integral of memory over time allows: a microbatch holds each stage's activation at least for the round trip "
        "behind it.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
