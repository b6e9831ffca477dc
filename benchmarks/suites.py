"""Every instance of a regression suite with `auto`: value, proof, and the best public schedule beside it.

`python -m benchmarks.suites SECTION --size quick` prints one of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.markdown import conditions, seconds_text, share_text, table, time_text
from benchmarks.runs import run, warm_up
from benchmarks.section import Section, Size, main
from solver.bench.cases import Case, cases_of
from solver.bench.measure import Figures
from solver.bench.suite import Suite
from solver.limits import Limits
from tests.problems import INSTANCES

SUITES = INSTANCES.parent / "regression"
QUICK_INSTANCES, QUICK_S = 3, 2.0

Solved = tuple[Case, Figures | None]


def _measure(suite_name: str, size: Size, _: Path) -> str:
    path = SUITES / f"{suite_name}.json"
    suite = Suite.load(path)
    cases = cases_of(path, suite, ["auto"])
    limit_s = suite.time_limit_s or Limits().time_limit_s
    if size == "quick":
        cases, limit_s = cases[:QUICK_INSTANCES], QUICK_S
    warm_up(["auto"])
    solved = [(case, run(case.instance, case.problem, case.method, limit_s).figures) for case in cases]
    command = f"python -m benchmarks.suites {suite_name} --size {size}"
    return f"{_table(solved)}\n\n{_summary(solved)}{conditions(command, limit_s)}"


def _table(solved: Sequence[Solved]) -> str:
    head = ["instance", "value", "gap", "bubble", "best public", "its bubble", "whose", "seconds"]
    return table(head, [_row(*entry) for entry in solved], text_columns=1)


def _row(case: Case, figures: Figures | None) -> list[str]:
    public = case.public
    if figures is None:
        return [case.instance, *["-"] * 7]
    ours = [time_text(figures.value_us), share_text(figures.gap), share_text(figures.bubble)]
    theirs = [time_text(public.value_us), share_text(public.bubble(figures)), public.scheduler] if public else ["-"] * 3
    return [case.instance, *ours, *theirs, seconds_text(figures.seconds)]


def _summary(solved: Sequence[Solved]) -> str:
    """Mean bubbles where a public value is known."""
    known = [(figures, case.public) for case, figures in solved if figures and case.public]
    if not known:
        return ""
    above = sum(figures.value_us > public.value_us for figures, public in known)
    ours = mean(figures.bubble for figures, _ in known)
    theirs = mean(public.bubble(figures) for figures, public in known)
    return (
        f"Above the best public value on {above} of {len(known)} instances; mean bubble {share_text(ours)} against "
        f"{share_text(theirs)}.\n\n"
    )


def _section(suite_name: str, title: str, intent: str) -> Section:
    return Section(
        suite_name, title, intent, f"python -m benchmarks.suites {suite_name}", partial(_measure, suite_name)
    )


SECTIONS = (
    _section(
        "published",
        "Against public schedulers",
        "`auto` on every instance of `tests/instances`, beside the best public schedule in `reference.json` there.",
    ),
    _section(
        "budgets",
        "Budgets above that of 1F1B",
        "`auto` on the measured profiles of Zero Bubble with 1.25 to 1.875 times the memory of 1F1B.",
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
