"""What is in the model beyond the rules; each part can be switched off to see what it is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """`work`: what a device must have done before an op, and has left after it (`solver.exact.progress`).

    `weight_order`: W of like stages run in the order of their B (`solver.exact.weight_order`), for
    up to `most_weight_pairs` pairs: there are as many as microbatches squared. `climb`: a schedule at
    the bound is asked for first, and the bound raised where there is none.
    """

    work: bool = True
    weight_order: bool = True
    most_weight_pairs: int = 20_000
    climb: bool = True


DEFAULT = Options()
