"""Predictions held against published training steps: fits what the machines ship with, and writes docs/accuracy.md."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.markdown import table
from benchmarks.plan_regret import Regret, regret_table, regrets
from benchmarks.schedule_ratios import ratios
from benchmarks.section import say
from optpipe.cluster.calibrate import calibrate, memory_of, predict, split_rows
from optpipe.cluster.machine import Machine, named_machines
from optpipe.cluster.rows import Row, Skipped, read_rows
from optpipe.errors import InputError

FOLDER = Path(__file__).parent / "published"
PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
MACHINES = Path(__file__).parents[1] / "optpipe" / "cluster" / "machines"
FOLDS = 5
LEAST_ROWS = 10
"""Rows from which a machine is calibrated: as many as kinds of work occur in them, and no fewer."""
FAR = 0.25
SOURCE = "published training steps (docs/accuracy.md)"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write")
    parser.add_argument("--machines", type=Path, default=MACHINES, help="folder of machine files to write")
    options = parser.parse_args()
    rows, skipped = read_rows(FOLDER / "steps.csv", FOLDER / "models.json")
    ended, _ = read_rows(FOLDER / "out_of_memory.csv", FOLDER / "models.json")
    results = []
    for name, machine in named_machines().items():
        bare = machine.model_copy(update={"efficiencies": []})
        mine = [row for row in split_rows(bare, rows)[0] if row.seconds is not None]
        if len(mine) >= LEAST_ROWS:
            say(f"{name}: {len(mine)} steps")
            fitted = calibrate(bare, mine, SOURCE)
            results.append(Result(fitted, mine, _held_out(bare, mine)))
            bare = fitted
        (options.machines / f"{name}.toml").write_text(bare.to_toml(), encoding="utf-8")
    options.page.write_text(_page(results, rows, ended, skipped), encoding="utf-8")


class Result:
    """A calibrated machine, its steps, and their errors when they are fitted and when they are not."""

    def __init__(self, machine: Machine, rows: Sequence[Row], unseen: dict[str, float]) -> None:
        self.machine, self.rows, self.unseen = machine, rows, unseen
        self.fitted = {row.name: predict(machine, row).error for row in rows}
        self.predicted = {row.name: predict(machine, row).seconds for row in rows}


def _held_out(machine: Machine, rows: Sequence[Row]) -> dict[str, float]:
    """Error of each step when it is in the fifth that is not fitted; none where the others are too few for a fit."""
    order = np.random.default_rng(0).permutation(len(rows))
    errors: dict[str, float] = {}
    for fold in range(FOLDS):
        chosen = {int(k) for k in order[fold::FOLDS]}
        try:
            fitted = calibrate(machine, [row for k, row in enumerate(rows) if k not in chosen], leave_out=False)
        except InputError:
            return {}
        errors |= {rows[k].name: predict(fitted, rows[k]).error for k in chosen}
    return errors


def _kind(row: Row) -> str:
    return "experts" if any(layer.feed_forward.experts for layer in row.model.layers) else "dense"


def _errors(names: Iterable[str], errors: dict[str, float]) -> list[str]:
    values = np.abs([errors[name] for name in names])
    if not len(values):
        return ["-", "-"]
    return [f"{np.median(values):.1%}", f"{np.percentile(values, 90):.1%}"]


def _by(results: Sequence[Result], key: Callable[[Result, Row], tuple[str, ...]]) -> list[list[str]]:
    """Rows of a table: median and 90th percentile of the errors, fitted and held out, of groups of steps."""
    groups: dict[tuple[str, ...], list[tuple[Result, Row]]] = defaultdict(list)
    for result in results:
        for row in result.rows:
            groups[key(result, row)].append((result, row))
    lines = []
    for name, members in groups.items():
        fitted = {row.name: result.fitted[row.name] for result, row in members}
        unseen = {row.name: result.unseen[row.name] for result, row in members if row.name in result.unseen}
        lines.append([*name, str(len(members)), *_errors(fitted, fitted), *_errors(unseen, unseen)])
    return lines


def _page(results: Sequence[Result], rows: Sequence[Row], ended: Sequence[Row], skipped: Sequence[Skipped]) -> str:
    head = ["steps", "fitted: half within", "90 % within", "held out: half within", "90 % within"]
    parts = [
        _INTRODUCTION.format(steps=sum(len(result.rows) for result in results), machines=len(results)),
        "## By machine\n",
        table(
            ["machine", "precision", "model", *head],
            _by(results, lambda result, row: (result.machine.name, row.strategy.precision, _kind(row))),
            3,
        ),
        _MODELS,
        table(["machine", "precision", "steps", "half within"], _unseen_models(results), 2),
        "\n## By source\n",
        table(
            ["source", "machine", *head],
            _by(results, lambda result, row: (row.software.split("/")[0], result.machine.name)),
            2,
        ),
        _MEMORY,
        table(["source", "ranks", "half within", "worst"], _memory(rows), 1),
        _VERDICTS,
        table(
            ["source", "ran", "said to fit", "ran out of memory", "said not to fit", "told apart"],
            _verdicts(rows, ended),
            1,
        ),
        _REGRET,
        regret_table(*_regrets(results)),
        _SCHEDULES,
        table(
            ["source", "model", "devices", "microbatches", "over", "schedule", "measured", "predicted", "error"],
            _schedules(),
            2,
        ),
        _FAR.format(far=f"{FAR:.0%}"),
        table(["step", "machine", "predicted s", "measured s", "error", "notes of the source"], _far(results), 2),
        "\n## Not predicted\n",
        table(["reason", "steps"], _reasons(skipped), 1),
        "\n## Every step\n",
        table(["step", "machine", "model", "predicted s", "measured s", "error", "held out"], _all(results), 3),
    ]
    return "\n".join(parts) + "\n"


def _unseen_models(results: Sequence[Result]) -> list[list[str]]:
    return [
        [result.machine.name, one.precision, str(one.rows), f"{one.unseen_model_error:.1%}"]
        for result in results
        for one in result.machine.efficiencies
        if not one.software and one.unseen_model_error is not None
    ]


def _memory(rows: Sequence[Row]) -> list[list[str]]:
    machines = named_machines()
    errors = defaultdict(list)
    for row in rows:
        if row.machine in machines and row.allocated_gib is not None:
            peak_gib = memory_of(machines[row.machine], row).held.total / 2**30
            errors[row.software.split("/")[0]].append(abs(peak_gib / row.allocated_gib - 1))
    return [[name, str(len(own)), f"{np.median(own):.1%}", f"{max(own):.1%}"] for name, own in errors.items()]


def _verdicts(rows: Sequence[Row], ended: Sequence[Row]) -> list[list[str]]:
    machines = named_machines()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for at, some in ((0, rows), (2, ended)):
        for row in some:
            if row.machine in machines and (at or row.seconds is not None):
                own = counts[row.software.split("/")[0]]
                own[at] += 1
                own[at + 1] += memory_of(machines[row.machine], row).fits == (at == 0)
    lines = []
    for name, own in [*sorted(counts.items()), ("all", [sum(column) for column in zip(*counts.values(), strict=True)])]:
        lines.append([name, *map(str, own), f"{(own[1] + own[3]) / (own[0] + own[2]):.1%}"])
    return lines


def _regrets(results: Sequence[Result]) -> tuple[list[Regret], list[Regret]]:
    fitted = [(row, result.predicted[row.name]) for result in results for row in result.rows]
    unseen = [
        (row, (1 + result.unseen[row.name]) * (row.seconds or 0))
        for result in results
        for row in result.rows
        if row.name in result.unseen
    ]
    return regrets(fitted), regrets(unseen)


def _schedules() -> list[list[str]]:
    return [
        [
            one.source,
            one.model,
            str(one.devices),
            str(one.microbatches),
            one.base,
            one.schedule,
            f"{one.measured:.3f}",
            f"{one.predicted:.3f}",
            f"{one.predicted / one.measured - 1:+.1%}",
        ]
        for one in ratios()
    ]


def _far(results: Sequence[Result]) -> list[list[str]]:
    far = [(result, row) for result in results for row in result.rows if abs(result.fitted[row.name]) > FAR]
    return [
        [*_step(result, row), row.cells.get("notes", "").replace("|", "/").replace("<", "less than ")]
        for result, row in sorted(far, key=lambda one: -abs(one[0].fitted[one[1].name]))
    ]


def _step(result: Result, row: Row) -> list[str]:
    seconds = [f"{result.predicted[row.name]:.2f}", f"{row.seconds:.2f}", f"{result.fitted[row.name]:+.1%}"]
    return [row.name, result.machine.name, *seconds]


def _reasons(skipped: Sequence[Skipped]) -> list[list[str]]:
    counts: dict[str, int] = defaultdict(int)
    for one in skipped:
        counts[one.reason] += 1
    return [[reason, str(count)] for reason, count in sorted(counts.items(), key=lambda pair: -pair[1])]


def _all(results: Sequence[Result]) -> list[list[str]]:
    lines = []
    for result in results:
        for row in result.rows:
            name, machine, *figures = _step(result, row)
            unseen = f"{result.unseen[name]:+.1%}" if name in result.unseen else "-"
            lines.append([name, machine, row.model.name, *figures, unseen])
    return lines


_INTRODUCTION = """# Predictions against measured steps

Nothing here was run on a GPU of ours. In place of that: {steps} training steps on {machines} kinds of GPU, each
measured and published by somebody, and for each what the [cost model](cluster.md) says. `python -m benchmarks.accuracy`
fits the efficiencies that come with the program to them, and writes this page.

An error is predicted over measured, minus 1. *Fitted*: the step was among those fitted. *Held out*: it was in the fifth
that was not; this is what to expect of a layout of a team that has published others.
"""
_MODELS = """
A model that nobody has measured is harder. When all steps of a model are left out of the fit, half of them are within:
"""
_MEMORY = """
## Memory of a rank

Peaks as trainers allocate them, in GiB, against the sum of all kinds. Nothing was fitted here: formulas are those of
`optpipe.cluster.memory`.
"""
_VERDICTS = """
## What fits

Layouts that ran, and layouts that ran out of memory. What Aleph Alpha's trainer keeps was chosen on these very rows
(seven numbers); the others have the defaults.
"""
_REGRET = """
## Regret

What a planner is for: of all layouts that somebody ran for one model, number of GPUs, sequence and batch, how much
slower than the best was the one that is ranked first? Jobs with at least four layouts; `python -m
benchmarks.plan_regret` prints this for the machines as they ship.
"""
_SCHEDULES = """
## Schedules, one against another

Papers measured several schedules on the same model and GPUs, and profiled F, B, W and messages. Given these costs, the
simulator predicts how much faster each is: throughput over that of the schedule in the column `over`.

- Zero Bubble (2401.10241): throughput and costs are printed. ZB-V is the V-ZB of Controllable Memory.
- Controllable Memory (2405.15362): of V-Half and V-Min it prints the best of a search over degrees of parallelism, and
  names the point that was found for 1F1B alone. So there is no ratio on one layout, and no row here.
- PipeOffload (2503.01328): utilisation was read from a figure and rounded to 0.01, which moves a ratio by 2 %. What
  copies take from compute is not in these costs: where PO-F is as fast as PO-H by our times, it was slower by 5 to 6 %.
  GIS-H at 16,384 tokens held 51 GB of 80, and was slower than PO-H for a reason that the costs do not hold.
- Vocabulary Parallelism (2411.05288): passes of each device are in the artifact of its repository. Rows of `vocab-1`
  and `vocab-2` are the closed form of these schedules for means of them, costed as without such passes. Simulated with
  their own passes of each device the 32 runs are within
  [2 % but for long sequences with small vocabularies](benchmarks/training.md#a-vocabulary-layer-on-all-devices). Layers
  run slower beside the passes of the vocabulary, F by 9 to 10 % and B and W by 7 %. This was seen for a vocabulary of
  256k alone, and is counted there. The costs of the other rows are those of runs without such passes, and predictions
  are 7 to 9 % too high. How many layers the last stage kept when they were spread anew is certain for 256k alone: none.
"""
_FAR = """
## Steps that are farther than {far}

With what the sources say of them.
"""

if __name__ == "__main__":
    main()
