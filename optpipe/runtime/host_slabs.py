"""Host memory for offloaded activations: slabs numbered by the program, each used by one offload after another.

A slab never grows within a step, because pinning memory stops the whole device. Where it is too small (in the first
step, unless its size was given), the copy goes to pageable memory of its own, and the slab takes on that size when the
step is over: from then on every copy finds pinned memory of exactly the size that it needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class HostSlab:
    """One slab. `held` is the count of bytes that it shares with the other slabs of its device."""

    def __init__(self, size_bytes: int = 0, *, pinned: bool = False, held: HeldBytes | None = None) -> None:
        self._pinned = pinned
        self._held = held or HeldBytes()
        self._buffer = _buffer(size_bytes, pinned)
        self._wanted_bytes = size_bytes
        self._taken_bytes: int | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the slab."""
        return len(self._buffer)

    def take(self, size_bytes: int) -> Tensor:
        """Room of shape (size_bytes,), dtype uint8, contents undefined, until `give_back`."""
        assert self._taken_bytes is None, "a slab holds one microbatch at a time"
        self._taken_bytes = size_bytes
        self._held.add(size_bytes)
        if size_bytes <= len(self._buffer):
            return self._buffer[:size_bytes]
        self._wanted_bytes = max(self._wanted_bytes, size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def give_back(self) -> None:
        """The next offload may take the slab: the events of the streams let it write only when all is read."""
        if self._taken_bytes is not None:
            self._held.add(-self._taken_bytes)
            self._taken_bytes = None

    @property
    def too_small(self) -> bool:
        """Whether more was wanted than it has."""
        return self._wanted_bytes > len(self._buffer)

    def grow(self) -> None:
        """Take on the largest size that was wanted. Between steps only, when no copy is under way."""
        if self.too_small:
            self._buffer = _buffer(0, pinned=False)  # frees the old one before the new one is taken
            self._buffer = _buffer(self._wanted_bytes, self._pinned)


class HeldBytes:
    """Bytes that offloaded activations take on the host now, and the most so far."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes that were taken, or given back where negative."""
        self.now += size_bytes
        self.peak = max(self.peak, self.now)


class HostSlabs:
    """The slabs of one device; `sizes_bytes[k]` is what slab k has from the start."""

    def __init__(self, sizes_bytes: Sequence[int], *, pinned: bool = False) -> None:
        self._held = HeldBytes()
        self._slabs = [HostSlab(size, pinned=pinned, held=self._held) for size in sizes_bytes]

    def __getitem__(self, number: int) -> HostSlab:
        return self._slabs[number]

    @property
    def in_use_bytes(self) -> int:
        """What offloaded activations take now."""
        return self._held.now

    @property
    def peak_bytes(self) -> int:
        """The most that they ever took at once."""
        return self._held.peak

    @property
    def size_bytes(self) -> int:
        """What all slabs take, used or not."""
        return sum(slab.size_bytes for slab in self._slabs)

    @property
    def too_small(self) -> bool:
        """Whether one of them is."""
        return any(slab.too_small for slab in self._slabs)

    def grow(self) -> None:
        """Bring every slab to the size that the last steps wanted of it. Between steps only."""
        for slab in self._slabs:
            slab.grow()


def _buffer(size_bytes: int, pinned: bool) -> Tensor:
    """Host memory of exactly that size; torch's own pinned allocator would round it up to a power of two."""
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    if pinned and size_bytes:
        address = buffer.data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size_bytes, 0)))
        weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)
    return buffer
