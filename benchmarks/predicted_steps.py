"""Accuracy of the step time predicted by a profile, in one process on the CPU.

`python -m benchmarks.predicted_steps predicted-steps --size quick` prints the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.markdown import machine, table
from benchmarks.section import Section, Size, main, say

NAME = "predicted-steps"
COMMAND = f"python -m benchmarks.predicted_steps {NAME}"
WIDTH, ROWS, CLASSES = 512, 256, 10


class Subject(NamedTuple):
    """Subject of a profile: its name, and the options of `optpipe profile` for it."""

    name: str
    options: Sequence[str]


SUBJECTS: dict[Size, Sequence[Subject]] = {
    "quick": (Subject("tiny GPT, 2 stages", ("--model", "tiny", "--devices", "2", "--microbatches", "4")),),
    "full": (
        Subject("small GPT, 4 stages, linear", ("--model", "small", "--devices", "4", "--microbatches", "8")),
        Subject(
            "medium GPT, 4 stages, V",
            ("--model", "medium", "--devices", "2", "--placement", "v", "--microbatches", "4"),
        ),
        Subject(
            f"perceptron {WIDTH} wide, 4 stages, V",
            ("--model", "benchmarks.predicted_steps:perceptron", "--placement", "v", "--microbatches", "8"),
        ),
    ),
}


def perceptron() -> tuple[list[nn.Module], Tensor, Tensor, nn.Module]:
    """Return stages, inputs, targets and loss, as `optpipe profile --model` requires."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    first, last = nn.Sequential(nn.Linear(CLASSES, WIDTH), block()), nn.Sequential(block(), nn.Linear(WIDTH, CLASSES))
    inputs, targets = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    return [first, block(), block(), last], inputs, targets, nn.CrossEntropyLoss()


def checked(subject: Subject) -> dict[str, Any]:
    """Run `optpipe profile --check` with one thread and its CPU clock; progress goes to stderr."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "optpipe", "profile", *subject.options, "--clock", "cpu", "--check", "--json"]
        run = subprocess.run(
            [*command, "-o", str(Path(folder) / "problem.json")],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    check: dict[str, Any] = json.loads(run.stdout)["check"]
    return check


def row(subject: Subject, check: dict[str, Any]) -> list[str]:
    """Cells of a subject; the last is the kind of action with the largest difference, as a share of the step."""
    step, predicted_us = check["step"], check["predicted_serial_us"]
    differences = {share["kind"]: share["recorded_us"] - (share["predicted_us"] or 0.0) for share in check["shares"]}
    worst = max(differences, key=lambda kind: abs(differences[kind]))
    return [
        subject.name,
        check["method"],
        f"{predicted_us / 1000:,.1f}",
        f"{step['median_us'] / 1000:,.1f}",
        f"{check['measured_over_predicted']:.3f}",
        f"{(step['upper_us'] - step['lower_us']) / step['median_us']:.1%}",
        f"{worst} {differences[worst] / step['median_us']:+.1%}",
    ]


def _measure(size: Size, _: Path) -> str:
    rows = []
    for subject in SUBJECTS[size]:
        say(f"   {subject.name}")
        rows.append(row(subject, checked(subject)))
    head = ["model", "schedule", "predicted, ms", "measured, ms", "measured / predicted", "quartiles", "differs most"]
    conditions = f"`{COMMAND} --size {size}`: {machine()}, torch {version('torch')} on one thread."
    return f"{table(head, rows, text_columns=2)}\n\n{conditions}"


SECTIONS = (
    Section(
        NAME,
        "Steps as predicted",
        "`optpipe profile --check`: a step predicted from the measured ops against steps that ran, all devices in one "
        "process, by the computing thread's clock. Quartiles are those of the measured steps.",
        COMMAND,
        _measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
