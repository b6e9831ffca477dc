"""Layers whose weight gradients stay in B: which they are, and what of the backward's time that is.

B and W are worth their memory where W takes a good part of the backward with it. Layers of kinds that no split is
registered for are left to autograd, which computes all gradients in B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from optpipe.profile.ops import ClockName, Key, stopwatch_for
from optpipe.runtime.messages import Gradient, Tree
from optpipe.runtime.probe import unchanged_stage
from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients import undeferred_layers

LEAST_SHARE = 0.01
"""Below this share of the backward's time a kind of layers is not worth a word."""

ROUNDS = 3
NAMED = 3
"""Layers that a sentence names."""


@dataclass(frozen=True)
class Undeferred:
    """The layers of one kind in a stage whose weight gradients are computed in B.

    `layers` are their names in the stage's module, "" for the module itself; `share` is what these gradients take of
    the time of B and W together.
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
    """Time the backward of a microbatch with and without the weight gradients that are not deferred, kind by kind.

    Leaves gradients behind in the stage, buffers and random numbers as they were. Nothing for a compiled stage.
    """
    kinds = undeferred_layers(stage.module) if stage.splits else {}
    if not kinds:
        return []
    if stage.device.type == "cpu" and torch.get_num_threads() == 1:
        clock = "cpu"  # a difference of two times is worth nothing where other programs lengthen one of them
    watch = stopwatch_for(stage.device, clock)
    forward = partial(stage.forward, 0, received, target, offloads=False)
    with unchanged_stage(stage):
        stage.begin_step()
        stage.zero_gradients()
        for round_number in range(1 + ROUNDS):
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
    least_us = {key.kind: min(samples) for key, samples in watch.samples_us().items()}
    backward_us = least_us["B"] + least_us["W"]
    found = []
    for kind, layers in kinds.items():
        share = (least_us["B"] - least_us[f"B without {kind}"]) / backward_us
        if share >= LEAST_SHARE:
            found.append(Undeferred(number, kind, tuple(layers), share))
    return sorted(found, key=lambda one: -one.share)


@contextmanager
def _frozen(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Within, autograd computes no gradient of them."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
