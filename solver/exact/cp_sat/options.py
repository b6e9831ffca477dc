"""What is in the model beyond the rules; each part can be switched off to see what it is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """`work`: what a device must have done before an op, and has left after it (`solver.exact.progress`).

    `weight_order`: W of like stages run in the order of their B (`solver.exact.weight_order`).
    """

    work: bool = True
    weight_order: bool = True


DEFAULT = Options()
