"""A free choice of activation modes compared with the uniform ones, on the measured profiles of Zero Bubble.

`python -m benchmarks.recomputation recomputation --size quick` prints the table. The instances are those of
`instances/r-*-mem*.json`: the profiles of Zero Bubble (2401.10241, table 9) with full recomputation of each layer by
formula, which keeps ``2h`` of ``34h + 5as`` bytes for each token and takes as long as F.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.markdown import conditions, table
from benchmarks.section import Section, Size, main, say
from instances import INSTANCES, instance
from optpipe.problem import Problem
from solver.bounds import lower_bound_us
from solver.limits import Limits
from solver.solve import solve
from solver.warm_starts import best_of_uniform_choices

NAME = "recomputation"
COMMAND = f"python -m benchmarks.recomputation {NAME}"
TIME_LIMIT_S: dict[Size, float] = {"quick": 3, "full": 30}
HEAD = ("instance", "nothing recomputed", "all recomputed", "one choice a stage", "free", "bound", "recomputed")


def measure(size: Size, _: Path) -> str:
    """Measure every profile at every budget; returns a table of bubbles."""
    names = sorted(path.stem for path in INSTANCES.glob("r-*-mem*.json"))
    rows = [_row(name, size) for name in (names if size == "full" else names[-1:])]
    return f"{table(HEAD, rows, 1)}\n\n{conditions(f'{COMMAND} --size {size}', TIME_LIMIT_S[size])}"


def _row(name: str, size: Size) -> tuple[str, ...]:
    problem = instance(name)
    uniform = best_of_uniform_choices(problem)
    kinds = ("all kept", "all recomputed", "one choice a stage")
    free = solve(problem, "auto", Limits(TIME_LIMIT_S[size]))
    ops = [op.op for device in free.devices for op in device.compute]
    best_us = [uniform[kind].value_us if kind in uniform else float("inf") for kind in kinds]
    values = [*best_us, free.value_us, lower_bound_us(problem)]
    share = sum(op.startswith("C") for op in ops) / ops.count("F")
    row = (name, *(_bubble_text(problem, value_us) for value_us in values), f"{share:.0%}")
    say("  ".join(row))
    return row


def _bubble_text(problem: Problem, value_us: float) -> str:
    """Share of the value in which the busiest device does not work; recomputing counts as no work."""
    return f"{1 - max(problem.work_us) / value_us:.1%}" if value_us < float("inf") else "-"


SECTIONS = (
    Section(
        NAME,
        "Kept or recomputed",
        "Bubbles of the measured profiles of Zero Bubble at a quarter to three quarters of the memory of 1F1B, with "
        "full recomputation of each layer as a mode. Recomputation counts as bubble: it is time that the model's own "
        "work does not need. Before `free`, which is `auto`, stands the best of all published schedules with every "
        "microbatch kept, with every one recomputed, and with one choice for each stage; `recomputed` is the share of "
        "activations that `auto` recomputes.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
