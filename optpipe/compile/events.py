"""Stream events: the smallest set of waits that enforces every dependency of every action.

A stream runs its actions in list order, so an action needs an event only for dependencies on other streams, and none
for those that an earlier action of its stream, or another of its waits, has waited for already. The vector clock
(`Clock`) of an action is the minimum progress of the three ordered streams of the device when it ends; a wait that
another clock covers is redundant. Messages are not ordered among themselves, so one message implies nothing about
another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, takewhile

from optpipe.compile.program import EXCHANGES, RECEIVES, Action, Program, matching_send, stream_of
from optpipe.kinds import KIND, OPTIONAL, Need, covering, needs_of
from optpipe.ops import Op
from optpipe.spread import VocabularyPasses

Clock = tuple[int, int, int]
"""Number of actions of the compute, offload and reload stream that have ended."""

_ORDERED = ("compute", "offload", "reload")


@cache
def _clock_index(kind: str) -> int | None:
    """Index into a clock of the stream of a kind; None for messages, which have no order among themselves."""
    stream = stream_of(kind)
    return None if stream == "communication" else _ORDERED.index(stream)


class Clocks:
    """Vector clocks of one device while its list is issued: which actions have surely ended when another starts."""

    def __init__(self) -> None:
        self._streams: list[Clock] = [(0, 0, 0)] * len(_ORDERED)
        self._end_clocks: dict[Key, Clock] = {}
        self._ticks: dict[Key, tuple[int, int]] = {}

    def stream(self, kind: str) -> Clock:
        """Clock at the start of the next action of a kind, by the order of its stream alone."""
        index = _clock_index(kind)
        return (0, 0, 0) if index is None else self._streams[index]

    def after(self, clock: Clock, waits: Iterable[Key]) -> Clock:
        """Clock at the end of all of `waits`, which have been issued, and not before `clock`."""
        for wait in waits:
            clock = tuple(map(max, clock, self._end_clocks[wait]))  # type: ignore[assignment]
        return clock

    def issue(self, key: Key, clock: Clock) -> None:
        """Issue an action that starts at `clock`."""
        index = _clock_index(key[0])
        if index is not None:
            tick = self._streams[index][index] + 1
            clock = (*clock[:index], tick, *clock[index + 1 :])  # type: ignore[assignment]
            self._streams[index] = clock
            self._ticks[key] = index, tick
        self._end_clocks[key] = clock

    def covers(self, clock: Clock, need: Key) -> bool:
        """True if the action must have ended by `clock`; False for messages and for actions not issued."""
        tick = self._ticks.get(need)
        return tick is not None and clock[tick[0]] >= tick[1]

    def issued(self, key: Key) -> bool:
        """True if the action has been issued."""
        return key in self._end_clocks

    def fewest(self, clock: Clock, needs: Iterable[Key]) -> tuple[Op, ...]:
        """Needs that `clock` does not cover, without those that another need implies."""
        left = [need for need in needs if not self.covers(clock, need)]
        if len(left) > 1:
            left = [
                need
                for need in dict.fromkeys(left)
                if not any(other != need and self.covers(self._end_clocks[other], need) for other in left)
            ]
        return tuple(Op(*need) for need in left)


def with_events(program: Program) -> Program:
    """Replace `waits` by the fewest events that enforce them, the rules, and the memory order of receives."""
    rules = Rules.of(program, {action[:3] for action in program.actions()})
    devices = []
    for actions in program.devices:
        clocks, reduced = Clocks(), []
        for action, needs in zip(actions, local_needs(actions, rules), strict=True):
            begin = clocks.stream(action.kind)
            waits = clocks.fewest(begin, (*needs, *action.waits))
            clocks.issue(action[:3], clocks.after(begin, waits))
            reduced.append(Action(*action[:4], waits, action.slab))
        devices.append(tuple(reduced))
    return replace(program, devices=tuple(devices))


def local_needs(actions: Sequence[Action], rules: Rules) -> Iterator[tuple[Key, ...]]:
    """For each action of a device's list, the actions of that device that must end before it starts, without waits.

    These follow from the rules. A receive, and what a device gets in an exchange, needs the compute action before it,
    since its memory is allocated in the order of the compute stream.
    """
    last: tuple[Key, ...] = ()
    for action in actions:
        key, kind = action[:3], action.kind
        yield last if kind in RECEIVES else (*last, *rules.needs(key)) if kind in EXCHANGES else rules.needs(key)
        if _clock_index(kind) == 0:
            last = (key,)


Key = tuple[str, int, int]
"""Kind, stage and microbatch of an action: equal to its Op, but cheaper to build for a lookup."""

_OWN = {"RELEASE": "O", "PREPARE": "RELEASE", "R": "PREPARE", "SEND_F": "F", "SEND_B": "B"}
"""The only duty or action that an action of a kind needs, of the same stage and microbatch."""


@dataclass(frozen=True)
class Rules:
    """Dependency rules. `placement[s]` is the device of stage s; `present` holds all ops of the schedule.

    With `slices` of each microbatch, F follows that of the slice before, a backward that of the slice behind. With a
    `vocabulary` layer on all devices, what comes behind its exchanges waits for those of its own device.
    """

    placement: Sequence[int]
    present: Collection[Key]
    slices: int = 1
    vocabulary: VocabularyPasses | None = None

    @classmethod
    def of(cls, program: Program, present: Collection[Key]) -> Rules:
        """The rules of a program."""
        return cls(program.placement, present, program.slices, program.vocabulary)

    def crosses(self, boundary: int) -> bool:
        """True if stages `boundary` and `boundary + 1` are on different devices."""
        return self.placement[boundary] != self.placement[boundary + 1]

    def doer(self, duty: str, stage: int, microbatch: int) -> Key:
        """Op or action of a duty: the op that covers it, where there is one."""
        keys = ((kind, stage, microbatch) for kind in covering(duty))
        return next((key for key in keys if key in self.present), (duty, stage, microbatch))

    def needs(self, key: Key) -> tuple[Key, ...]:
        """Actions that must end before an action starts, beyond the order of its list and its waits."""
        kind, s, i = key
        if kind in _OWN:
            return (self.doer(_OWN[kind], s, i),)
        if self.vocabulary and (kind in EXCHANGES or kind in self.vocabulary[:2]):
            return self._needs_of_vocabulary(kind, s, i, self.vocabulary)
        if kind in KIND:
            gradient: tuple[Key, ...] = ()
            if self.vocabulary and s == len(self.placement) - 1 and KIND[kind].duties[0] == "B":
                gradient = (("REDUCE_INPUT", self.placement[s], i),)
            return (*(op for need in needs_of(kind) for op in self._needed(need, s, i)), *gradient)
        if kind in RECEIVES:
            return (matching_send(Op(*key)),)
        if kind in ("GATHER", "REDUCE_PART"):
            return ()  # their place in the compute stream decides
        units = takewhile(lambda unit: ("F", s, unit) in self.present, count())
        return tuple(self.doer("W", s, unit) for unit in units)  # of REDUCE: the weight gradients of every microbatch

    def _needs_of_vocabulary(self, kind: str, device: int, i: int, passes: VocabularyPasses) -> tuple[Key, ...]:
        """Needs of a pass of the vocabulary layer, or of a device in an exchange, on its own device."""
        last = len(self.placement) - 1
        if kind == "BROADCAST":
            return (("F", last, i),) if self.placement[last] == device else ()
        before = {
            passes.logits: ["BROADCAST"],
            "ALL_GATHER": [passes.logits],
            passes.weights: [passes.logits, "REDUCE_INPUT" if passes.barriers == 1 else "ALL_GATHER"],
            "REDUCE_INPUT": [passes.logits, "ALL_GATHER"] if passes.barriers == 1 else [passes.weights],
        }
        return tuple((other, device, i) for other in before[kind])

    def _needed(self, need: Need, s: int, i: int) -> Iterator[Key]:
        """The op or the receive that a need of stage s and microbatch i stands for, where there is any."""
        stage, unit = s + need.stage, i + need.slice
        if not 0 <= stage < len(self.placement) or unit // self.slices != i // self.slices:
            return
        if need.direction is not None and self.crosses(min(s, stage)):
            yield (RECEIVES[0 if need.direction == "forward" else 1], s, i)
            return
        op = self.doer(need.duty, stage, unit)
        if need.duty not in OPTIONAL or op in self.present:
            yield op
