"""Orders of one stage that go in turns, one microbatch of each kind a turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe.orders import KINDS, OpArray


def in_turn(stage: int, microbatches: int, kinds: Sequence[tuple[str, int]]) -> OpArray:
    """All ops of these kinds on a stage, turn by turn.

    `kinds` are in the order that they have within a turn, each with the turn of its first microbatch; the next ones
    follow turn by turn. Kinds that begin in turns below 0 are the warm-up.
    """
    microbatch = np.tile(np.arange(microbatches), len(kinds))
    rank = np.repeat(np.arange(len(kinds)), microbatches)
    turn = microbatch + np.array([first for _, first in kinds])[rank]
    order = np.lexsort((rank, turn))
    code = np.array([KINDS.index(kind) for kind, _ in kinds])[rank]
    return OpArray(code[order], np.full(len(order), stage), microbatch[order])
