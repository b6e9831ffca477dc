"""Host cost of running a schedule, compared with torch's own pipeline runtime in the same processes.

`python -m benchmarks.executor host-cost --size quick` prints the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.executor_case import Case
from benchmarks.markdown import Time, TimedRow, machine, table
from benchmarks.runs import torchrun
from benchmarks.section import Section, Size, main
from instances import uniform
from instances.schedules import one_f_one_b
from optpipe.export.torch_csv import torch_csv
from optpipe.schedule import Schedule, schedule_text
from solver.limits import Limits
from solver.solve import solve

NAME = "host-cost"
COMMAND = f"python -m benchmarks.executor {NAME}"
WORKER = Path(__file__).parent / "executor_worker.py"
DEVICES = 4
MICROBATCHES = 8
ROUNDS = {"quick": 3, "full": 15}
STEPS = {"quick": 5, "full": 20}


class Cost(NamedTuple):
    """Cost of one step: CPU time of the issuing thread per compute op, averaged over ranks; elapsed time; and the
    largest peak of a rank."""

    host_us_per_op: float
    step_us: float
    peak_bytes: int


def schedules() -> dict[str, Schedule]:
    """Build 1F1B with fused backwards, ZB-H1 with split ones, and 1F1B with offload on all stages but the last."""
    problem = uniform(DEVICES, MICROBATCHES)
    moved = [(s, i) for s in range(DEVICES - 1) for i in range(MICROBATCHES)]
    return {
        "1f1b": solve(problem, "1f1b", Limits(1)),
        "zb-h1": solve(problem, "zb-h1", Limits(1)),
        "1f1b, offload": one_f_one_b(DEVICES, MICROBATCHES, fused=True, moved=moved),
    }


def measure(size: Size) -> dict[str, Cost]:
    """Measure every contender, named "schedule, runtime"; torch runs those without offload."""
    found = schedules()
    names = [f"{name}, {runtime}" for name in found for runtime in _runtimes(name)]
    case = Case(DEVICES, MICROBATCHES, names, ROUNDS[size], STEPS[size])
    with TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "case.json").write_text(json.dumps(asdict(case)))
        for name, schedule in found.items():
            (folder / f"{name}.schedule.json").write_text(schedule_text(schedule))
            (folder / f"{name}.csv").write_text(torch_csv(schedule, drop_offload=True))
        torchrun(WORKER, DEVICES, str(folder))
        ranks = [json.loads((folder / f"rank{rank}.results").read_text()) for rank in range(DEVICES)]
    return {name: cost_of([rank[name] for rank in ranks], _ops(found[name.rsplit(", ", 1)[0]])) for name in names}


def _runtimes(schedule: str) -> tuple[str, ...]:
    return ("optpipe",) if "offload" in schedule else ("torch", "optpipe")


def _ops(schedule: Schedule) -> float:
    """Number of compute ops of a device."""
    return mean(len(device.compute) for device in schedule.devices)


def cost_of(ranks: Sequence[dict[str, float]], ops: float) -> Cost:
    """Combine the measurements of all ranks; `ops` is the number of compute ops of a rank."""
    return Cost(
        1e6 * mean(rank["host_s"] for rank in ranks) / ops,
        1e6 * max(rank["step_s"] for rank in ranks),
        int(max(rank["peak_bytes"] for rank in ranks)),
    )


def _measure(size: Size, _: Path) -> str:
    costs = measure(size)
    head = [
        "schedule",
        "runtime",
        "host, µs an op",
        "step",
        "peak, bytes",
        "host: ours / torch",
        "peak: ours / torch",
    ]
    rows = [[*name.rsplit(", ", 1), *_cells(cost), *ratios(name, costs)] for name, cost in costs.items()]
    return f"{table(head, rows, text_columns=2)}\n\n`{COMMAND} --size {size}`: {machine()}, torch {version('torch')}."


def _cells(cost: Cost) -> TimedRow:
    return [f"{cost.host_us_per_op:.0f}", Time(round(cost.step_us)), f"{cost.peak_bytes:,}"]


def ratios(name: str, costs: dict[str, Cost]) -> list[str]:
    """Host cost and peak relative to torch's with the same schedule; empty without a counterpart."""
    schedule, runtime = name.rsplit(", ", 1)
    theirs = costs.get(f"{schedule}, torch")
    if runtime == "torch" or theirs is None:
        return ["", ""]
    ours = costs[name]
    return [f"{ours.host_us_per_op / theirs.host_us_per_op:.2f}", f"{ours.peak_bytes / theirs.peak_bytes:.2f}"]


SECTIONS = (
    Section(
        NAME,
        "Host cost of running a schedule",
        f"One linear layer a stage, {DEVICES} stages on {DEVICES} processes over gloo, {MICROBATCHES} microbatches: "
        "what the host spends on each compute op (F, B, W or BW) when there is next to nothing to compute, in "
        "OptPipe's runtime and in torch's (`Schedule1F1B`; `_PipelineScheduleRuntime` with the exported CSV) in the "
        "same processes in turns, each at its best round.",
        COMMAND,
        _measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
