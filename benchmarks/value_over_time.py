"""Best value after 1, 3, 10 and 30 seconds: all searches, `ada-offload` alone against the solver, HiGHS against CP-SAT.

`python -m benchmarks.value_over_time SECTION --size quick` prints one of the tables and draws its curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.markdown import Time, TimedRow, conditions, seconds_text, table
from benchmarks.runs import run, warm_up
from benchmarks.section import Section, Size, main
from instances import INSTANCES, instance
from optpipe.cli.bench import build_curves
from optpipe.plot.value_over_time import draw_value_over_time
from optpipe.units import share_text
from solver.methods import METHODS
from solver.regression.run import Case, MeasuredRun, load_public

Run = tuple[Case, MeasuredRun]

MARKS_S: dict[Size, tuple[float, ...]] = {"quick": (1, 2), "full": (1, 3, 10, 30)}
"""Seconds at which values are shown; the last is the time limit."""

SEARCHES = [name for name, method in METHODS.items() if method.kind != "published"]

VARIED = (
    "d-p4-m8-o1-mo1-b1o2-linear-make",
    "zb-1.5b-p8-m24-mem2",
    "zb-1.5b-p8-m32-mem2",
    "zbv-6.2b-p16-m48-vhalf",
    "a-p8-m16-c0.1-b1o2-vshape-make",
    "d-p16-m32-o1-mo1-b1o4-vshape-make",
    "po-10.5b-4k-d8-v5-m64-mem0.25",
)
"""Instances of each kind, from those proved at once to unproved ones."""

OFFLOADING = (
    "d-p4-m8-o1-mo1-b1o2-linear-make",
    "d-p4-m8-o1-mo1-b1o2-vshape-make",
    "d-p8-m16-o1-mo1-b1o4-linear-make",
    "d-p8-m16-o1-mo0.5-b1o2-vshape-make",
    "d-p8-m16-o1-mo1-b1o4-interleaved4-make-pairs",
    "d-p16-m32-o1-mo1-b1o4-linear-make",
    "po-10.5b-16k-d8-v5-m64-mem0.25",
    "zb-1.5b-p8-m24-mem2",
)
"""Instances with offload, and one without."""

EXACT = (
    "a-p4-m8-c0-b1o2-linear-make",
    "a-p4-m8-c0.1-b1-vshape-span",
    "c-p4-m8-f1.3-l1.5-b1-linear-span",
    "d-p4-m8-o1-mo1-b1o2-linear-make",
    "d-p4-m8-o1-mo1-b1o2-vshape-make",
    "d-p8-m16-o1-mo1-b1o2-linear-make",
    "zb-1.5b-p8-m24-mem2",
)
"""Instances small enough for the exact methods."""


def _measure(section: str, instances: Sequence[str], methods: Sequence[str], size: Size, pictures: Path) -> str:
    chosen = instances if size == "full" else instances[:2]
    marks = MARKS_S[size]
    runs = _runs(chosen, methods, marks[-1])
    draw_value_over_time(build_curves(runs), marks[-1], pictures / f"{section}.png", "Best value over time")
    return f"{_table(runs, marks)}\n\n{conditions(f'{_command(section)} --size {size}', marks[-1])}"


def _command(section: str) -> str:
    return f"python -m benchmarks.value_over_time {section}"


def _runs(instances: Sequence[str], methods: Sequence[str], time_limit_s: float) -> list[Run]:
    public = load_public(INSTANCES / "reference.json")
    warm_up(methods)
    cases = [Case(name, instance(name), method, public=public.get(name)) for name in instances for method in methods]
    return [(case, run(case.instance, case.problem, case.method, time_limit_s)) for case in cases]


def _table(runs: Sequence[Run], marks_s: Sequence[float]) -> str:
    values = (f"at {mark:g} s" for mark in marks_s)
    head = ["instance", "method", *values, "bound", "bubble", "proved in s", "best public"]
    return table(head, [_row(*entry, marks_s) for entry in runs], text_columns=2)


def _row(case: Case, measured: MeasuredRun, marks_s: Sequence[float]) -> TimedRow:
    public = Time(case.public.value_us) if case.public else "-"
    points = [measured.at(mark) for mark in marks_s]
    values = [Time(point.value_us) if point else "-" for point in points]
    figures = measured.figures
    if figures is None:
        return [case.instance, case.method, *values, "-", "-", "-", public]
    proof = seconds_text(measured.proof_seconds)
    cells = (Time(figures.bound_us), share_text(figures.bubble), proof, public)
    return [case.instance, case.method, *values, *cells]


def _section(name: str, title: str, intent: str, instances: Sequence[str], methods: Sequence[str]) -> Section:
    return Section(name, title, intent, _command(name), partial(_measure, name, instances, methods))


SECTIONS = (
    _section(
        "value-over-time",
        "Value over time",
        "The best value of each search after so many seconds. Every search starts from the best published schedule.",
        VARIED,
        SEARCHES,
    ),
    _section(
        "ada-offload",
        "The start alone against the solver",
        "`ada-offload` is the heuristic with which OptPipe's search begins; `auto` is all of OptPipe.",
        OFFLOADING,
        ("ada-offload", "auto"),
    ),
    _section(
        "exact",
        "HiGHS against CP-SAT",
        "The two exact methods, from the same published start and the same bound.",
        EXACT,
        ("milp", "cp-sat"),
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
