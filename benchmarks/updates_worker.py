"""Rank of the update benchmark.

Usage, under torchrun: updates_worker.py FOLDER ROUNDS STEPS. The folder holds schedules; rank 0 writes ``results``: by
schedule and mode of updating the seconds of a step, the least of all rounds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from benchmarks.updates_case import SleepyTask
from optpipe.compile import compile_schedule
from optpipe.schedule import Schedule
from optpipe.train import OptimizerConfig, TrainingConfig
from optpipe.train.launch import Launch, launched
from optpipe.train.model import Model
from optpipe.train.rollback import MOST_ROLLBACKS

WARM_UP = 3
NEVER, ALWAYS = 1e9, 1e-9
"""Norm limits that no step, and every step, exceeds."""


def main(folder: Path, rounds: int, steps: int) -> None:
    """Measure every schedule of the folder in all update modes in turns, so that other load affects all alike."""
    torch.set_num_threads(1)
    schedules = {path.name.removesuffix(".json"): Schedule.load(path) for path in sorted(folder.glob("*.json"))}
    found: dict[str, dict[str, list[float]]] = {
        name: {"waits": [], "optimistic": [], "wrong": []} for name in schedules
    }
    with launched(len(next(iter(schedules.values())).devices), timeout_seconds=120) as launch:
        for _ in range(rounds):
            for name, schedule in schedules.items():
                found[name]["waits"].append(_seconds(schedule, launch, steps, optimistic=False))
                found[name]["optimistic"].append(_seconds(schedule, launch, steps, optimistic=True))
                found[name]["wrong"].append(_seconds_of_wrong_steps(schedule, launch))
        if launch.rank == 0:
            least = {name: {mode: min(seconds) for mode, seconds in modes.items()} for name, modes in found.items()}
            (folder / "results").write_text(json.dumps(least))


def _seconds(schedule: Schedule, launch: Launch, steps: int, *, optimistic: bool) -> float:
    """Seconds per step over many: from a barrier to the end of the last step on the slowest rank."""
    model = _model(schedule, launch, NEVER, optimistic=optimistic)
    batch = model.task.batch(0)
    for _ in range(WARM_UP):
        model.step(batch)
    model.settle()
    launch.gather(None)
    begin = perf_counter()
    for _ in range(steps):
        model.step(batch)
    model.settle()
    slowest_s: float = max(launch.gather(perf_counter() - begin))
    return slowest_s / steps


def _seconds_of_wrong_steps(schedule: Schedule, launch: Launch) -> float:
    """Seconds per step if each rolls back the one before; after `MOST_ROLLBACKS` of these updates would wait."""
    model = _model(schedule, launch, ALWAYS, optimistic=True)
    batch = model.task.batch(0)
    outcomes = [outcome for _ in range(MOST_ROLLBACKS + 2) for outcome in model.step(batch)] + model.settle()
    own_s = median(outcome.seconds for outcome in outcomes[1 : MOST_ROLLBACKS + 1])
    slowest_s: float = max(launch.gather(own_s))
    return slowest_s


def _model(schedule: Schedule, launch: Launch, clip_norm: float, *, optimistic: bool) -> Model:
    config = TrainingConfig(schedule, optimizer=OptimizerConfig(clip_norm=clip_norm, learning_rate=1e-6))
    return Model(
        replace(config, steps=10**6),
        compile_schedule(schedule),
        launch,
        optimistic=optimistic,
        task=SleepyTask(schedule.problem),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
