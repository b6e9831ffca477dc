"""Callbacks between two steps of training: checkpoints, new schedules, recording."""

from __future__ import annotations

from optpipe.runtime.recorder import MemoryMeter, Recorder
from optpipe.train.update import StepOutcome


class Callback:
    """One that never does anything; others override what they need.

    The loop asks all boundaries in one order, the same in every process. With post-validation a step's outcome is
    known one step later, so a wish acts two boundaries after the step in which it arose; before `on_step_boundary` and
    before a step with a recorder the loop settles all updates.
    """

    stopped = False
    """Set by `on_step_boundary`: the run ends before the step that it acted before."""

    def is_due(self, _step: int, /) -> bool:
        """Whether to act before this step; also asked of the step after the last. The same in every process, untold."""
        return False

    def requests(self) -> bool:
        """Whether this process wishes to act soon. Asked after each step and told to all with its losses."""
        return False

    def on_step_boundary(self, _step: int, /) -> None:
        """Before this step, in every process together: it is due, or some process asked. All updates are settled."""

    def recorder(self, _step: int, /) -> Recorder | None:
        """What watches the actions of this step; None: nothing. The same answer, as far as None goes, everywhere."""
        return None

    def meter(self, _step: int, /) -> MemoryMeter | None:
        """What counts the memory of this step; None: nothing. Not asked where a recorder times its actions."""
        return None

    def done(self, _outcome: StepOutcome, /) -> None:
        """A step's outcome is known, in every process alike but for its seconds."""

    def end(self) -> None:
        """The run is over, whichever way."""
