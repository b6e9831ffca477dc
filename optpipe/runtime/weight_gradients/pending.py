"""The weight gradients of a stage that B has left and W will compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from optpipe.errors import TrainingError

Task = Callable[[], None]
"""Adds the weight gradients of one call of one layer to `.grad`."""


class WeightGradients:
    """What the layers of one stage have left, by microbatch.

    Layers split their backward only while `recording`: in F, and in B where a checkpoint runs a part of F again.
    Outside, in evaluation for instance, they are the layers that they were.
    """

    def __init__(self) -> None:
        self.recording = False
        self._kept: dict[int, deque[Task]] = {}
        self._put: Callable[[Task], None] = _refuse
        self._lost = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """F: layers record how to split their backward. Raises TrainingError if another stage has taken one of them."""
        if self._lost:
            raise TrainingError(
                "a layer of this stage belongs to another Stage that was made later. "
                "Maybe hand each Stage modules of its own; they may share parameters."
            )
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def backward_input(self, microbatch: int) -> AbstractContextManager[None]:
        """B: weight gradients wait for `compute`."""
        return self._backward(self._kept.setdefault(microbatch, deque()).append)

    def backward(self) -> AbstractContextManager[None]:
        """BW: weight gradients are computed at once."""
        return self._backward(_run)

    @contextmanager
    def _backward(self, put: Callable[[Task], None]) -> Iterator[None]:
        self._put, self.recording = put, True
        try:
            yield
        finally:
            self._put, self.recording = _refuse, False

    def add(self, task: Task) -> None:
        """Called by a layer's backward."""
        self._put(task)

    def compute(self, microbatch: int) -> None:
        """W: compute what B of this microbatch left, layer by layer; each layer's tensors are freed as it is done."""
        tasks = self._kept.pop(microbatch)
        with torch.no_grad():
            while tasks:
                tasks.popleft()()

    def clear(self) -> None:
        """Drop everything that is kept."""
        self._kept.clear()

    def lose(self) -> None:
        """One of the layers has been taken by another stage, which gets its weight gradients from now on."""
        self._lost = True


def _run(task: Task) -> None:
    task()


def _refuse(_: Task) -> None:
    raise TrainingError(
        "a layer's weight gradient was asked for within F: a stage that differentiates in its forward cannot split "
        "its backward. Maybe give that part of the module a forward of its own, without nn.Linear and the like."
    )
