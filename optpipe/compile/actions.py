"""Actions and programs: what an interpreter executes, one list a device.

The ops of a schedule keep their kinds (F, B, W, BW, O, R). Where consecutive stages sit on different devices, a
message crosses their boundary and two actions carry it: SEND_F on the stage before and RECV_F on the stage after for
activations, SEND_B on the stage after and RECV_B on the stage before for gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from optpipe.orders import Op

SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")


class Message(NamedTuple):
    """What crosses the boundary between stages `boundary` and `boundary + 1` for one microbatch.

    `direction` "F" is the activation on its way forward, "B" the gradient on its way back.
    """

    direction: Literal["F", "B"]
    boundary: int
    microbatch: int


class Action(NamedTuple):
    """One entry of a device's list. Written as ``F0.3``, ``SEND_F0.3->1``, ``RECV_B0.3<-1``.

    `peer` is the other device of a send or receive. `waits` are the ops of other streams whose end the action waits
    for; in one list they are already in order, an executor with several streams turns them into events.
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None
    waits: tuple[Op, ...] = ()

    @property
    def key(self) -> Op:
        """Kind, stage and microbatch: unique in a program."""
        return Op(self.kind, self.stage, self.microbatch)

    @property
    def message(self) -> Message:
        """What a send or receive carries."""
        return message_of(self.key)

    def __str__(self) -> str:
        if self.peer is None:
            return str(self.key)
        return f"{self.key}{'->' if self.kind in SENDS else '<-'}{self.peer}"


def message_of(key: Op) -> Message:
    """The message of a send or receive."""
    after_boundary = key.kind in ("RECV_F", "SEND_B")
    direction: Literal["F", "B"] = "F" if key.kind.endswith("F") else "B"
    return Message(direction, key.stage - 1 if after_boundary else key.stage, key.microbatch)


def matching_send(receive: Op) -> Op:
    """The send that a receive needs."""
    if receive.kind == "RECV_F":
        return Op("SEND_F", receive.stage - 1, receive.microbatch)
    return Op("SEND_B", receive.stage + 1, receive.microbatch)


def matching_receive(send: Op) -> Op:
    """The receive that takes what a send gives."""
    if send.kind == "SEND_F":
        return Op("RECV_F", send.stage + 1, send.microbatch)
    return Op("RECV_B", send.stage - 1, send.microbatch)


@dataclass(frozen=True)
class Program:
    """What every device executes: `devices[d]` is device d's list, `placement[s]` the device of stage s."""

    microbatches: int
    placement: tuple[int, ...]
    devices: tuple[tuple[Action, ...], ...]

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs whose activations leave to the host and come back."""
        return frozenset((a.stage, a.microbatch) for a in self.actions() if a.kind == "O")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole program: processes compare it before they start to talk to one another."""
        return hashlib.sha256("\n".join(self._lines()).encode()).hexdigest()

    def actions(self) -> Iterator[Action]:
        """Every action, device by device."""
        for actions in self.devices:
            yield from actions

    def crosses(self, boundary: int) -> bool:
        """Whether stages `boundary` and `boundary + 1` sit on different devices."""
        return self.placement[boundary] != self.placement[boundary + 1]

    def _lines(self) -> Iterator[str]:
        yield f"optpipe.program/1 {self.microbatches} {self.placement}"
        for actions in self.devices:
            yield " ".join(f"{action}({','.join(map(str, action.waits))})" for action in actions)


def excerpt(actions: Sequence[Action], place: int, around: int = 3) -> str:
    """The actions around a place, one a line, with an arrow at the place: for messages."""
    first = max(0, place - around)
    return "\n".join(
        f"{'->' if k == place else '  '} [{k}] {action}"
        for k, action in enumerate(actions[first : place + around + 1], first)
    )
