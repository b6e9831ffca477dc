"""Saved activations of a device, and the pinned host slabs they are offloaded to.

Autograd packs each tensor that it saves and unpacks it in the backward. Packing here leaves only a description in
the graph (storage, offset, shape, strides), and the storages lie in this store; several saved tensors are often views
of one storage, which is held and moved once.

They leave and return in four steps, one for each action of a program: `copy_out` (O), `free` (RELEASE), `allocate`
(PREPARE) and `copy_in` (R). Each works on the current stream and waits for nothing: the interpreter runs the copies on
streams of their own, what allocates or frees on the compute stream, and orders them by events. What comes back is the
same bit for bit.

A slab never grows within a step, because pinning memory stops the whole device. Where it is too small (in the first
step, unless its size was given), the copy goes to pageable memory of its own, and the slab takes on that size when the
step is over: from then on every copy finds pinned memory of exactly the size that it needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.runtime.weight_gradients import is_distributed

ALIGNMENT_BYTES = 64
"""Kernels may sum in another order on another alignment; 64 is what torch's CPU allocator gives."""


class _Slot:
    """One storage as flat bytes; None while it is on the host."""

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat
        self.size_bytes = len(flat)
        self.device = flat.device


@dataclass(frozen=True)
class _Saved:
    """A saved tensor as a view of a slot."""

    slot: _Slot
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _SavedShard:
    """A saved DTensor: its part that is on this device, and how it is placed."""

    def __init__(self, local: Tensor | _Saved | _SavedShard, tensor: Any) -> None:
        self.local = local
        self._kind, self._mesh, self._placements = type(tensor), tensor.device_mesh, tensor.placements
        self._shape, self._stride = tensor.shape, tensor.stride()

    def whole(self, local: Tensor) -> Tensor:
        """The DTensor again."""
        made: Tensor = self._kind.from_local(
            local, self._mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride
        )
        return made


def storage_key(tensor: Tensor) -> int:
    """Names the storage of a tensor (of a DTensor, of its part on this device), also where its memory comes and goes.

    FSDP2 frees the memory of gathered parameters and takes it anew, in storages that stay.
    """
    if is_distributed(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    key: int = tensor.untyped_storage()._cdata
    return key


class ActivationStore:
    """The saved activations of one stage and microbatch.

    `resident` are the storages (`storage_key`) that stay where they are: weights, and what the caller handed in.
    """

    def __init__(self, resident: Collection[int]) -> None:
        self._resident = resident
        self._slots: dict[int, _Slot] = {}
        self._parts: list[tuple[_Slot, Tensor]] = []
        self._slab: HostSlab | None = None

    def hooks(self) -> AbstractContextManager[Any]:
        """While it is open, what autograd saves goes through this store."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def size_bytes(self) -> int:
        """Bytes of the storages held, each counted once, wherever they are."""
        return sum(slot.size_bytes for slot in self._slots.values())

    def copy_out(self, slab: HostSlab) -> None:
        """O: copy the storages to the host; they stay on the device until `free`."""
        host = slab.take(sum(_aligned(slot.size_bytes) for slot in self._slots.values()))
        self._slab = slab
        offset = 0
        for slot in self._slots.values():
            assert slot.flat is not None, "offloaded twice"
            part = host[offset : offset + slot.size_bytes]
            part.copy_(slot.flat, non_blocking=True)
            self._parts.append((slot, part))
            offset += _aligned(slot.size_bytes)

    def free(self) -> None:
        """RELEASE: drop the storages on the device; nothing else holds them. The copy must be done by now."""
        assert self._slab is not None, "freed before it was offloaded"
        for slot, _ in self._parts:
            slot.flat = None

    def allocate(self) -> None:
        """PREPARE: take the memory on the device into which `copy_in` will copy."""
        for slot, _ in self._parts:
            slot.flat = torch.empty(slot.size_bytes, dtype=torch.uint8, device=slot.device)

    def copy_in(self) -> None:
        """R: copy the storages back. The slab may be taken anew, by a copy that waits for this one."""
        assert self._slab is not None, "reloaded before it was offloaded"
        for slot, part in self._parts:
            assert slot.flat is not None, "reloaded before memory was prepared"
            slot.flat.copy_(part, non_blocking=True)
        self._return_slab()

    def hand_over(self) -> None:
        """Leave the storages to the graph alone, so that the backward frees each as soon as it has used it."""
        self._slots.clear()
        self._return_slab()

    def _return_slab(self) -> None:
        self._parts.clear()
        if self._slab is not None:
            self._slab.give_back()
            self._slab = None

    def _pack(self, tensor: Tensor) -> Tensor | _Saved | _SavedShard:
        if is_distributed(tensor):
            with torch.no_grad():
                return _SavedShard(self._pack(tensor.to_local()), tensor)  # type: ignore[attr-defined]
        if type(tensor) not in (Tensor, nn.Parameter):
            return tensor.detach()  # what another subclass is made of is not known
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._resident or not storage.nbytes():
            # The tensor itself would keep its own graph alive from within that graph: a leak.
            return tensor.detach()
        if key not in self._slots:
            self._slots[key] = _Slot(_bytes_of(tensor))
        return _Saved(
            self._slots[key],
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )

    @staticmethod
    def _unpack(saved: Tensor | _Saved | _SavedShard) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, _SavedShard):
            return saved.whole(ActivationStore._unpack(saved.local))
        assert saved.slot.flat is not None, "a backward needs activations that are on the host"
        empty = torch.empty(0, dtype=saved.dtype, device=saved.slot.device)
        return empty.set_(saved.slot.flat.untyped_storage(), saved.offset, saved.shape, saved.strides)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as flat bytes, sharing memory with it and nothing else."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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
