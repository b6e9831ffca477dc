"""Task protocol: a model cut into stages, its loss and its batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import nn

from optpipe.cluster.model import Model as Architecture
from optpipe.runtime.loss import Loss
from optpipe.runtime.messages import Tree
from optpipe.train.lengths import Sizes
from optpipe.train.tasks.loader import LoadedBatches

Batch = tuple[list[Tree], list[Tree]]
"""Inputs and targets by microbatch."""


class Task(Protocol):
    """Given by its config and seed alone, so that every process builds the same."""

    @property
    def loader(self) -> LoadedBatches | None:
        """Loader of the batches, which has a position; None where batches depend on the step alone."""
        ...

    @property
    def name(self) -> str:
        """Name for people, on one line."""
        ...

    @property
    def loss(self) -> Loss:
        """Mean over a microbatch."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens (rows, where there are none) of one microbatch."""
        ...

    @property
    def reference(self) -> Sizes:
        """Size of the microbatch whose costs a profile of this task states."""
        ...

    @property
    def architecture(self) -> Architecture | None:
        """Sizes of the layers, from which operations are counted as for a plan; None where they are not known."""
        ...

    def build_stages(self, own: Collection[int] | None = None, /) -> list[nn.Module]:
        """The stages on the CPU, the same weights at each call; what stages share by identity is one parameter.

        Stages that are not in `own` may be on the meta device, where they take no memory; None: this process needs all.
        """
        ...

    def batch(self, step: int) -> Batch:
        """Inputs and targets of a step, by microbatch, of all replicas.

        A function of the step alone, except for a loader's: those are asked for in their order, and are None where this
        process does not need them.
        """
        ...

    def model_name(self, stage: int, name: str, /) -> str:
        """Name that a stage's parameter or buffer `name` has in the whole model, however that is cut."""
        ...

    def identity(self) -> dict[str, Any]:
        """JSON values that must be equal in all processes, and in a checkpoint that is resumed: there except `cut`."""
        ...
