"""Layers whose weight gradients are computed in B, and their share of the backward's time.

Splitting B and W pays for its memory only if W takes a large part of the backward. Layers of kinds without a registered
split are left to autograd, which computes all gradients in B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from optpipe.profile.ops import ClockName, Key, stopwatch_for
from optpipe.runtime.messages import Gradient, Tree
from optpipe.runtime.probe import unchanged
from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients import undeferred_layers

LEAST_SHARE = 0.01
"""Kinds of layers below this share of the backward's time are not reported."""

ROUNDS = 3
NAMED = 3
"""Most layers named in a message."""


@dataclass(frozen=True)
class Undeferred:
    """Layers of one kind in a stage whose weight gradients are computed in B.

    `layers` are their names in the stage's module, "" for the module itself; `share` is the part of the time of B and W
    spent on these gradients.
    """

    stage: int
    kind: str
    layers: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        named = ", ".join(name or "the module itself" for name in self.layers[:NAMED])
        more = f" and {len(self.layers) - NAMED} more" if len(self.layers) > NAMED else ""
        return (
            f"stages[{self.stage}]: {self.share:.0%} of the backward's time stays in B: no weight gradient of "
            f"{self.kind} ({named}{more}) is deferred to W. Maybe register how it splits, or build it of nn.Linear: "
            "see docs/weight-gradients.md."
        )


def measure_undeferred(
    number: int, stage: Stage, received: Tree, target: Tree | None, gradient: Gradient, clock: ClockName = "wall"
) -> list[Undeferred]:
    """Time the backward of a microbatch with and without the undeferred weight gradients, kind by kind.

    Leaves no mark on the stage. Returns nothing for a compiled stage.
    """
    kinds = undeferred_layers(stage.module) if stage.splits else {}
    if not kinds:
        return []
    if stage.device.type == "cpu" and torch.get_num_threads() == 1:
        clock = "cpu"  # other programs would distort the difference of two wall times
    watch = stopwatch_for(stage.device, clock)
    forward = partial(stage.forward, 0, received, target, offloads=False)
    with unchanged([stage]):
        stage.begin_step()
        stage.zero_gradients()
        forward()
        stage.backward_input(0, gradient)
        stage.backward_weight(0)
        kinds = undeferred_layers(stage.module)  # by now layers have shown what they do with their matrices
        for round_number in range(1 + ROUNDS if kinds else 0):
            if round_number == 1:  # the first was warm-up
                watch.restart()
            forward()
            watch.time(Key("B", number), partial(stage.backward_input, 0, gradient))
            watch.time(Key("W", number), partial(stage.backward_weight, 0))
            for kind, layers in kinds.items():
                with _frozen([p for layer in layers.values() for p in layer.parameters(recurse=False)]):
                    forward()
                    watch.time(Key(f"B without {kind}", number), partial(stage.backward_input, 0, gradient))
                stage.backward_weight(0)
    if not kinds:
        return []
    least_us = {key.kind: min(samples) for key, samples in watch.samples_us().items()}
    backward_us = least_us["B"] + least_us["W"]
    undeferred = []
    for kind, layers in kinds.items():
        share = (least_us["B"] - least_us[f"B without {kind}"]) / backward_us
        if share >= LEAST_SHARE:
            undeferred.append(Undeferred(number, kind, tuple(layers), share))
    return sorted(undeferred, key=lambda one: -one.share)


@contextmanager
def _frozen(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Exclude parameters from autograd within this context."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
