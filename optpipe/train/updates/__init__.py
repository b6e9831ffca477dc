"""From gradients to weights: learning rate, norm, clipping, and steps that do not wait for other devices."""

from optpipe.train.updates.outcome import StepOutcome
from optpipe.train.updates.updates import Updates

__all__ = ["StepOutcome", "Updates"]
