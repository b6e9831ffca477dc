"""Stream events: the fewest waits that give every action what it depends on.

A stream runs its actions in list order, so an action needs an event only for what other streams do, and none for what
an action before it on its stream, or another of its waits, has already waited for. How far the three ordered streams of
a device must be when an action is over is its `Clock`; a wait that another clock covers is left out. Messages have no
order among themselves, so nothing is ever inferred from one message about another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from optpipe.compile.program import RECEIVES, STREAM_OF_KIND, Action, Program, matching_send
from optpipe.ops import Op

Clock = tuple[int, int, int]
"""How many actions of the compute, offload and reload stream are over."""

_ORDERED = ("compute", "offload", "reload")
_PLACE = {kind: _ORDERED.index(stream) for kind, stream in STREAM_OF_KIND.items() if stream in _ORDERED}
"""For each kind with a stream that keeps order, the place of that stream in a clock."""


class Clocks:
    """The streams of one device while its list is played: what is over for certain when an action begins or ends."""

    def __init__(self) -> None:
        self._streams: list[Clock] = [(0, 0, 0)] * len(_ORDERED)
        self._over: dict[Key, Clock] = {}
        self._ticks: dict[Key, tuple[int, int]] = {}

    def stream(self, kind: str) -> Clock:
        """What is over for certain when the next action of a kind begins, whatever it waits for."""
        place = _PLACE.get(kind)
        return (0, 0, 0) if place is None else self._streams[place]

    def after(self, clock: Clock, waits: Iterable[Key]) -> Clock:
        """What is over for certain at `clock` when these waits, all of which were issued, are over too."""
        for wait in waits:
            clock = tuple(map(max, clock, self._over[wait]))  # type: ignore[assignment]
        return clock

    def issue(self, key: Key, clock: Clock) -> None:
        """Play an action that begins at `clock`."""
        place = _PLACE.get(key[0])
        if place is not None:
            tick = self._streams[place][place] + 1
            clock = (*clock[:place], tick, *clock[place + 1 :])  # type: ignore[assignment]
            self._streams[place] = clock
            self._ticks[key] = place, tick
        self._over[key] = clock

    def covers(self, clock: Clock, need: Key) -> bool:
        """Whether an action is over for certain at `clock`. Of messages and what was not issued none knows."""
        tick = self._ticks.get(need)
        return tick is not None and clock[tick[0]] >= tick[1]

    def issued(self, key: Key) -> bool:
        """Whether an action has been played."""
        return key in self._over

    def fewest(self, clock: Clock, needs: Iterable[Key]) -> tuple[Op, ...]:
        """The needs that are not over at `clock` for certain, without those that another one implies."""
        left = [need for need in needs if not self.covers(clock, need)]
        if len(left) > 1:
            left = [
                need
                for need in dict.fromkeys(left)
                if not any(other != need and self.covers(self._over[other], need) for other in left)
            ]
        return tuple(Op(*need) for need in left)


def with_events(program: Program) -> Program:
    """The program with `waits` reduced to the events that are needed, rules and memory of messages included."""
    rules = Rules(program.placement, {action[:3] for action in program.actions()})
    return replace(program, devices=tuple(tuple(_reduced(actions, rules)) for actions in program.devices))


def _reduced(actions: Sequence[Action], rules: Rules) -> Iterator[Action]:
    clocks = Clocks()
    for action, needs in zip(actions, local_needs(actions, rules), strict=True):
        begin = clocks.stream(action.kind)
        waits = clocks.fewest(begin, (*needs, *action.waits))
        clocks.issue(action[:3], clocks.after(begin, waits))
        yield Action(*action[:4], waits, action.slab)


def local_needs(actions: Sequence[Action], rules: Rules) -> Iterator[tuple[Key, ...]]:
    """For each action of a device's list the actions of that device that must be over when it begins.

    These are the rules, and for a receive, whose memory is taken in the order of the compute stream, the compute
    action before it. Waits are not included.
    """
    last: tuple[Key, ...] = ()
    for action in actions:
        key, kind = action[:3], action.kind
        yield last if kind in RECEIVES else rules.needs(key)
        if _PLACE.get(kind) == 0:
            last = (key,)


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
