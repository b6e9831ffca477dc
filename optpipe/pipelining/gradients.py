"""Gradients of a stage after its last backward: what is still to be done before they are those of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from optpipe.runtime import Stage


class GradientCompletion:
    """Scales the gradients of all stages of this process at the end of a step.

    `divisor` divides what is then in `.grad`, gradients of earlier steps included, as torch's schedules do.
    """

    def __init__(self, stages: Mapping[int, Stage], divisor: int) -> None:
        self._modules: dict[int, nn.Module] = {number: stage.module for number, stage in stages.items()}
        self._divisor = divisor

    @property
    def reducers(self) -> Mapping[int, Callable[[], None]]:
        """For each stage, what its REDUCE starts."""
        return dict.fromkeys(self._modules, _nothing)

    def finish(self) -> None:
        """Scale gradients, if asked to."""
        if self._divisor != 1:
            for module in self._modules.values():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(self._divisor)

    def clear(self) -> None:
        """Nothing is under way."""


def _nothing() -> None:
    pass
