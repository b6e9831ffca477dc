"""Tensors as views of a storage: what is left of a saved tensor while its storage is elsewhere."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from optpipe.runtime.torch_private import negative_view


class StorageView(NamedTuple):
    """A tensor but for its storage. Torch may leave a conjugate or a negative there as it was, and note it alone."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The view that a tensor is."""
        place = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        return cls(tensor.dtype, *place, tensor.is_conj(), tensor.is_neg())

    def on(self, tensor: Tensor) -> Tensor:
        """This view of another tensor's storage."""
        empty = tensor.new_empty(0, dtype=self.dtype)
        seen = empty.set_(tensor.untyped_storage(), self.offset, self.shape, self.strides)
        seen = seen.conj() if self.conjugated else seen
        return negative_view(seen) if self.negated else seen
