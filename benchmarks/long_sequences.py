"""Memory of long sequences that run slice by slice, measured in a step of training.

`python -m benchmarks.long_sequences long-sequences` prints a Markdown table. Bytes depend on no clock and no load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import Row, machine, table
from benchmarks.section import Section, Size, main, say
from instances import uniform
from optpipe.errors import TrainingError
from optpipe.train import ModelConfig, TrainingConfig, train
from solver.solve import solve

COMMAND = "python -m benchmarks.long_sequences long-sequences"
SHORT, LONG = 8, 32
DEVICES = {"quick": (4,), "full": (4, 8)}
SLICES = (4, 8, 16)


@dataclass(frozen=True)
class Step:
    """A step of so many devices and microbatches, on sequences of a length in tokens, cut into slices."""

    devices: int
    sequence: int
    slices: int = 1

    def row(self, short_bytes: int | None = None) -> tuple[int, Row]:
        """The highest measured peak in bytes, and the row of the table. Raises TrainingError if the check fails."""
        problem = uniform(self.devices, self.devices, slices={"count": self.slices})
        schedule = solve(problem, "1f1b" if self.slices == 1 else "seq1f1b")
        model = ModelConfig("tiny", layers=8, sequence=self.sequence, microbatch_size=4)
        check = train(TrainingConfig(schedule, model, steps=1, check=True)).check
        assert check is not None
        if check.failures:
            raise TrainingError("; ".join(check.failures))
        peak_bytes = max(device.peak_bytes for device in check.devices)
        planned_bytes = max(device.planned_peak_bytes for device in check.devices)
        cells = (self.devices, self.sequence, self.slices, peak_bytes, planned_bytes)
        share = peak_bytes / (short_bytes or peak_bytes)
        return peak_bytes, (*(f"{cell:,}" for cell in cells), f"{share:.2f}", f"{check.loss_error:.1e}")


def measure(size: Size, pictures: Path) -> str:
    """Train a step of short sequences, and of long ones whole and in slices; returns the table."""
    del pictures  # nothing is drawn
    rows = []
    for devices in DEVICES[size]:
        short_bytes, row = Step(devices, SHORT).row()
        rows.append(row)
        for slices in (1, *SLICES):
            rows.append(Step(devices, LONG, slices).row(short_bytes)[1])
            say(" ".join(rows[-1]))
    columns = ("p = m", "tokens", "slices", "peak bytes", "planned", "of short ones", "loss error")
    return (
        f"{table(columns, rows, 0)}\n\nThe GPT `tiny` of `optpipe train` with 8 layers, float32, 1F1B for whole "
        "sequences and Seq1F1B for slices; the peak of the fullest device. Gradients and losses are compared with "
        f"those of the plain step on whole sequences.\n\n`{COMMAND} --size {size}`: {machine()}."
    )


SECTIONS = (
    Section(
        "long-sequences",
        "Long sequences in slices",
        "Activation memory of sequences four times as long, whole and in slices, against that of the short ones.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
