"""What strengthens the model and steers the search; each part can be switched off to see what it is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """`windows`: orders that time windows and budgets imply are fixed, and big-M are the least that the windows allow.

    `chains`: order binaries agree along microbatches. `workloads`: an op starts after all work that is ordered before
    it, and ends before all that is ordered after it. `triangles`: the orders of any three ops are no circle (OptPipe's
    triangle cuts), for up to `triangle_microbatches`. `rebuild_gain`: by which share a schedule must be better than the
    one that the model was built for, to build it again with narrower windows.
    """

    windows: bool = True
    chains: bool = True
    workloads: bool = True
    triangles: bool = True
    triangle_microbatches: int = 12
    rebuild_gain: float = 0.02


DEFAULT = Options()
