"""What strengthens the model and steers the search; each part can be switched off to see what it is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """`windows`: orders that time windows and budgets imply are fixed, and big-M are the least that the windows allow.

    `chains`: order binaries agree along microbatches. `workloads`: an op starts after all work that is ordered before
    it, and ends before all that is ordered after it. `triangles`: the orders of any three ops are no circle (OptPipe's
    triangle cuts), for up to `triangle_microbatches`. `work`: what a device must have done before an op and has left
    after it, as cuts. `weight_order`: W of like stages run in the order of their B (a symmetry). `bound`: no value is
    below the bound known. `warm_start`: the search begins with the best schedule known. `rebuild_gain`: by which share
    a schedule must be better than the one that the model was built for, to build it again with narrower windows.

    What each is worth depends on the problem (`docs/benchmarks.md`): triangles and chains cost more than they give on
    some linear ones, and decide whether a V is proved.
    """

    windows: bool = True
    chains: bool = True
    workloads: bool = True
    triangles: bool = True
    triangle_microbatches: int = 12
    work: bool = True
    weight_order: bool = True
    bound: bool = True
    warm_start: bool = True
    rebuild_gain: float = 0.02


DEFAULT = Options()
