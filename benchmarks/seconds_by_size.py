"""Seconds to the first schedule, to within 2 % of the final value, and to a proof, over p and over m.

`python -m benchmarks.seconds_by_size SECTION --size quick` prints one of the tables and draws its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

from benchmarks.curves import SizeChart, SizeLine, draw_seconds_by_size
from benchmarks.markdown import Time, TimedRow, conditions, seconds_text, table
from benchmarks.runs import run, warm_up
from benchmarks.section import Section, Size, main
from instances import HALF, uniform
from optpipe.problem import Problem
from optpipe.units import share_text
from solver.regression.run import MeasuredRun

QUICK_S, QUICK_SHAPES = 2.0, 2
CLOSENESS = 1.02
FIRST, CLOSE, PROVED = "first schedule", "within 2 % of the final value", "proved"
"""Milestones of a search."""
MICROBATCHES_A_DEVICE = 4


@dataclass(frozen=True)
class Sized:
    """Run of `auto` on equal stages; `size` is the parameter that grows."""

    size: int
    kind: str
    problem: Problem
    measured: MeasuredRun

    @property
    def seconds(self) -> dict[str, float | None]:
        """Seconds of each milestone; None if it was not reached."""
        measured = self.measured
        final_us = measured.figures.value_us if measured.figures else 0.0
        return {
            FIRST: measured.seconds_to(inf),
            CLOSE: measured.seconds_to(CLOSENESS * final_us),
            PROVED: measured.proof_seconds,
        }

    @property
    def size_text(self) -> str:
        """Size in the notation of the papers."""
        return f"p = {len(self.problem.devices)}, m = {self.problem.microbatches}"


def linear(p: int, m: int) -> Problem:
    """Build a problem with one stage per device, and the memory of 1F1B: p microbatches."""
    return uniform(p, m, budget=2 * p)


def v_shape(p: int, m: int) -> Problem:
    """Build a problem with two stages per device along a V, and the memory of V-Half: (p + 2) // 2 microbatches."""
    return uniform(p, m, budget=4 * ((p + 2) // 2), v_shape=True)


def offloading(p: int, m: int) -> Problem:
    """Build a problem with one stage per device and half the memory of 1F1B.

    Half of each activation may be offloaded, as fast as a forward.
    """
    return uniform(p, m, budget=p, offload=HALF)


KINDS: dict[str, Callable[[int, int], Problem]] = {"linear": linear, "V": v_shape, "linear, offload": offloading}
KIND_WORDS = {
    "linear": "one stage a device with the memory of 1F1B",
    "V": "two stages a device with the memory of V-Half",
    "linear, offload": "one stage a device with half the memory of 1F1B, where half of each activation may leave",
}


class Shape(NamedTuple):
    """Shape of a problem: p devices and m microbatches; `size` is the one that grows."""

    size: int
    devices: int
    microbatches: int


@dataclass(frozen=True)
class Growth:
    """Sizes that grow in a section, and those held fixed: `kinds` of problems at the `shapes` of the full size.

    `limit_s` is the time of a full run. Where a schedule should be close to the final one within a minute it is longer
    than that, so that there is something later to compare with.
    """

    name: str
    title: str
    size_name: str
    fixed: str
    limit_s: float
    kinds: Sequence[str]
    shapes: Sequence[Shape]

    @property
    def command(self) -> str:
        """Command that measures this section."""
        return f"python -m benchmarks.seconds_by_size {self.name}"

    def measure(self, size: Size, pictures: Path) -> str:
        """The table, how the seconds grow, and the picture."""
        limit_s, shapes = (self.limit_s, self.shapes) if size == "full" else (QUICK_S, self.shapes[:QUICK_SHAPES])
        warm_up(["auto"])
        runs = [_run(kind, shape, limit_s) for kind in self.kinds for shape in shapes]
        charts = [
            SizeChart(kind, f"auto   ·   {self.fixed}", self.size_name, _lines(runs, kind)) for kind in self.kinds
        ]
        draw_seconds_by_size(charts, pictures / f"{self.name}.png", f"Seconds over {self.size_name}")
        text = conditions(f"{self.command} --size {size}", limit_s)
        return "\n\n".join([_table(runs), *(_growth_text(runs, kind) for kind in self.kinds), text])


def _run(kind: str, shape: Shape, limit_s: float) -> Sized:
    problem = KINDS[kind](shape.devices, shape.microbatches)
    name = f"{kind}, p {shape.devices}, m {shape.microbatches}"
    return Sized(shape.size, kind, problem, run(name, problem, "auto", limit_s))


def _lines(runs: Sequence[Sized], kind: str) -> list[SizeLine]:
    """Build a line for each milestone that was reached at some size."""
    points: dict[str, list[tuple[int, float]]] = {}
    for sized in runs:
        for moment, seconds in sized.seconds.items():
            if sized.kind == kind and seconds is not None:
                points.setdefault(moment, []).append((sized.size, seconds))
    return [SizeLine(moment, line) for moment, line in points.items()]


def _table(runs: Sequence[Sized]) -> str:
    moments = [f"{moment}, s" for moment in runs[0].seconds]
    head = ["kind", "p", "m", "compute ops", *moments, "value", "gap", "bubble"]
    return table(head, [_row(sized) for sized in runs], text_columns=1)


def _growth_text(runs: Sequence[Sized], kind: str) -> str:
    """Growth of the seconds from the smallest to the largest size."""
    of_kind = [sized for sized in runs if sized.kind == kind]
    least, most = of_kind[0], of_kind[-1]
    ratios = [_ratio_text(moment, least.seconds[moment], most.seconds[moment]) for moment in (FIRST, CLOSE)]
    return f"{kind}, from {least.size_text} to {most.size_text}: {', '.join(ratios)}."


def _ratio_text(moment: str, before_s: float | None, after_s: float | None) -> str:
    if not before_s or not after_s:
        return f"{moment}: no seconds to compare"
    return f"{moment} in {after_s / before_s:.2g} times the seconds"


def _row(sized: Sized) -> TimedRow:
    problem, figures = sized.problem, sized.measured.figures
    ops = 3 * len(problem.stages) * problem.microbatches
    cells = [sized.kind, str(len(problem.devices)), str(problem.microbatches), f"{ops:,}"]
    cells += [seconds_text(seconds) for seconds in sized.seconds.values()]
    if figures is None:
        return [*cells, "-", "-", "-"]
    return [*cells, Time(figures.value_us), share_text(figures.gap), share_text(figures.bubble)]


def over_microbatches(devices: int, microbatches: Sequence[int], limit_s: float, kinds: Sequence[str]) -> Growth:
    """m grows."""
    name, title = f"microbatches-{devices}", f"Seconds over microbatches, {devices} devices"
    shapes = [Shape(m, devices, m) for m in microbatches]
    return Growth(name, title, "microbatches m", f"p = {devices}", limit_s, kinds, shapes)


GROWTHS = (
    Growth(
        "devices",
        "Seconds over devices",
        "devices p",
        f"m = {MICROBATCHES_A_DEVICE} p",
        30,
        list(KINDS),
        [Shape(p, p, MICROBATCHES_A_DEVICE * p) for p in (4, 8, 16, 32, 64)],
    ),
    over_microbatches(8, (64, 256, 1024), 30, list(KINDS)),
    over_microbatches(64, (64, 1024), 90, ["linear", "V"]),
)


def _section(growth: Growth) -> Section:
    described = "; ".join(f"{kind}: {KIND_WORDS[kind]}" for kind in growth.kinds)
    intent = f"`auto` on equal stages (F, B and W of 10 us, transfers of 1 us), {growth.fixed}. {described}."
    return Section(growth.name, growth.title, intent, growth.command, growth.measure)


SECTIONS = tuple(map(_section, GROWTHS))

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
