"""The figures of a run for TensorBoard, where that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.extras import needs_extra
from optpipe.train.result import StepReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10


class Scalars:
    """Writes the steps of a run to a folder. A resumed run hides what was written from its first step on.

    Raises MissingExtraError at once where TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        with needs_extra("tensorboard", "writing TensorBoard scalars"):
            from torch.utils import tensorboard
        self._make = tensorboard.SummaryWriter
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def __call__(self, report: StepReport) -> None:
        """Write a step."""
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=report.step, flush_secs=FLUSH_SECONDS)
        figures = {
            "loss": report.loss,
            "tokens per second": report.tokens_per_second,
            "step seconds": report.seconds,
            "learning rate": report.learning_rate,
            "gradient norm": report.gradient_norm,
            "bubble": report.bubble,
            "peak memory bytes": report.peak_memory_bytes,
        }
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, report.step)
        for event in report.events:
            self._writer.add_text("events", event.text, report.step)

    def close(self) -> None:
        """Nothing comes any more."""
        if self._writer is not None:
            self._writer.close()
