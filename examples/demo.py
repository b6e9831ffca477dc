"""Main workflow: a plan from a model's name, its pipeline solved, and a step trained as planned. Run by `make demo`.

First the strategies of Llama 3.1 70B on 64 H100. Then Llama 3.1 8B on eight A100 of 40 GB, where 1F1B has no room
unless it recomputes: the published schedules of that pipeline, and what a search finds for the same stages. At last a
small GPT is trained on four virtual devices in this process, with a check against the plain step.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optpipe.cli.console import stdout, table
from optpipe.cli.plan_cluster import plan_table
from optpipe.cli.solve import print_event
from optpipe.cli.train_report import print_result, print_step
from optpipe.cluster.layers import strategy_layers, strategy_partition
from optpipe.cluster.machine import Machine
from optpipe.cluster.model import load_model
from optpipe.cluster.software import software_of
from optpipe.cluster.strategy import Strategy
from optpipe.errors import MethodError
from optpipe.partition import Batching, build_problem
from optpipe.plot import draw_comparison, draw_plan, draw_schedule
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from optpipe.train import TrainingConfig, train
from optpipe.units import bytes_text, percent_text, time_text
from solver.layout.cluster_plan import plan_cluster
from solver.layout.fitting import Job
from solver.limits import Limits
from solver.process import solve_in_child
from solver.solve import solve
from solver.warm_up import warm_up_in_background

WITH_OFFLOAD = Path(__file__).parent / "problems" / "offload-p4-m8.json"
PUBLISHED = ("1f1b", "1f1b-recompute", "zb-h1", "zb-auto")
SHOWN = 8
"""Strategies of the plan's table."""
LINE_S = 7.0
"""Seconds between two lines of what takes long."""
RATING_S = 1.0
"""Time limit of a plan that rates all strategies and searches for no schedule."""

console = stdout()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where schedules and pictures go")
    parser.add_argument("--time-limit", type=float, default=8.0, help="seconds for each search")
    parser.add_argument("--steps", type=int, default=10, help="training steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if warm_up_in_background():
        console.print("kernels are compiled meanwhile, once for an installation; searches join as theirs are ready")
    plan_70b(options.out)
    schedule_8b(options.out, options.time_limit)
    train_gpt(options.out, options.time_limit, options.steps)
    console.print(f"\nschedules and pictures are in {options.out}/")


def plan_70b(out: Path) -> None:
    """Rate every strategy of a training job."""
    console.print("\nLlama 3.1 70B on 64 H100, 512 sequences of 8,192 tokens a step", style="bold")
    job = Job(load_model("llama-3.1-70b"), Machine.load("h100"), 8192, 512, software_of(""))
    plan = plan_cluster(job, 64, {}, Limits(RATING_S))
    console.print(plan_table(plan, SHOWN))
    draw_plan(plan.document(), out / "plan-70b.png")
    console.print(f"{len(plan.ratings):,} strategies rated, the picture is {out / 'plan-70b.png'}")


def schedule_8b(out: Path, time_limit_s: float) -> None:
    """Compare published schedules of one pipeline with the solver's."""
    console.print("\nLlama 3.1 8B on eight A100 of 40 GB, a stage on each, 32 sequences a step", style="bold")
    job = Job(load_model("llama-3.1-8b"), Machine.load("a100-40"), 8192, 32, software_of(""))
    strategy = Strategy(pipeline=8)
    efficiencies = job.machine.efficiencies_of(strategy.precision, job.software_name)
    layers = strategy_layers(job.model, job.machine, strategy, job.sequence, job.software, efficiencies)
    cut = strategy_partition(job.model, strategy)
    problem = build_problem(layers, cut, Batching(1, job.global_batch), offload=True, modes=["full", "selective"])
    assert problem is not None, "weights and optimizer have room"
    rows = table("schedule", "step", "bubble", "most activations", "")
    for column in (0, -1):
        rows.columns[column].justify = "left"
    drawn = []
    with lines_of("published schedules"):
        for name in PUBLISHED:
            try:
                schedule = solve(problem, name)
            except MethodError as error:
                rows.add_row(name, "-", "-", "-", str(error).partition(":")[0])
                continue
            drawn.append((name, schedule))
            rows.add_row(name, *_figures(schedule), "")
    ours = search(problem, time_limit_s)
    drawn.append(("optpipe", ours))
    rows.add_row("optpipe", *_figures(ours), f"no schedule is faster than {time_text(ours.bound_us)}")
    console.print(rows)
    shorter = 1 - ours.value_us / min(schedule.value_us for _, schedule in drawn[:-1])
    console.print(f"{percent_text(shorter)} less time on the same GPUs: activations wait on the host")
    (out / "llama-8b.schedule.json").write_text(schedule_text(ours))
    draw_comparison(drawn, out / "llama-8b.png")


def train_gpt(out: Path, time_limit_s: float, steps: int) -> None:
    """Train with a schedule that offloads."""
    console.print("\na small GPT with offload: 4 virtual devices, one process", style="bold")
    schedule = search(Problem.load(WITH_OFFLOAD), time_limit_s)
    draw_schedule(schedule, out / "gpt.png")
    with lines_of("loading torch, checking gradients and training"):
        result = train(TrainingConfig(schedule, steps=steps, check=True), lambda step: print_step(step, every=5))
    print_result(result)


def search(problem: Problem, time_limit_s: float) -> Schedule:
    """The best schedule that `auto` finds."""
    with lines_of(f"searching for up to {time_limit_s:g} s"):
        return solve_in_child(problem, "auto", Limits(time_limit_s), on_event=print_event).schedule_or_error()


@contextmanager
def lines_of(what: str) -> Iterator[None]:
    """Print a line every few seconds while something runs: also where nobody sees a spinner."""
    began, ended = time.perf_counter(), threading.Event()

    def say() -> None:
        while not ended.wait(LINE_S):
            console.print(f"{what}: {time.perf_counter() - began:.0f} s")

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _figures(schedule: Schedule) -> tuple[str, str, str]:
    most = max(device.peak_bytes_any_timing for device in schedule.devices)
    return time_text(schedule.value_us), percent_text(schedule.bubble), bytes_text(most)


if __name__ == "__main__":
    main()
