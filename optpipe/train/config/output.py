"""`[output]`: what a run leaves behind besides its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from optpipe.errors import Issue
from optpipe.train.config.setting import Group, setting

PICTURES = (".png", ".svg", ".html")


@dataclass(frozen=True)
class OutputConfig(Group):
    """Files that rank 0 writes."""

    table: ClassVar[str] = "output"

    metrics: Path | None = setting(None, "one JSON object a step and line")
    tensorboard: Path | None = setting(None, "folder of TensorBoard scalars")
    plot: Path | None = setting(None, "picture of the run (.png, .svg, .html), drawn at its end")
    trace: Path | None = setting(None, "what one step did, for 'optpipe trace'")
    trace_step: int | None = setting(None, "the step to record, counted from 0; default: one after warm-up", least=0)

    def conflicts(self) -> Iterator[Issue]:
        """Pictures have a few formats."""
        if self.plot is not None and self.plot.suffix.lower() not in PICTURES:
            yield Issue("plot", "unknown_format", f"is {str(self.plot)!r} but must end in {', '.join(PICTURES)}.")
