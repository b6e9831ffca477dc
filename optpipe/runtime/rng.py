"""Random numbers that do not depend on the schedule.

Torch draws dropout masks from one generator per device, in the order in which layers run. Here each F draws from a
sequence of its own, so a microbatch gets the same masks under any schedule on any number of devices.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_DRAWING = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)
_DRAWING_WITHIN = (nn.RNNBase, nn.MultiheadAttention)
"""Layers that draw in their own forward if their dropout is not 0."""


def never_draws(module: nn.Module) -> bool:
    """True if the forward cannot draw random numbers: all parts are torch's own layers without randomness.

    The forward of any other class may draw by a function call, so it counts as drawing. Draws of hooks are not
    detected.
    """
    for part in module.modules():
        if not type(part).__module__.startswith("torch.nn.modules.") or "forward" in vars(part):
            return False
        if isinstance(part, _DRAWING) or (isinstance(part, _DRAWING_WITHIN) and part.dropout):
            return False
    return True


class RandomNumbers:
    """Random numbers of one stage: a sequence per step and microbatch, derived from `seed` and the stage's number.

    `step` counts the steps begun; a resumed run sets it. `numbers`: those of the microbatches that run in the place of
    each; None: their own. Covers the generators of torch, not those of Python or NumPy.
    """

    def __init__(self, seed: int, stage: int = 0) -> None:
        self.seed, self.stage, self.step = seed, stage, 0
        self.numbers: Sequence[int] | None = None

    @contextmanager
    def of(self, microbatch: int, device: torch.device) -> Iterator[None]:
        """Context in which torch draws from the microbatch's sequence; restores the generators afterwards.

        Takes 3 to 5 us on a CPU.
        """
        before, seed = GeneratorStates(device), self.seed_of(microbatch)
        for generator in before.generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            before.restore()

    def seed_of(self, microbatch: int) -> int:
        """Seed of the microbatch's sequence in this step."""
        if self.numbers is not None:
            microbatch = self.numbers[microbatch]
        parts = struct.pack("<Qqqq", self.seed % 2**64, self.step, self.stage, microbatch)
        return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little") >> 1


class GeneratorStates:
    """States of torch's generators, of the host and of a device, at the time when this is made."""

    def __init__(self, device: torch.device) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index or 0])
        self._states = [generator.get_state() for generator in self.generators]

    def restore(self) -> None:
        """Set the generators to these states."""
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which torch draws the numbers that followed these states; restores the generators afterwards."""
        now = GeneratorStates(self.generators[-1].device)
        self.restore()
        try:
            yield
        finally:
            now.restore()


OwnGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A generator that is no global one of torch, NumPy or Python."""


class AllGeneratorStates:
    """States of the generators of torch, NumPy and Python, and of some `own`, at the time when this is made.

    Takes about 20 us more than `GeneratorStates`, so it is for what runs apart from a plain F.
    """

    def __init__(self, device: torch.device, own: Iterable[OwnGenerator] = ()) -> None:
        self._of_torch, self._own = GeneratorStates(device), list(own)
        self._device = device
        accessors = [
            (_numpy_state, np.random.set_state),
            (random.getstate, random.setstate),
            *map(_accessors, self._own),
        ]
        self._states = [(write, read()) for read, write in accessors]

    def restore(self) -> None:
        """Set the generators to these states."""
        self._of_torch.restore()
        for write, state in self._states:
            write(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which they draw the numbers that followed these states; restores them afterwards."""
        now = AllGeneratorStates(self._device, self._own)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)


def _accessors(generator: OwnGenerator) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Functions that read and write the state of a generator."""
    match generator:
        case torch.Generator():
            return generator.get_state, generator.set_state
        case np.random.Generator():
            bits = generator.bit_generator
            return lambda: bits.state, lambda state: setattr(bits, "state", state)
        case np.random.RandomState():
            return lambda: generator.get_state(legacy=False), generator.set_state
        case _:
            return generator.getstate, generator.setstate
