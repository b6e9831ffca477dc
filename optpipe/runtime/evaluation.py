"""Modules in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within: no dropout, and norms use what they have learnt. Afterwards each layer is in the mode that it was in."""
    layers = [layer for module in modules for layer in module.modules()]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
