"""Seconds to the first figures, to within 2 % of the final value, and to a proof, over p and over m.

`python -m benchmarks.seconds_by_size SECTION --size quick` prints one of the tables and draws its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from benchmarks.markdown import conditions, seconds_text, share_text, table, time_text
from benchmarks.runs import run, warm_up
from benchmarks.section import Section, Size, main
from optpipe.plot.seconds_by_size import SizeChart, SizeLine, draw_seconds_by_size
from optpipe.problem import Problem
from solver.bench.measure import Measured
from tests.problems import HALF, uniform

TIME_LIMIT_S: dict[Size, float] = {"quick": 2, "full": 60}
CLOSE = 1.02
MICROBATCHES_A_DEVICE = 4
FEW_DEVICES, MANY_DEVICES = 8, 64


@dataclass(frozen=True)
class Sized:
    """`auto` on equal stages, and what it gave; `size` is what grows."""

    size: int
    kind: str
    problem: Problem
    measured: Measured

    @property
    def seconds(self) -> dict[str, float | None]:
        """The moments of the search."""
        measured = self.measured
        final_us = measured.figures.value_us if measured.figures else 0.0
        return {
            "first schedule": measured.seconds_to(inf),
            "within 2 % of the final value": measured.seconds_to(CLOSE * final_us),
            "proved": measured.proof_seconds,
        }


def linear(p: int, m: int) -> Problem:
    """One stage a device, with the memory of 1F1B: p microbatches."""
    return uniform(p, m, budget=2 * p)


def v_shape(p: int, m: int) -> Problem:
    """Two stages a device along a V, with the memory of V-Half: (p + 2) // 2 microbatches."""
    return uniform(p, m, budget=4 * ((p + 2) // 2), v_shape=True)


def offloading(p: int, m: int) -> Problem:
    """One stage a device with half the memory of 1F1B; half of each activation may leave, as fast as a forward."""
    return uniform(p, m, budget=p, offload=HALF)


KINDS: dict[str, Callable[[int, int], Problem]] = {"linear": linear, "V": v_shape, "linear, offload": offloading}


class Shape(NamedTuple):
    """p devices and m microbatches; `size` is the one of them that grows."""

    size: int
    devices: int
    microbatches: int


Shapes = Callable[[Size], list[Shape]]


def over_devices(size: Size) -> list[Shape]:
    """p grows, and m with it."""
    return [Shape(p, p, MICROBATCHES_A_DEVICE * p) for p in ((4, 8, 16, 32, 64) if size == "full" else (4, 8))]


def over_microbatches(devices: int, size: Size) -> list[Shape]:
    """m grows."""
    return [Shape(m, devices, m) for m in ((16, 64, 256, 1024) if size == "full" else (16, 32))]


def _measure(section: str, size_name: str, fixed: str, shapes: Shapes, size: Size, pictures: Path) -> str:
    limit_s = TIME_LIMIT_S[size]
    warm_up(["auto"])
    runs = [_run(kind, shape, limit_s) for kind in KINDS for shape in shapes(size)]
    charts = [SizeChart(kind, f"auto   ·   {fixed}", size_name, _lines(runs, kind)) for kind in KINDS]
    draw_seconds_by_size(charts, pictures / f"{section}.png", f"Seconds over {size_name}")
    command = f"python -m benchmarks.seconds_by_size {section} --size {size}"
    return f"{_table(runs)}\n\n{conditions(command, limit_s)}"


def _run(kind: str, shape: Shape, limit_s: float) -> Sized:
    problem = KINDS[kind](shape.devices, shape.microbatches)
    name = f"{kind}, p {shape.devices}, m {shape.microbatches}"
    return Sized(shape.size, kind, problem, run(name, problem, "auto", limit_s))


def _lines(runs: Sequence[Sized], kind: str) -> list[SizeLine]:
    """A line for each moment that came at some size."""
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


def _row(sized: Sized) -> list[str]:
    problem, figures = sized.problem, sized.measured.figures
    ops = 3 * len(problem.stages) * problem.microbatches
    cells = [sized.kind, str(len(problem.devices)), str(problem.microbatches), f"{ops:,}"]
    cells += [seconds_text(seconds) for seconds in sized.seconds.values()]
    if figures is None:
        return [*cells, "-", "-", "-"]
    return [*cells, time_text(figures.value_us), share_text(figures.gap), share_text(figures.bubble)]


def _section(name: str, title: str, size_name: str, fixed: str, shapes: Shapes) -> Section:
    intent = (
        "`auto` on equal stages (F, B and W of 10 us, transfers of 1 us): one stage a device with the memory of 1F1B, "
        "a V with the memory of V-Half, and one stage a device with half the memory of 1F1B, where half of each "
        f"activation may leave; {fixed}."
    )
    command = f"python -m benchmarks.seconds_by_size {name}"
    return Section(name, title, intent, command, partial(_measure, name, size_name, fixed, shapes))


SECTIONS = (
    _section("devices", "Seconds over devices", "devices p", f"m = {MICROBATCHES_A_DEVICE} p", over_devices),
    *(
        _section(
            f"microbatches-{devices}",
            f"Seconds over microbatches, {devices} devices",
            "microbatches m",
            f"p = {devices}",
            partial(over_microbatches, devices),
        )
        for devices in (FEW_DEVICES, MANY_DEVICES)
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
