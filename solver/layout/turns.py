"""How the time of a plan is shared: all candidates are looked at, then the promising ones are solved in turns.

Nothing can be relied on to end in its time, least of all on a busy machine: whoever begins gets a part of what is left
then, so that what one takes too long is taken from those after it, and the whole ends in time.
"""

from __future__ import annotations

from threading import Lock

from solver.limits import Limits

AT_ONCE = 0.4
"""No candidate is cut or looked at after this share of the time."""

CUT_SHARE = 0.1
"""Of the time that is left: what cutting the layers for one placement may take."""

PUBLISHED_SHARE = 0.1
"""Of the time that is left: what the published schedules of one candidate may take."""

LEAST_S = 2.0
"""The shortest turn: a child process takes about a second to begin."""

MOST_RESERVE_S = 1.0
RESERVE = 0.1
"""Time kept for what comes after the last turn: at most this many seconds, or this share of a short limit."""


def late(limits: Limits) -> bool:
    """Whether the time for looking at further candidates is over."""
    return limits.cancel.requested or limits.seconds > AT_ONCE * limits.time_limit_s


class Turns:
    """The turns of one round, which has a share of the time that is left: `count` of them, on so many cores at once."""

    def __init__(self, limits: Limits, share: float, count: int, cores: int) -> None:
        self._limits = limits
        reserve_s = min(MOST_RESERVE_S, RESERVE * limits.time_limit_s)
        self._end_s = limits.seconds + share * (limits.time_limit_s - reserve_s - limits.seconds)
        self._waiting = count
        self._cores = cores
        self._lock = Lock()

    def worthwhile(self) -> bool:
        """Whether the turns that wait are long enough for a solve."""
        return self._length_s(self._waiting) >= LEAST_S

    def begin(self) -> float | None:
        """Begin one turn: its seconds, or None where no time is left for a solve."""
        with self._lock:
            seconds = self._length_s(self._waiting)
            self._waiting -= 1
        return seconds if seconds >= LEAST_S else None

    def _length_s(self, waiting: int) -> float:
        one_after_another = -(-waiting // self._cores)
        return (self._end_s - self._limits.seconds) / max(1, one_after_another)
