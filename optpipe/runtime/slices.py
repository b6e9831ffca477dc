"""Slices of sequences: what a stage keeps of a microbatch from one slice to the next.

A stage runs a microbatch's sequence slice by slice, and its backwards from the last slice to the first. Causal
attention needs the keys and values of the earlier slices. A module asks for the slice that runs, and extends its own by
these::

    class Attention(nn.Module):
        takes_slices = True                    # the stage computes the same whether sequences are whole or sliced

        def forward(self, x):                                     # (N, L, C): whole sequences, or a slice of them
            q, k, v = self.split_heads(self.query_key_value(x))   # (N, heads, L, width)
            context = slice_context()
            if context is None:
                return attention(q, k, v, is_causal=True)
            k, v = context.extend(self, k, v)                     # (N, heads, offset + L, width)
            return attention(q, k, v, attn_mask=context.causal_mask(q))

The stage holds keys and values by slice, from the slice's F to the end of its B, on the device: offloads and
recomputation leave them there. What autograd saves of the extended tensors is not kept, but put together again in the
backward, so that n slices hold their keys and values once. In the backward the gradients of the earlier slices' keys
and values are summed, each from the B of the last slice to its own, which sends the sum through its own graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.messages import Tree, leaves, map_leaves
from optpipe.runtime.rng import RandomNumbers
from optpipe.runtime.sliced_dropout import Masks
from optpipe.runtime.storage_view import StorageView
from optpipe.runtime.torch_private import saving_through

_running: SliceContext | None = None
"""The slice that runs in this process. Not of a thread: autograd runs backwards on threads of its own."""


def slice_context() -> SliceContext | None:
    """The slice whose forward runs; None where sequences are whole."""
    return _running


def takes_slices(module: nn.Module) -> bool:
    """True if the module, or one in it, says by an attribute `takes_slices` that it knows slices."""
    return any(getattr(part, "takes_slices", False) for part in module.modules())


def check_slices(number: int, module: nn.Module, slices: int) -> None:
    """Raise TrainingError if a stage is to run slices but its module does not know them."""
    if slices > 1 and not takes_slices(module):
        raise TrainingError(
            f"stages[{number}] runs {slices} slices of a sequence one after the other, but {type(module).__name__} "
            "does not take slices. Maybe let its attention extend keys and values by 'slice_context' and set "
            "takes_slices = True, or solve without slices."
        )


class _Kept:
    """Keys and values of one microbatch on one stage, by slice, and sums of their gradients."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.masks: list[Masks | None] = []
        self.parts: dict[Hashable, list[Tensor]] = {}
        self.gradients: dict[Hashable, dict[int, Tensor]] = {}

    def holds(self, key: int) -> bool:
        """True if the storage of this key is that of a tensor kept here."""
        return any(_storage(part) == key for parts in self.parts.values() for part in parts)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the sums of gradients."""
        return sum(g.numel() * g.itemsize for sums in self.gradients.values() for g in sums.values())


class SliceContext:
    """The slice that runs: slice `index` of `count`, `length` positions from position `offset` of the sequence on.

    With `again` a forward that has run before runs again, for a recomputation.
    """

    def __init__(self, kept: _Kept, index: int, count: int, *, again: bool = False) -> None:
        self.index, self.count = index, count
        self.offset, self.length = sum(kept.lengths[:index]), kept.lengths[index]
        self.masks = kept.masks[index]
        self._kept, self._again = kept, again
        self._made: dict[int, tuple[weakref.ref[Any], Callable[[], Tensor]]] = {}
        self._mask: Tensor | None = None

    def extend(self, key: Hashable, *tensors: Tensor, dim: int = -2) -> tuple[Tensor, ...]:
        """Put the tensors of the earlier slices before these, each along its dimension `dim`.

        `key` tells the callers within a stage apart: the module itself, or the number of a layer. The result is not to
        be changed in place. Raises TrainingError if a key is used twice in one forward.
        """
        extended = []
        for number, tensor in enumerate(tensors):
            name = key, number
            if not self._again:
                parts = self._kept.parts.setdefault(name, [])
                if len(parts) != self.index:
                    raise TrainingError(
                        f"slice {self.index} extends the tensors of one key ({type(key).__name__}) "
                        f"{'twice' if len(parts) > self.index else 'that an earlier slice did not have'}. Maybe give "
                        "each call in a forward a key of its own."
                    )
                parts.append(_compact(tensor.detach()))
            extended.append(_Extended.apply(self, name, dim, tensor))  # type: ignore[no-untyped-call]
        return tuple(extended)

    def causal_mask(self, query: Tensor) -> Tensor:
        """Additive mask for attention of this slice to the sequence so far, shape (length, offset + length).

        It has the dtype and the device of the query, and takes no memory between forward and backward.
        """
        dtype, device, length, offset = query.dtype, query.device, self.length, self.offset

        def build() -> Tensor:  # without this context, which holds it: a cycle would keep the slice alive
            mask = torch.full((length, offset + length), -torch.inf, dtype=dtype, device=device)
            return mask.triu_(offset + 1)

        if self._mask is None or self._mask.dtype != dtype or self._mask.device != device:
            self._mask = build()
            self._note(self._mask, build)
        return self._mask

    def join(self, name: Hashable, dim: int) -> Tensor:
        """The tensors of a name of all slices so far, as one."""
        parts = self._kept.parts[name][: self.index + 1]
        if len(parts) == 1:
            return parts[0].detach()

        def build() -> Tensor:
            return torch.cat(parts, dim)

        joined = build()
        self._note(joined, build)
        return joined

    def split(self, name: Hashable, dim: int, gradient: Tensor) -> Tensor:
        """Add the gradients of earlier slices to their sums; return this slice's, with what later ones have added."""
        sums = self._kept.gradients.setdefault(name, {})
        parts = self._kept.parts[name][: self.index + 1]
        *earlier, own = torch.split(gradient, [part.shape[dim] for part in parts], dim)
        for j, part in enumerate(earlier):
            if j in sums:
                sums[j].add_(part)
            else:
                sums[j] = part.clone(memory_format=torch.contiguous_format)
        return sums.pop(self.index).add_(own) if self.index in sums else own

    def packed(self, tensor: Tensor) -> Tensor | Rebuilt | None:
        """The form in which a graph may keep a tensor that it saves, if it is of this context: it adds no memory."""
        if type(tensor) is not Tensor:
            return None
        key = _storage(tensor)
        made = self._made.get(key)
        if made is not None and made[0]() is not None:
            return Rebuilt(made[1], tensor)
        return tensor.detach() if self._kept.holds(key) else None

    def _note(self, tensor: Tensor, build: Callable[[], Tensor]) -> None:
        self._made[_storage(tensor)] = weakref.ref(tensor.untyped_storage()), build


class Rebuilt:
    """A saved tensor that is made again when it is needed, as a view of what `build` returns."""

    def __init__(self, build: Callable[[], Tensor], tensor: Tensor) -> None:
        self._build = build
        self._view = StorageView.of(tensor)

    def tensor(self) -> Tensor:
        """Make it."""
        return self._view.on(self._build())


def packed(tensor: Tensor) -> Tensor | Rebuilt | None:
    """`SliceContext.packed` of the slice that runs; None also where sequences are whole."""
    return None if _running is None else _running.packed(tensor)


def unpacked(saved: Any) -> Any:
    """The tensor of a `Rebuilt`; anything else as it is."""
    return saved.tensor() if isinstance(saved, Rebuilt) else saved


class _Extended(torch.autograd.Function):
    """A slice's tensor behind those of the earlier slices."""

    @staticmethod
    def forward(ctx: Any, context: SliceContext, name: Hashable, dim: int, _own: Tensor) -> Tensor:
        ctx.context, ctx.name, ctx.dim = context, name, dim
        return context.join(name, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, ctx.context.split(ctx.name, ctx.dim, gradient)


class Sequences:
    """State that a stage keeps of all microbatches that it runs slice by slice; units as in `Problem.units`.

    `length` is that of whole sequences, once it is known: then dropout is that of the step on whole sequences.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.length: int | None = None
        self._kept: dict[int, _Kept] = {}

    def first(
        self, unit: int, received: Tree, random: RandomNumbers | None = None, device: torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Context of the first forward of a unit.

        `random` are the random numbers of a stage that may draw, on `device`.
        """
        if self.count == 1:
            return _NOTHING
        microbatch, index = divmod(unit, self.count)
        kept = self._kept.setdefault(microbatch, _Kept())
        assert len(kept.lengths) == index, "slices of a microbatch run forward in their order"
        begin, length = sum(kept.lengths), sequence_length(received)
        masks = None
        if random is not None and device is not None and self.length is not None:
            masks = Masks(random.seed_of(microbatch), device, begin, begin + length, self.length)
        kept.lengths.append(length)
        kept.masks.append(masks)
        return _running_in(SliceContext(kept, index, self.count))

    def again(self, unit: int) -> AbstractContextManager[None]:
        """Context of another forward of a unit, or of its backward."""
        if self.count == 1:
            return _NOTHING
        microbatch, index = divmod(unit, self.count)
        return _running_in(SliceContext(self._kept[microbatch], index, self.count, again=True))

    def saving(self) -> AbstractContextManager[Any]:
        """Context in which autograd saves tensors, where nothing else says how."""
        if self.count == 1:
            return _NOTHING
        return saving_through(_pack, unpacked)

    def release(self, unit: int) -> None:
        """Free what a slice has kept, after its backward.

        Raises TrainingError if later slices' gradients of its keys and values have not gone through it.
        """
        if self.count == 1:
            return
        microbatch, index = divmod(unit, self.count)
        kept = self._kept[microbatch]
        if any(index in sums for sums in kept.gradients.values()):
            raise TrainingError(
                f"the loss of a later slice depends on keys and values of slice {index}, whose own loss does not use "
                "them, so their gradient is lost. Maybe give each slice a loss, of zero times its output at least."
            )
        del kept.lengths[index:], kept.masks[index:]
        for parts in kept.parts.values():
            del parts[index:]
        if not index:
            del self._kept[microbatch]

    def evaluated(self, unit: int) -> None:
        """Free what a microbatch has kept, after the forward of its last slice."""
        if self.count > 1 and unit % self.count == self.count - 1:
            self._kept.pop(unit // self.count, None)

    def gradient_bytes(self, unit: int) -> int:
        """Bytes of the sums of gradients that the microbatch of a unit holds now."""
        kept = self._kept.get(unit // self.count)
        return kept.gradient_bytes if kept else 0

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()


_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def _running_in(context: SliceContext) -> Iterator[None]:
    global _running
    before, _running = _running, context
    try:
        with context.masks.replacing() if context.masks else nullcontext():
            yield
    finally:
        _running = before
        context._mask = None


def _pack(tensor: Tensor) -> Tensor | Rebuilt:
    known = packed(tensor)
    # The tensor itself would be a reference cycle where it is an output of the node that saves it.
    return tensor.detach() if known is None else known


def _compact(tensor: Tensor) -> Tensor:
    """The tensor, copied where it would keep a larger storage alive."""
    whole = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.itemsize
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def sequence_length(received: Tree) -> int:
    """Length of the sequences in a message: the second dimension of its first tensor that has two."""
    for leaf in leaves(received):
        if leaf.dim() > 1:
            length: int = leaf.shape[1]
            return length
    raise TrainingError("a message has no tensor of shape (N, L, ...), so its sequences cannot be cut into slices.")


def slice_lengths(length: int, shares: Sequence[float]) -> list[int]:
    """Lengths of slices in proportion to shares, which add up to `length`. Raises TrainingError if one would be 0."""
    ends = [round(length * end / sum(shares)) for end in accumulate(shares, initial=0)]
    lengths = [end - begin for begin, end in pairwise(ends)]
    if min(lengths) < 1:
        raise TrainingError(
            f"sequences of length {length} cannot be cut into {len(shares)} slices of at least one position. Maybe "
            "longer sequences, or a schedule with fewer slices."
        )
    return lengths


def cut_sequences(tree: Tree, lengths: Sequence[int]) -> list[Tree]:
    """The slices of a microbatch's input or target: tensors of shape (N, T, ...) are cut along T.

    Tensors of fewer dimensions are given to every slice. Raises TrainingError for a tensor of another length.
    """
    if tree is None:
        return [None] * len(lengths)
    length = sum(lengths)
    slices, begin = [], 0
    for leaf in leaves(tree):
        if leaf.dim() > 1 and leaf.shape[1] != length:
            raise TrainingError(
                f"a tensor of shape {list(leaf.shape)} cannot be cut into slices of sequences of length {length}: its "
                "second dimension must be the sequence. Maybe leave it out of the batch."
            )
    for size in lengths:
        end = begin + size

        def part(leaf: Tensor, begin: int = begin, end: int = end) -> Tensor:
            return leaf if leaf.dim() < 2 else leaf[:, begin:end].contiguous()

        slices.append(map_leaves(part, tree))
        begin = end
    return slices


class SlicedLoss:
    """A loss that is a mean over the positions of its sequences, as the loss of a slice.

    The target comes with the slice's share of the positions: the losses of the slices add up to that of the whole.
    """

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self.loss = loss

    def __call__(self, output: Any, target: tuple[Any, float]) -> Any:
        """The slice's part of the loss; of terms by name each."""
        own, share = target
        loss = self.loss(output, own)
        return {name: term * share for name, term in loss.items()} if isinstance(loss, Mapping) else loss * share
