"""Counts the bytes of all tensors that are alive, by device; on the CPU no allocator tells.

Every storage that an operator returns while the meter is open is counted on the current device from then until it is
freed, wherever it was meanwhile: nothing is inferred from what the runtime believes it holds. What existed before
(weights, gradients, the batch) is not counted, nor is scratch memory within one operator's kernel.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Open it as a context around the work to measure, and say with `on` which device works."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes: dict[int, int] = defaultdict(int)
        self.peak_bytes: dict[int, int] = defaultdict(int)
        self._device: int | None = None
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def on(self, device: int | None) -> Iterator[None]:
        """Count what is allocated within on `device`; on None it is not counted."""
        outer, self._device = self._device, device
        try:
            yield
        finally:
            self._device = outer

    def restart_peak(self) -> None:
        """Let peaks count from now: each becomes what is alive."""
        self.peak_bytes = self.live_bytes.copy()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._device is not None:
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in _storages(result):
                if storage._cdata not in given and storage._cdata not in self._alive:
                    self._count(self._device, storage)
        return result

    def _count(self, device: int, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self.live_bytes[device] -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.live_bytes[device] += size
        self.peak_bytes[device] = max(self.peak_bytes[device], self.live_bytes[device])


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            yield value.untyped_storage()
