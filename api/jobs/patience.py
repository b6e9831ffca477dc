"""Whether the silence of other workers means anything."""

from __future__ import annotations

import time
from collections.abc import Callable


class Patience:
    """Where all were cut off from the database, those who come back first wait for the others.

    A worker that could not reach it, or that was itself stopped for a while, finds the heartbeats of all others old.
    It leaves them the time of one heartbeat to be heard again; but where it is late all the time, only every other one,
    so that lost jobs are found on a machine that is too busy as well.
    """

    def __init__(self, heartbeat_s: float, clock: Callable[[], float] = time.time) -> None:
        # The clock on the wall: the other one stands still while a machine sleeps.
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._seen_s = clock()
        self._until_s = float("-inf")
        self._away = False

    @property
    def asked_for(self) -> bool:
        """Whether to leave the jobs of silent workers alone for now."""
        now_s = self._clock()
        late = now_s - self._seen_s > self._heartbeat_s / 2  # it looks twice as often, unless it is held up
        if late and now_s > self._until_s + self._heartbeat_s:
            self._until_s = now_s + self._heartbeat_s
        return self._away or now_s < self._until_s

    def seen(self) -> None:
        """The database has answered."""
        self._seen_s = self._clock()
        if self._away:
            self._away = False
            self._until_s = self._seen_s + self._heartbeat_s

    def lost(self) -> None:
        """The database has not answered."""
        self._away = True
