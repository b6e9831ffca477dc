"""Actions and programs: one list of actions per device, in the order in which its host thread issues them.

The ops of a schedule keep their kinds (`optpipe.kinds`). Lowering adds:

* Messages. Where consecutive stages sit on different devices, SEND_F on the earlier stage and RECV_F on the
  later one carry activations, SEND_B on the later and RECV_B on the earlier one carry gradients.
* RELEASE and PREPARE. Device memory is allocated and freed on the compute stream only, so an offload is four actions:
  O copies to the host, RELEASE frees the memory after that copy, PREPARE allocates it again, R copies back.
* GATHER (optional): the parameters of a stage are needed from here on, where replicas share them out.
* BROADCAST, ALL_GATHER, REDUCE_INPUT, where a vocabulary layer lies on all devices (`VocabularyPasses`): the last
  stage's activation goes to all of them, then the figures by which their parts make one softmax, then the gradient of
  the activation to the device of the last stage. All devices run these together, each in an action of its own.
* REDUCE (optional): the gradients of a stage are complete and may be summed over replicas. REDUCE_PART sums those that
  are there, so that their memory is free before the others come.

Every action belongs to one stream (`Action.stream`). A stream runs its actions in list order; `Action.waits` alone
order actions of different streams. A host thread issues its list without regard to time: for each action it makes the
stream wait for the events named, runs the action, and records an event if it is in `Program.awaited`. The list alone
determines which memory is in use (see `optpipe.compile.offload`), regardless of durations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from optpipe.kinds import BACKWARDS, RECOMPUTATIONS, ROWS
from optpipe.ops import Op
from optpipe.spread import VocabularyPasses

SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
COLLECTIVES = ("GATHER", "REDUCE_PART", "REDUCE")
"""Actions of the replicas of a stage: all of them run these in the same order."""

EXCHANGES = ("BROADCAST", "ALL_GATHER", "REDUCE_INPUT")
"""Actions of all devices together for a vocabulary layer, in the order of a microbatch. Their `stage` is a device."""

ActionStream = Literal["compute", "offload", "reload", "communication"]

STREAM_OF_ACTION: dict[str, ActionStream] = {
    **{row.name: row.stream for row in ROWS},
    **dict.fromkeys(("RELEASE", "PREPARE", *COLLECTIVES), "compute"),
    **dict.fromkeys((*SENDS, *RECEIVES, *EXCHANGES), "communication"),
}
"""Stream of each kind of action; spread passes, which have names of their own, run on that of compute."""


def stream_of(kind: str) -> ActionStream:
    """Stream of a kind of action, or of a spread pass."""
    return STREAM_OF_ACTION.get(kind, "compute")


class Message(NamedTuple):
    """Message over the boundary between stages `boundary` and `boundary + 1` for one microbatch.

    `direction` is "F" for the activation, "B" for the gradient.
    """

    direction: Literal["F", "B"]
    boundary: int
    microbatch: int


class Action(NamedTuple):
    """One entry of a device's list. Written as ``F0.3``, ``SEND_F0.3->1``, ``RECV_B0.3<-1``, ``O0.3@2``.

    `peer` is the other device of a send or receive. `waits` are actions on other streams of the same device that must
    end before this one starts; each becomes one event. They are minimal: waits implied by another wait or by the order
    of a stream are left out. `slab` is the index in `Program.slabs` of the host buffer of an O. The microbatch of a
    GATHER and a REDUCE is 0, that of a REDUCE_PART is the last one whose weight gradients it sums. `stage` of a spread
    pass and of an exchange (`EXCHANGES`) is the device.
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None
    waits: tuple[Op, ...] = ()
    slab: int | None = None

    @property
    def key(self) -> Op:
        """Kind, stage and microbatch, which identify the action in a program."""
        return Op(self.kind, self.stage, self.microbatch)

    @property
    def stream(self) -> ActionStream:
        """Stream that runs the action. Messages are ordered only within a pair of devices: first in, first out."""
        return stream_of(self.kind)

    @property
    def message(self) -> Message:
        """Message of a send or receive."""
        return message_of(self.key)

    def __str__(self) -> str:
        if self.slab is not None:
            return f"{self.key}@{self.slab}"
        if self.peer is None:
            return str(self.key)
        return f"{self.key}{'->' if self.kind in SENDS else '<-'}{self.peer}"


class Slab(NamedTuple):
    """A pinned host buffer of a device, used by one offloaded activation at a time.

    `size_bytes` is the planned size: the largest offload among its users. `stages` are the stages of its users,
    ascending; if real sizes differ from planned ones, the buffer has to hold the largest real one of these stages.
    """

    size_bytes: int
    stages: tuple[int, ...]


def message_of(key: Op) -> Message:
    """Message that a send or receive carries."""
    after_boundary = key.kind in ("RECV_F", "SEND_B")
    direction: Literal["F", "B"] = "F" if key.kind.endswith("F") else "B"
    return Message(direction, key.stage - 1 if after_boundary else key.stage, key.microbatch)


def matching_send(receive: Op) -> Op:
    """Send of the message that a receive takes."""
    if receive.kind == "RECV_F":
        return Op("SEND_F", receive.stage - 1, receive.microbatch)
    return Op("SEND_B", receive.stage + 1, receive.microbatch)


def matching_receive(send: Op) -> Op:
    """Receive of the message that a send gives."""
    if send.kind == "SEND_F":
        return Op("RECV_F", send.stage + 1, send.microbatch)
    return Op("RECV_B", send.stage - 1, send.microbatch)


@dataclass(frozen=True)
class Program:
    """Actions of every device: `devices[d]` is the list of device d, `placement[s]` the device of stage s.

    `slabs[d]` are the host buffers of device d, allocated once before the first step; empty without offload. `modes`
    names the activation mode of each (stage, microbatch) that is neither kept nor offloaded whole. With `slices` of
    each microbatch, what actions call their microbatch is a unit, ``microbatch * slices + slice``. `blocks[op]`: the
    fused backward that is planned as one block with an F. `vocabulary`: the passes of a vocabulary layer that lies on
    all devices.
    """

    microbatches: int
    placement: tuple[int, ...]
    devices: tuple[tuple[Action, ...], ...]
    slabs: tuple[tuple[Slab, ...], ...] = ()
    modes: Mapping[tuple[int, int], str] = field(default_factory=dict)
    slices: int = 1
    blocks: Mapping[Op, Op] = field(default_factory=dict)
    vocabulary: VocabularyPasses | None = None

    @property
    def units(self) -> int:
        """Number of slices of all microbatches."""
        return self.microbatches * self.slices

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """Offloaded (stage, microbatch) pairs."""
        return frozenset((a.stage, a.microbatch) for a in self.actions() if a.kind == "O")

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) pairs whose activation is made anew, ahead of the backward or inside it."""
        return frozenset((a.stage, a.microbatch) for a in self.actions() if a.kind in RECOMPUTATIONS)

    @cached_property
    def awaited(self) -> frozenset[Op]:
        """Actions that must record an event because another action waits for them."""
        return frozenset(op for action in self.actions() for op in action.waits)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the program: processes compare it before they exchange messages."""
        slices = f"x{self.slices}" if self.slices > 1 else ""
        header = f"optpipe.program/2 {self.microbatches}{slices} {self.placement}"
        header += f" {self.vocabulary.barriers}" if self.vocabulary else ""
        return _sha256("\n".join((header, *self.device_digests)))

    @cached_property
    def device_digests(self) -> tuple[str, ...]:
        """SHA-256 of each device's list and slabs, to name the device on which two programs differ."""
        slabs = self.slabs or ((),) * len(self.devices)

        def line(action: Action) -> str:
            mode = self.modes.get((action.stage, action.microbatch)) if action.kind == "F" else None
            return f"{action}({','.join(map(str, action.waits))})" + (f" {mode!r}" if mode else "")

        return tuple(
            _sha256("\n".join((*map(line, actions), *map(str, device_slabs))))
            for actions, device_slabs in zip(self.devices, slabs, strict=True)
        )

    def actions(self) -> Iterator[Action]:
        """Every action, device by device."""
        for actions in self.devices:
            yield from actions

    def on_devices(self, kind: str) -> bool:
        """True for kinds of action whose `stage` is a device."""
        return kind in EXCHANGES or (self.vocabulary is not None and kind in self.vocabulary[:2])

    def kinds_of(self, stage: int) -> frozenset[str]:
        """Kinds of a stage's actions."""
        return frozenset(a.kind for a in self.actions() if a.stage == stage and not self.on_devices(a.kind))

    @cached_property
    def first_trained(self) -> int:
        """The first stage with a backward; 0 in a program of forwards alone."""
        return min((action.stage for action in self.actions() if action.kind in BACKWARDS), default=0)

    def crosses(self, boundary: int) -> bool:
        """True if stages `boundary` and `boundary + 1` are on different devices."""
        return self.placement[boundary] != self.placement[boundary + 1]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def excerpt(actions: Sequence[Action], index: int, around: int = 3) -> str:
    """Text of the actions around an index, one per line with an arrow at the index, for messages."""
    first = max(0, index - around)
    return "\n".join(
        f"{'->' if k == index else '  '} [{k}] {action}"
        for k, action in enumerate(actions[first : index + around + 1], first)
    )
