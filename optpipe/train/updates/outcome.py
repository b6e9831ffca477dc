"""What became of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepOutcome:
    """A step whose update is settled; the same in every process, but for `seconds`.

    `loss` is the mean over the batch before the update; `gradient_norm` the 2-norm of all gradients of the model
    together, before clipping. `clipped`: they were scaled down to the largest norm allowed. `skipped`: loss or norm is
    not finite, and no weight was touched. `rolled_back`: an optimistic update had to be undone for one of these.
    `seconds`: from the step's begin to its end in this process, which with post-validation holds the wait for the step
    before.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    clipped: bool
    skipped: bool
    rolled_back: bool
    seconds: float
