"""The blocks found so far, each with its best ends: which one to work on next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.search.pattern.block import Pattern
from solver.search.pattern.ends import Ends

TUNED = 0.8
"""How likely the best choice is the one to be tuned, and if it is not, the next best, and so on."""

KEPT = 200
"""Blocks that are remembered with their ends: those with the best."""


@dataclass(frozen=True)
class Choice:
    """A pattern with its ends, the value that they promise, and the block that it was stretched from."""

    base: Pattern
    pattern: Pattern
    ends: Ends
    value_us: float


class Pool:
    """Choices, one of each block: which ends a block will have shows only when it has been stretched and tuned.

    So the block with the best ends before that is not stretched alone, but others too, in turns the one with the best
    ends and the shortest one.
    """

    def __init__(self) -> None:
        self._choices: dict[bytes, Choice] = {}
        self._seen: set[bytes] = set()
        self._stretched: set[bytes] = set()

    def is_new(self, pattern: Pattern) -> bool:
        """Whether no pattern with the same period and the same orders was asked for before."""
        before = len(self._seen)
        self._seen.add(pattern.key)
        return len(self._seen) > before

    def keep(self, choice: Choice) -> bool:
        """Remember a choice if it is the best of its block; whether it is."""
        key = choice.base.key
        known = self._choices.get(key)
        if known is not None and known.value_us <= choice.value_us:
            return False
        self._choices[key] = choice
        if len(self._choices) > KEPT:
            del self._choices[max(self._choices, key=lambda key: self._choices[key].value_us)]
        return True

    def next_to_stretch(self) -> Pattern | None:
        """A block that has not been asked for before; none where all have."""
        waiting = [(key, choice) for key, choice in self._choices.items() if key not in self._stretched]
        if not waiting:
            return None
        by_value = len(self._stretched) % 2 == 0
        key, choice = min(waiting, key=lambda pair: pair[1].value_us if by_value else pair[1].base.block_us)
        self._stretched.add(key)
        return choice.base

    def next_to_tune(self, rng: np.random.Generator) -> Choice | None:
        """A choice at random, the better the likelier."""
        if not self._choices:
            return None
        ranked = sorted(self._choices.values(), key=lambda choice: choice.value_us)
        return ranked[min(int(rng.geometric(TUNED)) - 1, len(ranked) - 1)]
