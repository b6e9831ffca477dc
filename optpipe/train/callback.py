"""What acts between two steps of training: checkpoints, new schedules, recording."""

from __future__ import annotations

from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.trace import Recorder
from optpipe.train.updates.outcome import StepOutcome


class Boundary:
    """One that never does anything; others override what they need.

    The loop asks all boundaries in one order, the same in every process. With post-validation a step's outcome is
    known one step later, so a wish acts two boundaries after the step in which it arose; before `act` and before a
    step with a recorder the loop settles all updates.
    """

    stopped = False
    """Set by `act`: the run ends before the step that it acted before."""

    def due(self, _step: int, /) -> bool:
        """Whether to act before this step; also asked of the step after the last. The same in every process, untold."""
        return False

    def asks(self) -> bool:
        """Whether this process wishes to act soon. Asked after each step and told to all with its losses."""
        return False

    def act(self, _step: int, /) -> None:
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
