"""`[checkpoints]`: where the state of a run is kept, how often, and whether to go on from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from optpipe.errors import Issue
from optpipe.train.config.setting import Group, setting


@dataclass(frozen=True)
class CheckpointConfig(Group):
    """Checkpoints of a run; without a folder there are none."""

    table: ClassVar[str] = "checkpoints"

    folder: Path | None = setting(
        None, "where checkpoints are kept; under torchrun on a file system that all hosts share", flag="checkpoint"
    )
    every_steps: int = setting(
        100, "steps from one checkpoint to the next; one is written at the end, too", least=1, flag="checkpoint-every"
    )
    keep: int = setting(2, "how many of the newest checkpoints stay", least=1, most=10**6)
    resume: Literal["auto", "never", "must"] = setting(
        "auto",
        "auto: go on from the newest checkpoint that is whole, if there is any; must: from the newest, which must be "
        "whole; never: begin anew, in a folder without checkpoints",
    )

    def conflicts(self) -> Iterator[Issue]:
        """Going on needs something to go on from."""
        if self.folder is None and self.resume == "must":
            yield Issue("resume", "no_folder", "is 'must', but folder does not say from where. Maybe add --checkpoint.")
