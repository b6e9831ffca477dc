"""Saved activations of a device, and the pinned host slabs to which they are offloaded.

Autograd packs each tensor that it saves and unpacks it in the backward. Here packing leaves only a description in the
graph (a storage and `StorageView`), and this store holds the storages; several saved tensors are often views of one
storage, which is held and copied once.

An offload has four steps, one for each action of a program: `copy_out` (O), `free` (RELEASE), `allocate` (PREPARE) and
`copy_in` (R). Each works on the current stream without waiting: the executor runs the copies on streams of their own,
allocates and frees on the compute stream, and orders them by events. Activations return bit for bit, unless their
copies are of low precision.

A slab never grows within a step, because pinning memory synchronises the whole device. If it is too small (in the first
step, unless its size was given), the copy goes to pageable memory, and the slab grows to that size after the step: from
then on every copy uses pinned memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.runtime.slices import Rebuilt, packed, unpacked
from optpipe.runtime.storage_view import StorageView
from optpipe.runtime.torch_private import FakeTensor, KeptByCheckpoint, kept_by_checkpoints, saving_through
from optpipe.runtime.weight_gradients import is_distributed

ALIGNMENT_BYTES = 64
"""Alignment of torch's CPU allocator: kernels may sum in another order on another alignment."""

LOW_PRECISIONS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""Precisions of copies on the host, by the names that modes have for them."""

_WIDER = {"bf16": (torch.float32, torch.float64), "fp8": (torch.float32, torch.float64, torch.bfloat16, torch.float16)}

SMALL_SHARE = 16
"""Storages smaller than this part of the largest keep their precision: statistics, on each of which much depends."""

CHUNK = 2**20
"""Entries that are converted at once, so that little memory is needed in addition to the activation."""


class _Slot:
    """One storage as flat bytes; None while it is on the host. `dtype`: of its tensors; None if they differ."""

    def __init__(self, flat: Tensor, dtype: torch.dtype) -> None:
        self.flat: Tensor | None = flat
        self.dtype: torch.dtype | None = dtype
        self.size_bytes = len(flat)
        self.nothing = flat.new_empty(0)


class _Copy:
    """A storage and its copy on the host: byte for byte, or in low precision.

    In bf16 each entry is rounded to 8 bits: an error of at most 2^-8 of it. In fp8 (e4m3) entries are scaled so that
    the largest is 448, the largest number there, and rounded to 4 bits: 2^-4 of the entry, or, below 2^-14 of the
    largest, at most 2^-18 of the largest.
    """

    def __init__(self, slot: _Slot, precision: str | None) -> None:
        self.slot = slot
        self._narrow = None if precision is None else LOW_PRECISIONS[precision]
        self._scale: Tensor | None = None
        self._host = torch.empty(0)

    @property
    def size_bytes(self) -> int:
        """Bytes on the host."""
        if self._narrow is None or self.slot.dtype is None:
            return self.slot.size_bytes
        return self.slot.size_bytes // self.slot.dtype.itemsize * self._narrow.itemsize

    def out(self, host: Tensor) -> None:
        """Copy to these bytes of the host."""
        assert self.slot.flat is not None, "offloaded twice"
        if self._narrow is None or self.slot.dtype is None:
            self._host = host
            host.copy_(self.slot.flat, non_blocking=True)
            return
        values, self._host = self.slot.flat.view(self.slot.dtype), host.view(self._narrow)
        if self._narrow is torch.float8_e4m3fn:
            low, high = values.aminmax()
            self._scale = (torch.maximum(-low, high) / torch.finfo(self._narrow).max).clamp_min_(1e-30)
        for part, to in zip(torch.split(values, CHUNK), torch.split(self._host, CHUNK), strict=True):
            to.copy_(part if self._scale is None else part / self._scale, non_blocking=True)

    def back(self) -> None:
        """Copy back to memory of the device that is there again."""
        assert self.slot.flat is not None, "reloaded before memory was prepared"
        if self._narrow is None or self.slot.dtype is None:
            self.slot.flat.copy_(self._host, non_blocking=True)
            return
        values = self.slot.flat.view(self.slot.dtype)
        for part, source in zip(torch.split(values, CHUNK), torch.split(self._host, CHUNK), strict=True):
            part.copy_(source, non_blocking=True)
        if self._scale is not None:
            values.mul_(self._scale)
            if self._scale.is_cuda:  # made on the stream of O, which may not use its memory again before this has run
                self._scale.record_stream(torch.cuda.current_stream())


@dataclass(frozen=True)
class _Saved:
    """A saved tensor as a view of a slot."""

    slot: _Slot
    view: StorageView


class _SavedShard:
    """A saved DTensor: its local part and its placement."""

    def __init__(self, local: Tensor | _Saved | _SavedShard | Rebuilt, tensor: Any) -> None:
        self.local = local
        self._kind, self._mesh, self._placements = type(tensor), tensor.device_mesh, tensor.placements
        self._shape, self._stride = tensor.shape, tensor.stride()

    def whole(self, local: Tensor) -> Tensor:
        """Rebuild the DTensor."""
        tensor: Tensor = self._kind.from_local(
            local, self._mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride
        )
        return tensor


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of a tensor (for a DTensor, of its local part), independent of its memory.

    FSDP2 frees and reallocates the memory of gathered parameters, in storages that stay.
    """
    if is_distributed(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    key: int = tensor.untyped_storage()._cdata
    return key


class ActivationStore:
    """Saved activations of one stage and microbatch, or the input from which they are made anew.

    `resident` are the storages (`storage_key`) that stay on the device: weights and the caller's batch.
    """

    def __init__(self, resident: Collection[int]) -> None:
        self._resident = resident
        self._slots: dict[int, _Slot] = {}
        self._copies: list[_Copy] = []
        self._slab: HostSlab | None = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Context in which autograd saves tensors through this store, and so do selective activation checkpoints."""
        with (
            kept_by_checkpoints(partial(_Kept, self._pack)),
            saving_through(self._pack, self._unpack),
        ):
            yield

    def hold(self, tensor: Tensor) -> object:
        """Hold a tensor outside of any graph; `held` gives it back from the description returned."""
        return self._pack(tensor)

    def held(self, description: Any) -> Tensor:
        """The tensor of a description by `hold`. It must be on the device."""
        return self._unpack(description)

    @property
    def size_bytes(self) -> int:
        """Bytes of the storages held, on device or host, each counted once."""
        return sum(slot.size_bytes for slot in self._slots.values())

    def copy_out(self, slab: HostSlab, precision: str | None = None) -> None:
        """O: copy the storages to the host; they stay on the device until `free`.

        With a `precision` of `LOW_PRECISIONS` those of wider numbers come back rounded, but for small ones.
        """
        slots = list(self._slots.values())
        least_bytes = max((slot.size_bytes for slot in slots), default=0) / SMALL_SHARE
        wider = _WIDER[precision] if precision is not None else ()
        self._copies = [
            _Copy(slot, precision if slot.dtype in wider and slot.size_bytes >= least_bytes else None) for slot in slots
        ]
        host = slab.take(sum(_aligned(copy.size_bytes) for copy in self._copies))
        self._slab = slab
        offset = 0
        for copy in self._copies:
            copy.out(host[offset : offset + copy.size_bytes])
            offset += _aligned(copy.size_bytes)

    def free(self) -> None:
        """RELEASE: free the storages on the device. The copy must have ended."""
        assert self._slab is not None, "freed before it was offloaded"
        for copy in self._copies:
            copy.slot.flat = None

    def allocate(self) -> None:
        """PREPARE: allocate the device memory for `copy_in`."""
        for slot in (copy.slot for copy in self._copies):
            slot.flat = slot.nothing.new_empty(slot.size_bytes)

    def copy_in(self) -> None:
        """R: copy the storages back. The slab is free for another copy that waits for this one."""
        assert self._slab is not None, "reloaded before it was offloaded"
        for copy in self._copies:
            copy.back()
        self._return_slab()

    def hand_over(self) -> None:
        """Leave the graph as the only owner of the storages, so that the backward frees each after its last use."""
        self._slots.clear()
        self._return_slab()

    def _return_slab(self) -> None:
        self._copies.clear()
        if self._slab is not None:
            self._slab.give_back()
            self._slab = None

    def _pack(self, tensor: Tensor) -> Tensor | _Saved | _SavedShard | Rebuilt:
        if (of_slices := packed(tensor)) is not None:
            return of_slices
        if is_distributed(tensor):
            with torch.no_grad():
                return _SavedShard(self._pack(tensor.to_local()), tensor)  # type: ignore[attr-defined]
        if type(tensor) not in (Tensor, nn.Parameter, FakeTensor):
            return tensor.detach()  # the storages of another subclass are unknown
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._resident or not storage.nbytes():
            # The tensor itself would be a reference cycle: a part of the graph that keeps the graph alive.
            return tensor.detach()
        if key not in self._slots:
            flat = tensor.new_empty(0, dtype=torch.uint8)
            self._slots[key] = _Slot(flat.set_(storage, 0, (storage.nbytes(),), (1,)), tensor.dtype)
        elif self._slots[key].dtype is not tensor.dtype:
            self._slots[key].dtype = None
        return _Saved(self._slots[key], StorageView.of(tensor))

    @staticmethod
    def _unpack(saved: Tensor | _Saved | _SavedShard | Rebuilt) -> Tensor:
        if isinstance(saved, Tensor | Rebuilt):
            tensor: Tensor = unpacked(saved)
            return tensor
        if isinstance(saved, _SavedShard):
            return saved.whole(ActivationStore._unpack(saved.local))
        assert saved.slot.flat is not None, "a backward needs activations that are on the host"
        return saved.view.on(saved.slot.flat)


class _Kept(KeptByCheckpoint):
    """A value in the cache of a selective checkpoint, packed like a tensor that autograd saves."""

    def __init__(self, pack: Callable[[Tensor], Tensor | _Saved | _SavedShard | Rebuilt], value: Any) -> None:
        super().__init__(value)
        if isinstance(value, Tensor):
            self.val, self.version = pack(value), None

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        """The value, for the backward's second forward."""
        value = super().get_val(allow_cache_entry_mutation)  # type: ignore[no-untyped-call]
        return ActivationStore._unpack(value) if isinstance(value, _Saved | _SavedShard | Rebuilt) else value


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostSlab:
    """A host buffer. `held` is the byte counter of all slabs of its device."""

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
        """Buffer of shape (size_bytes,), dtype uint8, contents undefined, for use until `give_back`."""
        assert self._taken_bytes is None, "a slab holds one microbatch at a time"
        self._taken_bytes = size_bytes
        self._held.add(size_bytes)
        if size_bytes <= len(self._buffer):
            return self._buffer[:size_bytes]
        self._wanted_bytes = max(self._wanted_bytes, size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def give_back(self) -> None:
        """Free the slab for the next offload, whose events make it write only after all reads."""
        if self._taken_bytes is not None:
            self._held.add(-self._taken_bytes)
            self._taken_bytes = None

    @property
    def too_small(self) -> bool:
        """True if a copy was larger than the slab."""
        return self._wanted_bytes > len(self._buffer)

    def grow(self) -> None:
        """Grow to the largest size wanted. Between steps only, when no copy is in progress."""
        if self.too_small:
            self._buffer = _buffer(0, pinned=False)  # frees the old buffer before the new one is allocated
            self._buffer = _buffer(self._wanted_bytes, self._pinned)


class HeldBytes:
    """Host bytes of offloaded activations: now, and peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes taken, or returned if negative."""
        self.now += size_bytes
        self.peak = max(self.peak, self.now)


class HostSlabs:
    """Slabs of one device; `sizes_bytes[k]` is the initial size of slab k."""

    def __init__(self, sizes_bytes: Sequence[int], *, pinned: bool = False) -> None:
        self._held = HeldBytes()
        self._slabs = [HostSlab(size, pinned=pinned, held=self._held) for size in sizes_bytes]

    def __getitem__(self, number: int) -> HostSlab:
        return self._slabs[number]

    @property
    def in_use_bytes(self) -> int:
        """Bytes of offloaded activations now."""
        return self._held.now

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of offloaded activations."""
        return self._held.peak

    @property
    def size_bytes(self) -> int:
        """Total size of all slabs."""
        return sum(slab.size_bytes for slab in self._slabs)

    @property
    def too_small(self) -> bool:
        """True if a slab is too small."""
        return any(slab.too_small for slab in self._slabs)

    def grow(self) -> None:
        """Grow every slab to the size that the last steps wanted. Between steps only."""
        for slab in self._slabs:
            slab.grow()


def _buffer(size_bytes: int, pinned: bool) -> Tensor:
    """Host memory of this exact size; torch's pinned allocator would round it up to a power of two."""
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    if pinned and size_bytes:
        address = buffer.data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size_bytes, 0)))
        weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)
    return buffer
