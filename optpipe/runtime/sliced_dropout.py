"""Dropout in slices of sequences: masks are drawn for whole sequences, of which each slice takes its part.

So a step on slices drops what the step on whole sequences drops: layers ask for masks in the same order, and the random
numbers are those of the microbatch. While a slice runs, the functions of `torch.nn.functional` that drop are replaced
by those here. All other random numbers, and masks that have no place in a sequence, are of the slice's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from optpipe.runtime.rng import GeneratorStates

_dropout, _attention = functional.dropout, functional.scaled_dot_product_attention

Part = tuple[list[int], tuple[slice, ...]]
"""Shape of a mask of whole sequences, and the part of it that a slice takes."""


class Masks:
    """Masks of one slice, positions `begin` to `end` of `sequence`, of a microbatch on a stage.

    `seed` is that of the microbatch's random numbers. Where a layer runs again, torch's generator is as it was at
    first, so its state tells which mask was drawn then; each mask moves it on.
    """

    def __init__(self, seed: int, device: torch.device, begin: int, end: int, sequence: int) -> None:
        self._seed, self._device = seed, device
        self._begin, self._end, self._sequence = begin, end, sequence
        self._next: GeneratorStates | None = None
        self._drawn: dict[bytes, GeneratorStates] = {}

    def part(self, shape: Sequence[int]) -> Part | None:
        """The place of a mask of this shape: of the weights of attention, or of a tensor (N, length, ...)."""
        begin, end, sequence = self._begin, self._end, self._sequence
        if len(shape) == 4 and tuple(shape[-2:]) == (end - begin, end):
            whole = [*shape[:2], sequence, sequence]
            return whole, (slice(None), slice(None), slice(begin, end), slice(end))
        if len(shape) > 1 and shape[1] == end - begin:
            return [shape[0], sequence, *shape[2:]], (slice(None), slice(begin, end))
        return None

    def mask(self, part: Part, like: Tensor, p: float) -> Tensor:
        """Mask of a part: 0 with probability `p`, otherwise 1 / (1 - p)."""
        own = GeneratorStates(self._device)
        number = own.generators[0].get_state().numpy().tobytes()
        again = self._drawn.get(number)
        if again or self._next:
            (again or self._next).restore()  # type: ignore[union-attr]
        else:
            for generator in own.generators:
                generator.manual_seed(self._seed)
        if again is None:
            self._drawn[number] = GeneratorStates(self._device)
        shape, place = part
        with torch.no_grad():
            mask = _dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p)[place].contiguous()
        if again is None:
            self._next = GeneratorStates(self._device)
        own.restore()
        torch.rand(())
        return mask

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Context in which dropout takes its masks from here."""

        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            part = self.part(input.shape) if training and 0 < p < 1 else None
            if part is None:
                return _dropout(input, p, training, inplace)
            mask = self.mask(part, input, p)
            return input.mul_(mask) if inplace else input * mask

        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            shape = (*query.shape[:-1], key.shape[-2])
            if not dropout_p or self.part(shape) is None:
                return _attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            if enable_gqa:
                key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
            weights = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
            if is_causal:
                attn_mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
            if attn_mask is not None and attn_mask.dtype is torch.bool:
                weights = weights.masked_fill(~attn_mask, -torch.inf)
            elif attn_mask is not None:
                weights = weights + attn_mask
            return dropout(weights.softmax(-1), dropout_p) @ value

        before = functional.dropout, functional.scaled_dot_product_attention
        functional.dropout, functional.scaled_dot_product_attention = dropout, attention
        try:
            yield
        finally:
            functional.dropout, functional.scaled_dot_product_attention = before
