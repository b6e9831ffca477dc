"""Time saved by updates that wait for no other device, compared with the plans.

`python -m benchmarks.updates updates --size quick` prints the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.markdown import machine, table
from benchmarks.runs import torchrun
from benchmarks.section import Section, Size, main
from benchmarks.updates_case import SECONDS_PER_US
from instances import uniform
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from optpipe.simulate import simulate
from solver.limits import Limits
from solver.solve import solve

NAME = "updates"
COMMAND = f"python -m benchmarks.updates {NAME}"
WORKER = Path(__file__).parent / "updates_worker.py"
DEVICES, MICROBATCHES = 4, 8
METHODS = ("zb-h1", "zb-h2")
ROUNDS = {"quick": 1, "full": 3}
STEPS = {"quick": 8, "full": 20}

Seconds = dict[str, dict[str, float]]
"""Seconds of a step, by schedule and update mode: "waits", "optimistic", "wrong"."""


def schedules() -> dict[str, Schedule]:
    """Published schedules, without a budget."""
    return {method: solve(uniform(DEVICES, MICROBATCHES), method, Limits(1)) for method in METHODS}


def measure(size: Size) -> Seconds:
    """Run all schedules in four processes."""
    with TemporaryDirectory() as text:
        folder = Path(text)
        for name, schedule in schedules().items():
            (folder / f"{name}.json").write_text(schedule_text(schedule))
        torchrun(WORKER, DEVICES, str(folder), str(ROUNDS[size]), str(STEPS[size]))
        found: Seconds = json.loads((folder / "results").read_text())
    return found


def planned_ms(schedule: Schedule) -> tuple[float, float]:
    """Planned time of a step with a barrier after it, and without one: makespan and device span."""
    data = schedule.problem.to_data()
    problems = [Problem.from_data(data | {"objective": objective}) for objective in ("makespan", "device_span")]
    makespan, span = (simulate(problem, schedule.orders).value_us * SECONDS_PER_US * 1e3 for problem in problems)
    return makespan, span


def _measure(size: Size, _: Path) -> str:
    found = measure(size)
    head = [
        "schedule",
        "makespan",
        "waits for all",
        "device span",
        "waits for none",
        "saved: planned",
        "saved: measured",
        "each step undone",
    ]
    rows = [_row(name, *planned_ms(schedule), found[name]) for name, schedule in schedules().items()]
    return f"{table(head, rows, text_columns=1)}\n\n`{COMMAND} --size {size}`: {machine()}. Milliseconds a step."


def _row(name: str, makespan: float, span: float, seconds: dict[str, float]) -> list[str]:
    waits, optimistic, wrong = (seconds[mode] * 1e3 for mode in ("waits", "optimistic", "wrong"))
    times = [f"{ms:.0f}" for ms in (makespan, waits, span, optimistic)]
    return [name, *times, f"{1 - span / makespan:.1%}", f"{1 - optimistic / waits:.1%}", f"{wrong:.0f}"]


SECTIONS = (
    Section(
        NAME,
        "Steps without a barrier",
        f"{DEVICES} processes over gloo, {MICROBATCHES} microbatches, stages that sleep as long as the plan says (F, B "
        "and W 30 ms each, so that two cores are enough for four devices). With a barrier a step should take the "
        "plan's makespan; where each device updates its weights at once and the sums are validated in the next step, "
        'its device span. "Each step undone": every update turns out wrong, so its successor begins twice. ZB-H1 has '
        "nothing to gain by plan: its first device works from the first op to the last.",
        COMMAND,
        _measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
