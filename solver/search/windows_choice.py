"""Where the next window lies, and what may change places in it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solver.search.windows_frame import Window
from solver.search.windows_surroundings import Surroundings

Flags = NDArray[np.bool_]

MOST_KEPT = 3
"""Ops that keep their order in a window, for each that is free: they cost less, but not nothing."""


def choose_window(around: Surroundings, random: np.random.Generator, size: int) -> Window:
    """A window in which about `size` ops are free: of all devices, of some neighbours, or of some microbatches."""
    kind = random.choice(("all", "devices", "microbatches"), p=(0.5, 0.3, 0.2))
    free = np.ones(len(around.start), bool)
    if kind == "devices":
        free = _of_neighbours(around, random)
    elif kind == "microbatches":
        free = _of_microbatches(around, random, size)
    return _around_free(around, free, random, size)


def _of_neighbours(around: Surroundings, random: np.random.Generator) -> Flags:
    """The ops of up to half of the devices, next to one another."""
    device = around.numbering.device
    devices = np.unique(device)
    width = int(random.integers(1, max(len(devices) // 2, 1) + 1))
    first = int(random.integers(0, len(devices) - width + 1))
    return np.isin(device, devices[first : first + width])


def _of_microbatches(around: Surroundings, random: np.random.Generator, size: int) -> Flags:
    """The ops of a few microbatches in a row."""
    problem = around.numbering.problem
    width = min(max(size // (3 * len(problem.stages)), 1), problem.microbatches)
    first = int(random.integers(0, problem.microbatches - width + 1))
    microbatch = np.array([op.microbatch for op in around.numbering.ops])
    return (microbatch >= first) & (microbatch < first + width)


def _around_free(around: Surroundings, free: Flags, random: np.random.Generator, size: int) -> Window:
    """`size` of the free ops in a row, fewer where many others lie between them.

    At a random place, or at either end: the warm-up and the cool-down.
    """
    order = around.by_start
    places = np.flatnonzero(free[order])
    count = min(size, len(places))
    last_place = len(places) - count
    anywhere = int(random.integers(0, last_place + 1))
    place = int(random.choice([0, last_place, anywhere], p=(0.15, 0.15, 0.7)))
    first, last = int(places[place]), int(places[place + count - 1])
    last = min(last, first + (1 + MOST_KEPT) * count - 1)
    return Window(int(around.start[order[first]]), int(around.start[order[last]]) + 1, free)
