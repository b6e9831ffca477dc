"""Ablation of the accelerations of the mixed-integer program: each switched off alone, and all of them.

`python -m benchmarks.milp_accelerations milp-accelerations --size quick` prints the tables: the size of the first
model, and what searches with a few seeds find and prove. Each run starts from AdaOffload's schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import geometric_mean

from benchmarks.markdown import Time, TimedRow, conditions, seconds_text, table
from benchmarks.section import Section, Size, main, say
from instances import HALF, uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.exact.milp.model import build_program, solve_milp
from solver.exact.milp.variables import DEFAULT, Options
from solver.limits import Limits
from solver.published.ada_offload import ada_offload
from solver.solution import Solution

NAME = "milp-accelerations"
COMMAND = f"python -m benchmarks.milp_accelerations {NAME}"
TIME_LIMIT_S: dict[Size, float] = {"quick": 2, "full": 8}
SEEDS: dict[Size, range] = {"quick": range(1), "full": range(3)}
"""Seeds of HiGHS, whose run time varies several times over with the seed."""
QUICK_PROBLEMS, QUICK_VARIANTS = 1, 2
HEAD = ("changed", "rows", "columns", "nonzeros", "highest value", "lowest bound", "proved", "mean seconds")

SWITCHES = {
    "windows": "orders and big-M from time windows",
    "chains": "orders agree along microbatches",
    "workloads": "work ordered before and after an op",
    "triangles": "triangle cuts",
    "work": "work that memory holds back",
    "weight_order": "W in the order of B",
    "bound": "the bound as a cut",
    "warm_start": "warm start",
}
"""Descriptions of the switches of `Options`."""

PROBLEMS: Mapping[str, Problem] = {
    "linear, p = 4, m = 8, the memory of 1F1B": uniform(4, 8, budget=8),
    "linear, p = 4, m = 8, half the memory of 1F1B with offload": uniform(4, 8, budget=4, offload=HALF),
    "V, p = 3, m = 4, two thirds of the memory of 1F1B": uniform(3, 4, budget=8, v_shape=True),
}


def variants() -> Iterator[tuple[str, Options]]:
    """Return the default options, those with one switch changed, and those with all accelerations off."""
    yield "nothing", DEFAULT
    for name, text in SWITCHES.items():
        on = getattr(DEFAULT, name)
        yield f"{'without' if on else 'with'} {text}", replace(DEFAULT, **{name: not on})
    yield "without any", replace(DEFAULT, **dict.fromkeys(SWITCHES, False))


def measure(size: Size, _: Path) -> str:
    """Measure all variants; returns a table per problem."""
    limit_s = TIME_LIMIT_S[size]
    problems = PROBLEMS if size == "full" else dict(islice(PROBLEMS.items(), QUICK_PROBLEMS))
    tables = [f"### {name}\n\n{_table(name, problem, size)}" for name, problem in problems.items()]
    return "\n\n".join([*tables, conditions(f"{COMMAND} --size {size}", limit_s)])


def _table(name: str, problem: Problem, size: Size) -> str:
    rows: list[TimedRow] = []
    for text, options in islice(variants(), None if size == "full" else QUICK_VARIANTS):
        rows.append((text, *_row(problem, options, size)))
        say(f"{name}  {text}")
    return table(HEAD, rows, 1)


def _row(problem: Problem, options: Options, size: Size) -> TimedRow:
    """Measure the size of a model, and the results of searches with several seeds."""
    orders = ada_offload(problem)
    value_us, bound_us = simulate(problem, orders).value_us, lower_bound_us(problem)
    matrix = build_program(problem, value_us, bound_us, value_us, options).matrix
    start = Solution(orders, value_us, bound_us if options.bound else 0.0)
    answers, seconds = [], []
    for seed in SEEDS[size]:
        limits = Limits(TIME_LIMIT_S[size], seed=seed)
        answers.append(solve_milp(problem, limits, start, lambda _: None, options))
        seconds.append(limits.seconds)
    proved = sum(limits.reached(answer.value_us, answer.bound_us) for answer in answers)
    return (
        *(f"{count:,}" for count in (*matrix.shape, matrix.nnz)),
        Time(max(answer.value_us for answer in answers)),
        Time(min(answer.bound_us for answer in answers)),
        f"{proved} of {len(answers)}",
        seconds_text(geometric_mean(seconds)),
    )


SECTIONS = (
    Section(
        NAME,
        "What the accelerations of the mixed-integer program give",
        "`milp` from AdaOffload's schedule, with each part of the model switched alone (`without` what is on by "
        "default, `with` what is not), and with none of them. Equal stages: F, B and W of 10 us, transfers of 1 us. "
        "Three seeds each; the mean of the seconds is geometric, and counts a run without a proof with its limit.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
