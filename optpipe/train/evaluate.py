"""The loss of batches that are not trained on."""

from __future__ import annotations

from optpipe.train.model import Model


def evaluation_loss(model: Model, first_step: int, count: int) -> float:
    """The mean loss of the batches of `count` steps from `first_step` on, forward alone and in evaluation mode.

    Called by all processes together, between two settled steps, with the same answer.
    """
    losses = []
    for step in range(first_step, first_step + count):
        found = model.pipeline.evaluate(*model.own_part(model.task.batch(step)))
        losses.append(model.mean_loss(model.launch.sum(found)))
    return sum(losses) / count
