"""Whether an optimistic step is worth its risk."""

from __future__ import annotations

from collections import deque

WINDOW = 16
"""Steps that are looked back on."""

MOST_WRONG = 4
"""Of these; with more, the next update waits. A step that is undone was measured to lose two to three times what one
without a barrier saves (`python -m benchmarks.updates updates`), so they are even at about a third of wrong steps."""


class Patience:
    """Says when to wait for all processes: after many steps that were, or would have been, rolled back.

    It goes by outcomes alone, which are the same in every process, so all of them wait together. While it waits,
    outcomes still tell which updates would have been wrong, so it also sees when to begin again.
    """

    def __init__(self) -> None:
        self._wrong: deque[bool] = deque(maxlen=WINDOW)

    def add(self, *, wrong: bool) -> None:
        """One more step whose outcome is known."""
        self._wrong.append(wrong)

    @property
    def waits(self) -> bool:
        """Whether the next update should wait for its sums."""
        return sum(self._wrong) > MOST_WRONG
