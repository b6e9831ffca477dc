"""A measured model made by hand: two equal stages."""

from __future__ import annotations

from optpipe.problem import CopyChannels
from optpipe.profile.measured import Measured, StageFigures
from optpipe.profile.ops import Spread
from optpipe.profile.transfers import Contention, Transfers
from optpipe.runtime.probe import StageSizes

BEFORE = {"F": 10.0, "B": 20.0, "W": 8.0, "BW": 26.0, "O": 4.0, "R": 5.0}


def spread(us: float) -> Spread:
    """Spread of a time that was measured once."""
    return Spread(us, us, us, 1)


def measured(stages: int = 2) -> Measured:
    """Each stage on a device of its own."""
    sizes = StageSizes(100, 40, 60, {"F": 0, "B": 0, "W": 0, "BW": 0})
    figures = StageFigures({kind: spread(us) for kind, us in BEFORE.items()}, sizes, 1000)
    return Measured(
        name="two stages",
        microbatch_size=1,
        placement=range(stages),
        stages=[figures] * stages,
        message_bytes=[8] * (stages - 1),
        transfers=Transfers("by hand", [spread(1.0)] * (stages - 1)),
        contention=Contention(CopyChannels(), "by hand"),
        hardware="none",
        clock="wall",
    )
