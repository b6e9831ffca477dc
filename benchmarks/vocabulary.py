"""Steps with a vocabulary layer on all devices: predicted from published passes, and what ours would take.

`python -m benchmarks.vocabulary vocabulary --size full` prints the table. The passes are those of 40 runs on 8 GPUs of
Vocabulary Parallelism (arXiv 2411.05288), as its repository has them (`benchmarks/published/README.md`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import machine, table
from benchmarks.section import Section, Size, main, say
from optpipe.problem import Problem
from solver.limits import Limits
from solver.solve import solve

NAME = "vocabulary"
COMMAND = f"python -m benchmarks.vocabulary {NAME}"
RUNS = Path(__file__).parent / "published" / "vocabulary_runs.csv"
MICROBATCHES = 128
TIME_LIMIT_S: dict[Size, float] = {"quick": 5.0, "full": 20.0}

METHODS = {"base": "1f1b", "redis": "1f1b", "vocab": "vocab-2", "synctwice": "vocab-1"}
"""Our name of the schedule of each method: the layer in the last stage, layers cut anew, Algorithms 2 and 1."""

LABELS = {"base": "in the last stage", "redis": "layers cut anew", "vocab": "vocab-2", "synctwice": "vocab-1"}

FIRST_SHARE = {"vocab": 2 / 3, "synctwice": 1 / 3}
"""Share of S in the time of both passes: of three equal products it has two in Algorithm 2, one in Algorithm 1."""


@dataclass(frozen=True)
class Run:
    """A published run: milliseconds of its step, and microseconds of every device's passes for one microbatch."""

    method: str
    vocabulary: int
    sequence: int
    step_ms: float
    forward_us: Sequence[float]
    backward_us: Sequence[float]
    passes_us: Sequence[float]
    hop_us: float

    def problem(self, *, spare: int | None = None, splits: bool = False) -> Problem:
        """The problem of the run: with `spare` microbatches more than 1F1B holds on each device, with halved backwards.

        An activation counts as one byte. Collectives count as no time, since their times are not published.
        """
        devices = len(self.forward_us)
        stages = [
            {"device": d, "forward_us": forward, "backward_input_us": backward / 2, "backward_weight_us": backward / 2}
            | {"activation_bytes": 2, "backward_weight_bytes": 1, "split_backward": splits}
            for d, (forward, backward) in enumerate(zip(self.forward_us, self.backward_us, strict=True))
        ]
        data: dict[str, Any] = {"format": "optpipe.problem/1", "microbatches": MICROBATCHES, "stages": stages}
        data["devices"] = [
            {"memory_bytes": None if spare is None else 2 * (devices - d + spare)} for d in range(devices)
        ]
        data["transfer_us"] = self.hop_us
        if self.method in FIRST_SHARE:
            share, last = FIRST_SHARE[self.method], devices - 1
            first, second = ([part * us for us in self.passes_us] for part in (share, 1 - share))
            data["spread"] = [
                {"name": "S", "us": first, "after": [{"op": "F", "stage": last}]},
                {"name": "T", "us": second, "after": [{"pass": "S"}]},
            ]
            gate = "S" if self.method == "vocab" else "T"
            data["gates"] = [{"op": "B", "stage": last, "after": [{"pass": gate}]}]
        return Problem.from_data(data)


def runs() -> Iterator[Run]:
    """All published runs but those of a synchronous layer (interlaced), for which no schedule is published."""
    with RUNS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    hops = {(row["vocabulary"], row["sequence"]): row["hop_us"] for row in rows if row["method"] == "vocab"}
    for row in rows:
        if row["method"] not in METHODS:
            continue
        times = {name: [float(us) for us in text.split()] for name, text in row.items() if name.endswith("_us")}
        # The embedding's passes run with the first stage's in the published order, and count as a part of it here.
        forward, backward = (
            [own + more for own, more in zip(times[name], times[f"input_{name}"], strict=True)]
            for name in ("forward_us", "backward_us")
        )
        hop_us = float(hops[row["vocabulary"], row["sequence"]].split()[0])
        sizes = int(row["vocabulary"]), int(row["sequence"]), float(row["step_ms"])
        yield Run(row["method"], *sizes, forward, backward, times["passes_us"], hop_us)


def measure(size: Size, _: Path) -> str:
    """Predict every run, and solve those with passes in the memory of `vocab-2`."""
    chosen = [run for run in runs() if size == "full" or (run.vocabulary, run.sequence) == (256_000, 2048)]
    lines = []
    for run in chosen:
        say(f"{run.vocabulary} words, {run.sequence} tokens, {LABELS[run.method]}")
        predicted_ms = solve(run.problem(), METHODS[run.method]).value_us / 1000
        error = predicted_ms / run.step_ms - 1
        cells = [f"{run.vocabulary // 1000}k", str(run.sequence), LABELS[run.method], f"{run.step_ms:,.0f}"]
        cells += [f"{predicted_ms:,.0f}", f"{error:+.1%}"]
        cells += [*_ours(run, TIME_LIMIT_S[size])] if run.method == "vocab" else ["", "", ""]
        lines.append(cells)
    header = ["words", "tokens", "layer", "measured ms", "predicted ms", "error", "ours, fused", "ours, split", "bound"]
    notes = (
        "Measured and published: 8 A100, 32 layers, 128 microbatches. Predicted: the published times of each device's "
        "passes in `1f1b`, `vocab-2` and `vocab-1`, with no time for collectives, of which none is published. Ours: "
        "`auto` for these times in the memory of `vocab-2`, with fused backwards, and with backwards split in halves; "
        "the bound is that of both. What is ours is predicted and was not run."
    )
    return f"{table(header, lines, 3)}\n\n{notes}\n\n{machine()}"


def _ours(run: Run, time_limit_s: float) -> Iterator[str]:
    schedules = [
        solve(run.problem(spare=1, splits=splits), "auto", Limits(time_limit_s, workers=2)) for splits in (False, True)
    ]
    for schedule in schedules:
        yield f"{schedule.value_us / 1000:,.0f}"
    yield f"{min(schedule.bound_us for schedule in schedules) / 1000:,.0f}"


SECTIONS = [
    Section(
        NAME,
        "A vocabulary layer on all devices",
        "Published times of the passes of a vocabulary layer predict the published steps, and what an order of ours "
        "would save.",
        COMMAND,
        measure,
    )
]


if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
