"""Six configurations that NVIDIA published with their time a step, and plans of the same jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.accuracy import FOLDER
from benchmarks.markdown import machine, seconds_text, table
from benchmarks.section import Section, Size, main, say
from optpipe.cli.console import compile_once
from optpipe.cluster.calibrate import predict
from optpipe.cluster.machine import named_machines
from optpipe.cluster.rows import Row, read_rows
from optpipe.cluster.software import software_of
from optpipe.units import percent_text
from solver.layout.cluster_plan import Plan, plan_cluster
from solver.layout.fitting import Job
from solver.layout.strategies import Rated
from solver.limits import Limits, available_cores

STEPS = tuple(f"nvidia-dgxc-{number:03}" for number in (17, 5, 81, 302, 299, 57))
"""Rows of benchmarks/published/steps.csv: Llama 3.1 70B and 405B, Nemotron-4 340B, Qwen3-235B-A22B, DeepSeek-V3 and
GPT-3 175B, each on as many H100 as its recipe takes."""
COMMAND = "python -m benchmarks.published_plans plans"
TIME_LIMIT_S = 60.0

COLUMNS = """`published`: strategy and seconds of its source, and what they are predicted to be. `rank`: its place among
all legal strategies in 16 bits by the same cost model, each with a published schedule. `plan`: the fastest strategy
after the search; `less`: by how much it is faster than the published one, both predicted; `gap`: no strategy is faster
than the plan by more. A difference below the machine's error is a tie. Experts are predicted less well than dense
models ([accuracy](../accuracy.md)), and few published steps shard weights (`fsdp`): such rows say where to look."""


def measure_plans(size: Size, _pictures: Path) -> str:
    """Plan the jobs of all rows, or of the first in quick size, and make the table."""
    rows = {row.name: row for row in read_rows(FOLDER / "steps.csv", FOLDER / "models.json")[0]}
    limit_s = TIME_LIMIT_S if size == "full" else 1.0
    chosen = [rows[name] for name in (STEPS if size == "full" else STEPS[:1])]
    head = ["model", "GPUs", "published", "measured", "predicted", "rank", "plan", "predicted", "less", "gap", "took"]
    lines = [list(_line(row, limit_s)) for row in chosen]
    return "\n\n".join(
        [
            table(head, lines, 3),
            COLUMNS.replace("\n", " "),
            f"`{COMMAND} --size {size}`: {machine()}, at most {limit_s:g} s a plan.",
        ]
    )


def _line(row: Row, limit_s: float) -> Iterator[str]:
    gpu = named_machines()[row.machine]
    job = Job(row.model, gpu, row.sequence, row.global_batch, software_of(row.software), row.software)
    compile_once()
    say(f"{row.model.name} on {row.strategy.gpus} GPUs")
    plans: list[Plan] = []
    began = time.perf_counter()
    limits = Limits(limit_s, workers=available_cores())
    plan = plan_cluster(job, row.strategy.gpus, {}, limits, plans.append)
    took_s = time.perf_counter() - began
    theirs_s = predict(gpu, row).seconds
    rated = next(one for one in plans if one.complete).ratings
    faster = sum(one.seconds < theirs_s for one in rated)
    best, theirs = plan.ratings[0], Rated(row.strategy, "solved", 0.0, theirs_s)
    assert row.seconds is not None, "the rows have measured steps"
    yield from (row.model.name, f"{row.strategy.gpus:,}", theirs.name)
    yield from (f"{row.seconds:.2f} s", f"{theirs_s:.2f} s", f"{faster + 1:,} of {len(rated):,}")
    yield from (best.name, f"{best.seconds:.2f} s", percent_text(1 - best.seconds / theirs_s))
    yield from (percent_text(1 - min(one.bound_s for one in plan.ratings) / best.seconds), seconds_text(took_s) + " s")


SECTIONS = (
    Section(
        "plans",
        "Published configurations and plans",
        "Six recipes of NVIDIA for H100, and what `optpipe plan` finds for the same model, GPUs, sequence and batch.",
        COMMAND,
        measure_plans,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
