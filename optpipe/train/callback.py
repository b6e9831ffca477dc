"""Callbacks between two steps of training: checkpoints, new schedules, recording."""

from __future__ import annotations

from optpipe.runtime.recorder import MemoryMeter, Recorder
from optpipe.train.update import StepOutcome


class Callback:
    """Base class that does nothing; subclasses override what they need.

    The loop calls all callbacks in one order, the same on every rank. With post-validation a step's outcome is known
    one step later, so a request leads to `on_step_boundary` two boundaries after the step in which it arose. Before
    `on_step_boundary`, and before a step with a recorder, the loop settles all updates.
    """

    stopped = False
    """Set by `on_step_boundary` to end the run before the step that it was called for."""

    def is_due(self, _step: int, /) -> bool:
        """Return True to act before this step (also called for the step after the last).

        Must return the same value on every rank without communication.
        """
        return False

    def requests(self) -> bool:
        """Return True if this rank needs all ranks to act. Called after each step; travels with the step's sums."""
        return False

    def on_step_boundary(self, _step: int, /) -> None:
        """Act before this step, on every rank together: it is due, or some rank requested it. Updates are settled."""

    def recorder(self, _step: int, /) -> Recorder | None:
        """Recorder of the actions of this step, or None. All ranks return None, or none of them does."""
        return None

    def meter(self, _step: int, /) -> MemoryMeter | None:
        """Meter of the memory of this step, or None. Not called for a step with a recorder."""
        return None

    def done(self, _outcome: StepOutcome, /) -> None:
        """Take the outcome of a step, which is equal on every rank except for its seconds."""

    def end(self) -> None:
        """Clean up after the run, whether it completed or failed."""
