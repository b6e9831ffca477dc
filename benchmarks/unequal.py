"""Unequal microbatches in the order given, in the best of the usual orders, and in one that is chosen.

`python -m benchmarks.unequal unequal --size quick` prints the table. The instances are those of `instances/lengths.py`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.markdown import conditions, table
from benchmarks.section import Section, Size, main, say
from instances import instance
from instances.lengths import DISTRIBUTIONS, SIZES
from optpipe.problem import Problem
from optpipe.units import share_text
from solver.layout.imbalance import InOrder, best_published, published_in_orders, without_imbalance
from solver.limits import Limits
from solver.solve import solve

NAME = "unequal"
COMMAND = f"python -m benchmarks.unequal {NAME}"
TIME_LIMIT_S: dict[Size, float] = {"quick": 3, "full": 60}
HEAD = ("instance", "equal", "given", "ascending", "descending", "best of the usual orders", "OptPipe", "bound")


def measure(size: Size, _: Path) -> str:
    """Measure every instance; returns a table of bubbles."""
    names = [f"u-p{p}-m{m}-{distribution}" for p, m in SIZES for distribution in DISTRIBUTIONS]
    rows = [_row(name, size) for name in (names if size == "full" else names[:1])]
    return f"{table(HEAD, rows, 1)}\n\n{conditions(f'{COMMAND} --size {size}', TIME_LIMIT_S[size])}"


def _row(name: str, size: Size) -> tuple[str, ...]:
    problem = instance(name)
    orders = {one.name: one for one in published_in_orders(problem)}
    equal = best_published(without_imbalance(problem), "equal", range(problem.microbatches))
    best = min(orders.values(), key=lambda one: one.value_us)
    ours = solve(problem, "auto", Limits(TIME_LIMIT_S[size]))
    shown = [_text(equal), *(_text(orders.get(order)) for order in ("given", "ascending", "descending"))]
    values = [_bubble_text(problem, value_us) for value_us in (ours.value_us, ours.bound_us)]
    row = (name, *shown, f"{_text(best)} ({best.name})", *values)
    say("  ".join(row))
    return row


def _text(one: InOrder | None) -> str:
    return share_text(one.bubble) if one else "-"


def _bubble_text(problem: Problem, value_us: float) -> str:
    """Share of the value in which the busiest device does not work."""
    return share_text(1 - max(problem.work_us) / value_us)


SECTIONS = (
    Section(
        NAME,
        "Unequal microbatches",
        "Bubbles of steps whose microbatches are single sequences of unequal lengths, log-normal and bimodal, in the "
        "memory that 1F1B may need. Before `OptPipe`, which is `auto` with the order left free, stand the best "
        "published schedules of equal microbatches with as much work, and of the unequal ones in the order drawn, by "
        "length, and in the best of eleven usual orders: also rising and falling, falling and rising, and every order "
        "of three clusters of similar lengths (DynaPipe).",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
