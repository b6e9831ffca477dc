"""Prints the curve of smallest period and bubble against memory on a V, between V-Min's memory and 1F1B's.

    python benchmarks/pattern_curve.py [PROBLEM.json] [--microbatches 48,64,128] [--width 60] [--picture FILE.png]

Memory is counted in whole microbatches' activations of a device. "floor" is the least period that the integral of
memory over time allows: a microbatch holds each stage's activation at least for the round trip behind it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from optpipe.problem import Problem
from solver.search.pattern.curve import CurvePoint, memory_curve, patterns_found, with_budget
from solver.search.pattern.floor import least_period_us

INSTANCE = Path(__file__).parents[1] / "tests" / "instances" / "zbv-6.2b-p16-m48-vmin.json"


def main() -> None:
    arguments = _arguments()
    problem = Problem.load(arguments.problem)
    microbatch_bytes = max(sum(problem.stages[s].activation_bytes for s in here) for here in problem.stages_of)
    p = len(problem.devices)
    budgets = [int(half * microbatch_bytes / 2) for half in range(2 * ((p + 4) // 3), 2 * p + 1)]
    work_us = max(problem.work_us) / problem.microbatches
    began = time.perf_counter()
    patterns = patterns_found(problem, [work_us * share for share in np.arange(1.0, 1.27, 0.01)], arguments.width)
    print(f"{len(patterns)} patterns in {time.perf_counter() - began:.1f} s on one core")
    counts = [int(m) for m in arguments.microbatches.split(",")]
    curves = {m: memory_curve(with_budget(problem, 0, m), patterns, budgets) for m in counts}
    print("memory   floor  period   bubble of the period" + "".join(f"   m={m:<5}" for m in counts))
    for k, point in enumerate(curves[counts[0]]):
        floor = least_period_us(with_budget(problem, point.budget_bytes, 1))
        shares = "".join(f"   {1 - m * work_us / curves[m][k].value_us:.4f} " for m in counts)
        period = point.pattern.period_us
        print(
            f"{point.budget_bytes / microbatch_bytes:6.1f}  {floor / work_us:.4f}  {period / work_us:.4f}"
            f"   {1 - work_us / period:.4f}              {shares}"
        )
    if arguments.picture:
        _draw(curves, microbatch_bytes, work_us, arguments.picture)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="?", default=INSTANCE)
    parser.add_argument("--microbatches", default="48,64,128")
    parser.add_argument("--width", type=int, default=60)
    parser.add_argument("--picture")
    return parser.parse_args()


def _draw(curves: dict[int, list[CurvePoint]], microbatch_bytes: int, work_us: float, path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for m, points in curves.items():
        memory = [point.budget_bytes / microbatch_bytes for point in points]
        axes.step(memory, [1 - m * work_us / point.value_us for point in points], where="post", label=f"m = {m}")
    points = next(iter(curves.values()))
    memory = [point.budget_bytes / microbatch_bytes for point in points]
    repeating = [1 - work_us / point.pattern.period_us for point in points]
    axes.step(memory, repeating, where="post", color="black", label="repeating")
    axes.set(xlabel="memory of a device in microbatches", ylabel="bubble", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
