"""What happened between steps because of profiling and solving: told as it happens, and kept for the end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

LOG = logging.getLogger("optpipe.train.online")

EventKind = Literal["measured", "timed", "solving", "found", "swapped", "kept", "back", "memory"]


@dataclass(frozen=True)
class OnlineEvent:
    """One thing that happened before step `step`, in words, with what it took of the training's time.

    `measured`: ops were measured before the first step. `timed`: ops were timed in steps. `solving`: a search began.
    `found`: it ended. `swapped`, `kept`: its schedule was taken or not. `back`: the one before is in use again.
    `memory`: a device held more than planned.
    """

    step: int
    kind: EventKind
    text: str
    seconds: float = 0.0


class Events:
    """The events so far, of a process; one that leads tells them to the log too."""

    def __init__(self, leads: bool) -> None:
        self._leads = leads
        self.all: list[OnlineEvent] = []

    def tell(self, step: int, kind: EventKind, text: str, seconds: float = 0.0, *, warning: bool = False) -> None:
        """Keep an event. A warning says itself which step it is about."""
        self.all.append(OnlineEvent(step, kind, text, seconds))
        if self._leads:
            if warning:
                LOG.warning("%s", text)
            else:
                LOG.info("before step %d: %s", step, text)
