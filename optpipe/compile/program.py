"""Actions and programs: what an interpreter executes, one list a device, in the order in which its host issues them.

The ops of a schedule keep their kinds (F, B, W, BW, O, R). Lowering adds:

* Messages. Where consecutive stages sit on different devices, SEND_F on the stage before and RECV_F on the stage
  after carry activations, SEND_B on the stage after and RECV_B on the stage before gradients.
* RELEASE and PREPARE. Device memory is taken and given back on the compute stream only, so an offload is four actions:
  O copies out, RELEASE frees once that copy is over, PREPARE allocates anew, R copies in.
* REDUCE, where asked for: the gradients of a stage are complete and may be summed over replicas.

Every action belongs to one stream (`Action.stream`). A stream runs its actions in list order; between streams only
`Action.waits` order anything. So a host thread that issues its list without ever looking at the clock needs, for each
action: wait on the events named, run, and record an event if it is in `Program.awaited`. Which memory is in use is
decided by the list alone (see `optpipe.compile.offload`), never by how long anything takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from optpipe.ops import Op

SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")

ActionStream = Literal["compute", "offload", "reload", "communication"]

STREAM_OF_KIND: dict[str, ActionStream] = {
    **dict.fromkeys(("F", "B", "W", "BW", "RELEASE", "PREPARE", "REDUCE"), "compute"),
    "O": "offload",
    "R": "reload",
    **dict.fromkeys((*SENDS, *RECEIVES), "communication"),
}


class Message(NamedTuple):
    """What crosses the boundary between stages `boundary` and `boundary + 1` for one microbatch.

    `direction` "F" is the activation on its way forward, "B" the gradient on its way back.
    """

    direction: Literal["F", "B"]
    boundary: int
    microbatch: int


class Action(NamedTuple):
    """One entry of a device's list. Written as ``F0.3``, ``SEND_F0.3->1``, ``RECV_B0.3<-1``, ``O0.3@2``.

    `peer` is the other device of a send or receive. `waits` are the actions of the same device but of other streams
    that must be over before this one may start: each becomes one event. They are minimal: what follows from another
    wait or from the order of a stream is left out. `slab` is the place in `Program.slabs` of the host buffer of an O.
    REDUCE has microbatch 0.
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None
    waits: tuple[Op, ...] = ()
    slab: int | None = None

    @property
    def key(self) -> Op:
        """Kind, stage and microbatch: unique in a program."""
        return Op(self.kind, self.stage, self.microbatch)

    @property
    def stream(self) -> ActionStream:
        """The stream that runs it. Messages have no order among themselves but first in, first out for each pair."""
        return STREAM_OF_KIND[self.kind]

    @property
    def message(self) -> Message:
        """What a send or receive carries."""
        return message_of(self.key)

    def __str__(self) -> str:
        if self.slab is not None:
            return f"{self.key}@{self.slab}"
        if self.peer is None:
            return str(self.key)
        return f"{self.key}{'->' if self.kind in SENDS else '<-'}{self.peer}"


class Slab(NamedTuple):
    """One pinned host buffer of a device, used by one offloaded activation after another.

    `size_bytes` is the planned size: the largest offload among its users. `stages` are those users, ascending; where
    real sizes differ from planned ones, the buffer has to hold the largest real one of these stages.
    """

    size_bytes: int
    stages: tuple[int, ...]


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
    """What every device executes: `devices[d]` is device d's list, `placement[s]` the device of stage s.

    `slabs[d]` are the host buffers of device d, to be allocated once before the first step; empty where nothing leaves.
    """

    microbatches: int
    placement: tuple[int, ...]
    devices: tuple[tuple[Action, ...], ...]
    slabs: tuple[tuple[Slab, ...], ...] = ()

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs whose activations leave to the host and come back."""
        return frozenset((a.stage, a.microbatch) for a in self.actions() if a.kind == "O")

    @cached_property
    def awaited(self) -> frozenset[Op]:
        """The actions that must record an event, because some action waits for it."""
        return frozenset(op for action in self.actions() for op in action.waits)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole program: processes compare it before they start to talk to one another."""
        return _sha256("\n".join((self._header, *self.device_digests)))

    @cached_property
    def device_digests(self) -> tuple[str, ...]:
        """SHA-256 of each device's list and slabs: where two programs differ, these tell on which device."""
        slabs = self.slabs or ((),) * len(self.devices)
        return tuple(
            _sha256("\n".join((*map(_whole, actions), *map(str, mine))))
            for actions, mine in zip(self.devices, slabs, strict=True)
        )

    def actions(self) -> Iterator[Action]:
        """Every action, device by device."""
        for actions in self.devices:
            yield from actions

    def kinds_of(self, stage: int) -> frozenset[str]:
        """The kinds of a stage's actions."""
        return frozenset(action.kind for action in self.actions() if action.stage == stage)

    def crosses(self, boundary: int) -> bool:
        """Whether stages `boundary` and `boundary + 1` sit on different devices."""
        return self.placement[boundary] != self.placement[boundary + 1]

    @property
    def _header(self) -> str:
        return f"optpipe.program/2 {self.microbatches} {self.placement}"


def _whole(action: Action) -> str:
    return f"{action}({','.join(map(str, action.waits))})"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def excerpt(actions: Sequence[Action], place: int, around: int = 3) -> str:
    """The actions around a place, one a line, with an arrow at the place: for messages."""
    first = max(0, place - around)
    return "\n".join(
        f"{'->' if k == place else '  '} [{k}] {action}"
        for k, action in enumerate(actions[first : place + around + 1], first)
    )
