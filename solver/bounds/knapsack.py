"""How much work fits into bytes: the knapsack problems behind the bounds.

Every answer is at least what any choice of whole microbatches reaches, so that it may stand in a proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Work of `time_us` that needs `size_bytes`."""

    time_us: float
    size_bytes: float

    @property
    def rate(self) -> float:
        """Time for each byte."""
        return self.time_us / self.size_bytes if self.size_bytes else float("inf")


class Held(NamedTuple):
    """What one microbatch of a stage can be while a device waits: before its B (`whole`), or with W left (`rest`).

    It is one of the two or neither; each is the work it still offers and the bytes it holds.
    """

    whole: Piece
    rest: Piece = Piece(0, 0)

    def steps(self) -> Sequence[Piece]:
        """The upper hull of nothing, rest and whole: pieces to be taken in this order, the best rate first."""
        if self.rest.size_bytes >= self.whole.size_bytes or self.rest.rate < self.whole.rate:
            return [self.whole]
        return [self.rest, Piece(*(a - b for a, b in zip(self.whole, self.rest, strict=True)))]


def most_time_us(pieces: Iterable[Piece], count: int, room_bytes: float) -> float:
    """The most work in `room_bytes` if each piece can be taken up to `count` times, in parts too."""
    total_us = 0.0
    for piece in sorted(pieces, key=lambda piece: -piece.rate):
        number = min(count, room_bytes / piece.size_bytes) if piece.size_bytes else count
        total_us += number * piece.time_us
        room_bytes -= number * piece.size_bytes
    return total_us


def most_held_us(held: Sequence[Held], count: int, room_bytes: float, *, in_parts: bool = False) -> float:
    """The most work that `count` microbatches of each stage in `held` can offer within `room_bytes`.

    Counted in whole microbatches where all stages are alike, unless `in_parts`; in parts otherwise.
    """
    if room_bytes < 0:
        return 0.0
    if in_parts or room_bytes == float("inf") or len(set(held)) > 1:
        return most_time_us((step for one in held for step in one.steps()), count, room_bytes)
    return _most_of_one_kind_us(held[0], count * len(held), int(room_bytes))


def _most_of_one_kind_us(held: Held, count: int, room_bytes: int) -> float:
    whole, rest = held
    most = min(count, room_bytes // int(whole.size_bytes)) if whole.size_bytes else count
    wholes = np.arange(most + 1)
    rests = count - wholes
    if rest.size_bytes:
        rests = np.minimum(rests, (room_bytes - wholes * int(whole.size_bytes)) // int(rest.size_bytes))
    return float((wholes * whole.time_us + rests * rest.time_us).max())
