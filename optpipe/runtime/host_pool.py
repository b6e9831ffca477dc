"""Host buffers for offloaded activations, kept between steps and used again."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class HostPool:
    """Buffers of bytes in host memory, handed out by exact size.

    All microbatches of a stage save equally much, so a buffer that comes back fits the next one exactly.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.in_use_bytes = 0
        self.peak_bytes = 0

    def take(self, size_bytes: int) -> Tensor:
        """A buffer of shape (size_bytes,), dtype uint8, contents undefined."""
        free = self._free[size_bytes]
        buffer = free.pop() if free else torch.empty(size_bytes, dtype=torch.uint8)
        self.in_use_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer once its last copy is done."""
        self.in_use_bytes -= len(buffer)
        self._free[len(buffer)].append(buffer)
