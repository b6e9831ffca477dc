"""The activations that the graph of one microbatch saves, held where they can leave to the host and come back.

Autograd packs each tensor that it saves and unpacks it in the backward. Packing here leaves only a description in
the graph (storage, offset, shape, strides), and the storages lie in this store; several saved tensors are often views
of one storage, which is held and moved once. Offload copies the storages to a host buffer and drops them; reload
allocates anew and copies back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optpipe.runtime.host_pool import HostPool

ALIGNMENT_BYTES = 64
"""Kernels may sum in another order on another alignment; 64 is what torch's CPU allocator gives."""


class _Slot:
    """One storage as flat bytes; None while it is on the host."""

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat
        self.size_bytes = len(flat)


@dataclass(frozen=True)
class _Saved:
    """A saved tensor as a view of a slot."""

    slot: _Slot
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class ActivationStore:
    """The saved activations of one stage and microbatch.

    `resident` are the addresses of storages that stay where they are: weights, and what the caller handed in.
    """

    def __init__(self, resident: Collection[int]) -> None:
        self._resident = resident
        self._slots: dict[int, _Slot] = {}
        self._host: Tensor | None = None
        self._pool: HostPool | None = None

    def hooks(self) -> AbstractContextManager[Any]:
        """While it is open, what autograd saves goes through this store."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def size_bytes(self) -> int:
        """Bytes of the storages held, each counted once, wherever they are."""
        return sum(slot.size_bytes for slot in self._slots.values())

    def offload(self, pool: HostPool) -> None:
        """Copy the storages to a host buffer and drop them: nothing else holds them, so this frees them."""
        self._pool = pool
        self._host = pool.take(sum(_aligned(slot.size_bytes) for slot in self._slots.values()))
        for slot, part in self._parts(self._host):
            assert slot.flat is not None, "offloaded twice"
            part.copy_(slot.flat)
            slot.flat = None

    def reload(self, device: torch.device) -> None:
        """Allocate the storages on `device` and copy them back; the host buffer returns to its pool."""
        assert self._host is not None, "reloaded before it was offloaded"
        for slot, part in self._parts(self._host):
            slot.flat = torch.empty(slot.size_bytes, dtype=torch.uint8, device=device)
            slot.flat.copy_(part)
        self._return_host()

    def release(self) -> None:
        """Leave the storages to the graph alone, so that the backward frees each as soon as it has used it."""
        self._slots.clear()
        self._return_host()

    def _return_host(self) -> None:
        if self._pool is not None and self._host is not None:
            self._pool.give_back(self._host)
        self._host = None

    def _parts(self, host: Tensor) -> list[tuple[_Slot, Tensor]]:
        """Each slot with its place in the host buffer."""
        parts = []
        offset = 0
        for slot in self._slots.values():
            parts.append((slot, host[offset : offset + slot.size_bytes]))
            offset += _aligned(slot.size_bytes)
        return parts

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._resident or not storage.nbytes():
            # The tensor itself would keep its own graph alive from within that graph: a leak.
            return tensor.detach()
        if address not in self._slots:
            self._slots[address] = _Slot(_bytes_of(tensor))
        return _Saved(
            self._slots[address],
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )

    @staticmethod
    def _unpack(saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert saved.slot.flat is not None, "a backward needs activations that are on the host"
        empty = torch.empty(0, dtype=saved.dtype, device=saved.slot.flat.device)
        return empty.set_(saved.slot.flat.untyped_storage(), saved.offset, saved.shape, saved.strides)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as flat bytes, sharing memory with it and nothing else."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
