"""Waits between streams: the fewest events with which every action finds ready what it needs.

A stream runs its actions in list order, so an action needs an event only for what other streams do, and none for what
an action before it on its stream, or another of its waits, has already waited for. How far the three ordered streams of
a device must be when an action is over is its `Clock`; a wait that another clock covers is left out. Messages have no
order among themselves, so nothing is ever inferred from one message about another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from optpipe.compile.actions import RECEIVES, STREAM_OF_KIND, Action, Program
from optpipe.compile.dependencies import Key, Rules
from optpipe.orders import Op

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
