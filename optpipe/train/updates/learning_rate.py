"""The learning rate as a function of the step alone, so that a resumed run needs no state of it."""

from __future__ import annotations

import math

from optpipe.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """That of `step` in a run of `steps`.

    It rises linearly in the warm-up, whose first step already moves the weights, then stays or falls as half a cosine,
    which would be 0 at the step after the last.
    """
    warm_up = config.warm_up_steps
    if step < warm_up:
        return config.learning_rate * (step + 1) / (warm_up + 1)
    if config.decay == "none":
        return config.learning_rate
    share = (step - warm_up) / max(1, steps - warm_up)
    return config.learning_rate * (1 + math.cos(math.pi * min(1.0, share))) / 2
