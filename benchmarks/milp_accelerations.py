"""What each acceleration of the mixed-integer program gives: every one switched off alone, and all of them.

`python -m benchmarks.milp_accelerations --time-limit 20` prints a table for each problem: the size of the first model,
and the value, the bound and the seconds of the search. Each run starts from AdaOffload's schedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.markdown import Row, conditions, seconds_text, table, time_text
from benchmarks.section import say
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.exact.milp.model import solve_milp
from solver.exact.milp.options import DEFAULT, Options
from solver.exact.milp.program import build
from solver.limits import Limits, Start
from solver.published.ada_offload import ada_offload
from tests.problems import HALF, uniform

COMMAND = "python -m benchmarks.milp_accelerations"
HEAD = ("switched off", "rows", "columns", "nonzeros", "value", "bound", "seconds")

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
"""The switches of `Options`, in words."""

PROBLEMS: Mapping[str, Problem] = {
    "linear, p = 4, m = 8, half of 1F1B's memory": uniform(4, 8, budget=4),
    "linear, p = 3, m = 6, a third of 1F1B's memory with offload": uniform(3, 6, budget=3, offload=HALF),
    "V, p = 3, m = 4, two thirds of 1F1B's memory": uniform(3, 4, budget=8, v_shape=True),
}


def variants() -> Mapping[str, Options]:
    """Nothing off, each switch off alone, all off."""
    alone = {text: replace(DEFAULT, **{name: False}) for name, text in SWITCHES.items()}
    return {"nothing": DEFAULT, **alone, "all of them": replace(DEFAULT, **dict.fromkeys(SWITCHES, False))}


def measure(problem: Problem, options: Options, limits: Limits) -> Row:
    """The sizes of the model, and what the search finds and proves."""
    orders = ada_offload(problem)
    value_us, bound_us = simulate(problem, orders).value_us, lower_bound_us(problem)
    matrix = build(problem, value_us, bound_us, value_us, options).matrix
    start = Start(bound_us if options.bound else 0.0, value_us, orders, value_us)
    answer = solve_milp(problem, limits, start, lambda _: None, options)
    sizes = (*matrix.shape, matrix.nnz)
    found = (time_text(answer.value_us), time_text(answer.bound_us), seconds_text(limits.seconds))
    return (*(f"{size:,}" for size in sizes), *found)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds a run")
    limit_s = parser.parse_args().time_limit
    print(conditions(COMMAND, limit_s))
    for name, problem in PROBLEMS.items():
        rows = []
        for text, options in variants().items():
            say(f"{name}: without {text}")
            rows.append((text, *measure(problem, options, Limits(limit_s))))
        print(f"\n### {name}\n\n{table(HEAD, rows, 1)}", flush=True)


if __name__ == "__main__":
    main()
