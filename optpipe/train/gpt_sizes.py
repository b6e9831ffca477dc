"""The sizes in which the small GPT comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class GPTSize(NamedTuple):
    """Width, heads and longest sequence; how many layers is the schedule's matter."""

    width: int
    heads: int
    sequence: int


SIZES = {"tiny": GPTSize(32, 2, 32), "small": GPTSize(256, 8, 128), "medium": GPTSize(384, 6, 256)}
"""In one layer 13 thousand, 0.8 million and 1.8 million parameters."""


@dataclass(frozen=True)
class GPTShape:
    """What fixes the shape of every parameter."""

    width: int
    heads: int
    sequence: int
    layers: int
