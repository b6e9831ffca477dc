"""Random numbers that do not depend on the order of a schedule.

Torch draws dropout masks from one generator a device, in the order in which layers run. Here each F draws from the
start of a sequence of its own, so any schedule, on any number of devices, gives a microbatch the same masks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_DRAWING_WITHIN = (nn.RNNBase, nn.MultiheadAttention)
"""These draw in their own forward where their dropout is not 0."""


def never_draws(module: nn.Module) -> bool:
    """Whether the forward surely draws no random numbers: all parts are torch's own layers, and none is one that does.

    A class of the user's may draw in its forward, by a function that nobody sees, so it counts as drawing. What hooks
    draw is not seen.
    """
    return all(_never_draws(part) for part in module.modules())


def _never_draws(part: nn.Module) -> bool:
    if not type(part).__module__.startswith("torch.nn.modules.") or "forward" in vars(part):
        return False
    if isinstance(part, _DRAWING_WITHIN):
        return not part.dropout
    return not isinstance(part, _DRAWING)


class RandomNumbers:
    """The random numbers of one stage: a sequence for each step and microbatch, from `seed` and the stage's number.

    `step` counts the steps begun; whoever resumes a training sets it. Covers the generators of torch, not those of
    Python or numpy.
    """

    def __init__(self, seed: int, stage: int = 0) -> None:
        self.seed, self.stage, self.step = seed, stage, 0

    @contextmanager
    def of(self, microbatch: int, device: torch.device) -> Iterator[None]:
        """Within, torch draws from the microbatch's sequence; then the generators go on as if nothing had been drawn.

        On the CPU it takes 3 to 5 us.
        """
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        before = [generator.get_state() for generator in generators]
        seed = self._seed_of(microbatch)
        for generator in generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)

    def _seed_of(self, microbatch: int) -> int:
        parts = struct.pack("<Qqqq", self.seed % 2**64, self.step, self.stage, microbatch)
        return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little") >> 1
