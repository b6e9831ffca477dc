"""What each action needs before it may start: the rules of the model, with messages and copies spelt out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from optpipe.compile.actions import RECEIVES, matching_send
from optpipe.orders import Op

Key = tuple[str, int, int]
"""Kind, stage and microbatch of an action: equal to its Op, and cheaper to make for whoever only looks it up."""

_OWN = {"W": "B", "O": "F", "RELEASE": "O", "PREPARE": "RELEASE", "R": "PREPARE", "SEND_F": "F"}
"""The one action of the same stage and microbatch that must be over before one of a kind starts."""


@dataclass(frozen=True)
class Rules:
    """`placement[s]` is the device of stage s; `present` holds the ops that run (at least all F, B, W, BW, O, R)."""

    placement: Sequence[int]
    present: Collection[Key]

    def crosses(self, boundary: int) -> bool:
        """Whether a message between `boundary` and `boundary + 1` needs a send and a receive."""
        return self.placement[boundary] != self.placement[boundary + 1]

    def backward(self, stage: int, microbatch: int) -> Key:
        """The op that computes the input gradient: BW where B and W are fused, B otherwise."""
        fused = ("BW", stage, microbatch)
        return fused if fused in self.present else ("B", stage, microbatch)

    def needs(self, key: Key) -> tuple[Key, ...]:
        """The actions whose end an action needs, beyond the order of its list and its waits."""
        kind, s, i = key
        if kind in _OWN:
            return ((_OWN[kind], s, i),)
        if kind == "F":
            return self._input(s, i)
        if kind in ("B", "BW"):
            return self._before_backward(s, i)
        if kind == "SEND_B":
            return (self.backward(s, i),)
        if kind in RECEIVES:
            return (matching_send(Op(*key)),)
        return self._weight_gradients(s)

    def _input(self, s: int, i: int) -> tuple[Key, ...]:
        if s == 0:
            return ()
        return (("RECV_F", s, i),) if self.crosses(s - 1) else (("F", s - 1, i),)

    def _before_backward(self, s: int, i: int) -> tuple[Key, ...]:
        forward, reload = ("F", s, i), ("R", s, i)
        own = (forward, reload) if reload in self.present else (forward,)
        if s + 1 == len(self.placement):
            return own
        return (*own, ("RECV_B", s, i) if self.crosses(s) else self.backward(s + 1, i))

    def _weight_gradients(self, s: int) -> tuple[Key, ...]:
        needs: list[Key] = []
        while ("F", s, len(needs)) in self.present:
            fused = ("BW", s, len(needs))
            needs.append(fused if fused in self.present else ("W", s, len(needs)))
        return tuple(needs)
