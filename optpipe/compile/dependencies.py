"""What each action needs before it may start: the rules of the model, with the messages between devices spelt out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from optpipe.compile.actions import RECEIVES, matching_send
from optpipe.orders import Op


@dataclass(frozen=True)
class Rules:
    """`placement[s]` is the device of stage s; `present` holds the ops that run (at least all F, B, W, BW, O, R)."""

    placement: Sequence[int]
    present: Collection[Op]

    def crosses(self, boundary: int) -> bool:
        """Whether a message between `boundary` and `boundary + 1` needs a send and a receive."""
        return self.placement[boundary] != self.placement[boundary + 1]

    def backward(self, stage: int, microbatch: int) -> Op:
        """The op that computes the input gradient: BW where B and W are fused, B otherwise."""
        fused = Op("BW", stage, microbatch)
        return fused if fused in self.present else Op("B", stage, microbatch)

    def needs(self, op: Op) -> Iterator[Op]:
        """The actions whose end `op` needs, beyond the order of its list and its waits."""
        kind, s, i = op
        if kind in RECEIVES:
            yield matching_send(op)
        elif kind == "F":
            yield from self._input(s, i)
        elif kind in ("B", "BW"):
            yield from self._before_backward(s, i)
        elif kind == "SEND_B":
            yield self.backward(s, i)
        else:
            yield Op({"W": "B", "O": "F", "R": "O", "SEND_F": "F"}[kind], s, i)

    def _input(self, s: int, i: int) -> Iterator[Op]:
        if s > 0:
            yield Op("RECV_F", s, i) if self.crosses(s - 1) else Op("F", s - 1, i)

    def _before_backward(self, s: int, i: int) -> Iterator[Op]:
        yield Op("F", s, i)
        if Op("O", s, i) in self.present:
            yield Op("R", s, i)
        if s + 1 < len(self.placement):
            yield Op("RECV_B", s, i) if self.crosses(s) else self.backward(s + 1, i)
