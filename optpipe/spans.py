"""The smallest device span of given orders.

Orders fix a network of precedences; each device may begin when it likes. Let D[d, e] be the longest path from the
first op of device d to the end of the last op of device e. Asking that no span exceeds S adds an edge of length -S
from each device's end to its begin; times exist exactly if no circle is longer than 0, and a circle through k
devices has length (sum of k entries of D) - k S. So the smallest span is the largest mean of a circle of D: the rate
at which iterations follow one another when no device waits for a global barrier (Zero Bubble, post-validation).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEVER = -1e300
"""Release time of nodes that are not on a path from the source."""


def least_span_starts(
    earliest: Callable[[Floats], Floats], duration: Floats, first: Ints, last: Ints, start: Floats
) -> Floats:
    """Start times (us) whose largest span over devices is smallest.

    `earliest` maps release times to earliest starts; `first[d]` and `last[d]` are the nodes that begin and end device
    d, `start` the earliest starts without releases.
    """
    if (start[last] + duration[last] - start[first]).max() <= _longest_own_path(earliest, duration, first, last, start):
        return start
    paths = np.empty((len(first), len(first)))
    for d, node in enumerate(first):
        release = np.full(len(duration), NEVER)
        release[node] = 0.0
        paths[d] = earliest(release)[last] + duration[last]
    return _starts_within(largest_circle_mean(paths), earliest, duration, first, last, start)


def _longest_own_path(
    earliest: Callable[[Floats], Floats], duration: Floats, first: Ints, last: Ints, start: Floats
) -> float:
    """The span of the device with the largest one at earliest starts, were it alone to begin: no span can be less."""
    worst = int(np.argmax(start[last] + duration[last] - start[first]))
    release = np.full(len(duration), NEVER)
    release[first[worst]] = 0.0
    return float(earliest(release)[last[worst]] + duration[last[worst]])


def _starts_within(
    span: float, earliest: Callable[[Floats], Floats], duration: Floats, first: Ints, last: Ints, start: Floats
) -> Floats:
    """Earliest starts that keep every span within `span` (which is known to be possible, up to rounding)."""
    release = np.zeros(len(duration))
    best = start
    for _ in range(len(first) + 1):
        wanted = np.maximum(release[first], start[last] + duration[last] - span)
        if np.allclose(wanted, np.maximum(release[first], start[first]), rtol=0, atol=1e-9 * span):
            break
        release[first] = np.maximum(wanted, start[first])
        start = earliest(release)
        best = min(best, start, key=lambda s: float((s[last] + duration[last] - s[first]).max()))
    return best


def largest_circle_mean(lengths: Floats) -> float:
    """The largest mean length of a circle in a complete graph with edge lengths `lengths[d, e]` (Karp 1978)."""
    size = len(lengths)
    walks = np.empty((size + 1, size))
    walks[0] = np.where(np.arange(size) == 0, 0.0, -np.inf)
    for k in range(size):
        walks[k + 1] = (walks[k][:, None] + lengths).max(axis=0)
    steps = size - np.arange(size)
    with np.errstate(invalid="ignore"):
        means = (walks[size][None, :] - walks[:size]) / steps[:, None]
    return float(np.nanmin(np.where(np.isnan(means), np.inf, means), axis=0).max())
