"""What a pattern search may still spend: time, or counted work."""

from __future__ import annotations

from dataclasses import dataclass

from solver.limits import Limits

PLACED_PER_SECOND = 400_000
"""Passes that the beam places in about a second."""

PLAYED_PER_SECOND = 2_000_000
"""Ops that are played in about a second."""

WRITTEN_PER_SECOND = 200_000
"""Ops of orders that are written down and simulated in about a second."""


@dataclass
class Effort:
    """Counts work where the limits are deterministic, else asks the clock. `work` is in units of about a second."""

    limits: Limits
    work: float = 0.0

    def place(self, passes: int) -> None:
        """Count passes that are placed on their circles."""
        self.work += passes / PLACED_PER_SECOND

    def play(self, ops: int) -> None:
        """Count ops that are played."""
        self.work += ops / PLAYED_PER_SECOND

    def write(self, ops: int) -> None:
        """Count ops of orders that are written down and simulated."""
        self.work += ops / WRITTEN_PER_SECOND

    def spent(self) -> bool:
        """Whether the search must end."""
        return self.limits.cancel.requested or self.seconds >= self.allowed

    @property
    def allowed(self) -> float:
        """Seconds or units of work in all."""
        allowed = self.limits.deterministic_limit
        return self.limits.time_limit_s if allowed is None else allowed

    @property
    def seconds(self) -> float:
        """Seconds or units of work so far."""
        return self.limits.seconds if self.limits.deterministic_limit is None else self.work
