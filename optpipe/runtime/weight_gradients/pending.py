"""The weight gradients of a stage that B has left and W will compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Protocol

import torch
from torch import nn

from optpipe.errors import TrainingError


class Task(Protocol):
    """Adds the weight gradients of one call of one layer to `.grad` of `parameters`."""

    parameters: tuple[nn.Parameter, ...]

    def __call__(self) -> None:
        """Add them."""


class Splitting(Enum):
    """Which layers split their backward now."""

    NONE = 0
    """Outside of F and backwards, in evaluation for instance: they are the layers that they were."""
    LARGE = 1
    """Those that save memory by it, though nothing waits for W."""
    ALL = 2


class WeightGradients:
    """What the layers of one stage have left, by microbatch.

    `splitting` is what a layer goes by in F, and in B where a checkpoint runs a part of F again. An `observer` is told
    of every task that is done.
    """

    def __init__(self) -> None:
        self.splitting = Splitting.NONE
        self._kept: dict[int, deque[Task]] = {}
        self._put: Callable[[Task], None] = _refuse
        self._lost = False
        self.observer: Callable[[Task], None] | None = None

    @contextmanager
    def forward(self, splitting: Splitting = Splitting.ALL) -> Iterator[None]:
        """F: layers record how to split their backward. Raises TrainingError if another stage has taken one of them."""
        if self._lost:
            raise TrainingError(
                "a layer of this stage belongs to another Stage that was made later. "
                "Maybe hand each Stage modules of its own; they may share parameters."
            )
        self.splitting = splitting
        try:
            yield
        finally:
            self.splitting = Splitting.NONE

    def backward_input(self, microbatch: int, splitting: Splitting = Splitting.ALL) -> AbstractContextManager[None]:
        """B: weight gradients wait for `compute`. `splitting` is that of the microbatch's F."""
        return self._backward(self._kept.setdefault(microbatch, deque()).append, splitting)

    def backward(self, splitting: Splitting = Splitting.ALL) -> AbstractContextManager[None]:
        """BW: weight gradients are computed at once. `splitting` is that of the microbatch's F."""
        return self._backward(self._run, splitting)

    @contextmanager
    def _backward(self, put: Callable[[Task], None], splitting: Splitting) -> Iterator[None]:
        self._put, self.splitting = put, splitting
        try:
            yield
        finally:
            self._put, self.splitting = _refuse, Splitting.NONE

    def add(self, task: Task) -> None:
        """Called by a layer's backward."""
        self._put(task)

    def compute(self, microbatch: int) -> None:
        """W: compute what B of this microbatch left, layer by layer; each layer's tensors are freed as it is done."""
        tasks = self._kept.pop(microbatch)
        with torch.no_grad():
            while tasks:
                self._run(tasks.popleft())

    def _run(self, task: Task) -> None:
        task()
        if self.observer is not None:
            self.observer(task)

    def clear(self) -> None:
        """Drop everything that is kept."""
        self._kept.clear()

    def lose(self) -> None:
        """One of the layers has been taken by another stage, which gets its weight gradients from now on."""
        self._lost = True


def _refuse(_: Task) -> None:
    raise TrainingError(
        "a layer's weight gradient was asked for within F: a stage that differentiates in its forward cannot split "
        "its backward. Maybe give that part of the module a forward of its own, without nn.Linear and the like."
    )
