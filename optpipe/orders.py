"""Ops and the orders in which devices run them: what every solver answers with.

Orders and waits are what an executor obeys. Times and memory follow from them (`optpipe.simulate`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

KINDS = ("F", "B", "W", "BW", "O", "R")
"""forward, backward input, backward weight, both backwards fused, offload, reload"""

StreamName = Literal["compute", "offload", "reload"]
STREAMS: tuple[StreamName, ...] = ("compute", "offload", "reload")

_NAME = re.compile(r"(F|BW|B|W|O|R)(0|[1-9]\d{0,6})\.(0|[1-9]\d{0,6})", re.ASCII)


class Op(NamedTuple):
    """One op: its kind (one of KINDS), stage and microbatch. Written as ``B2.7``."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a name such as ``B2.7``. Raises ValueError."""
        match = _NAME.fullmatch(name)
        if not match:
            raise ValueError(f"{name!r} is not the name of an op. Maybe write it as kind, stage, microbatch: B2.7")
        return cls(match[1], int(match[2]), int(match[3]))

    @property
    def stream(self) -> StreamName:
        """The stream of its device that runs this op."""
        return "offload" if self.kind == "O" else "reload" if self.kind == "R" else "compute"


@dataclass(frozen=True)
class DeviceOrders:
    """The ops of one device, a list for each stream, in execution order."""

    compute: Sequence[Op] = ()
    offload: Sequence[Op] = ()
    reload: Sequence[Op] = ()

    def streams(self) -> Iterator[Sequence[Op]]:
        """The three lists, in the order of STREAMS."""
        yield from (self.compute, self.offload, self.reload)


@dataclass(frozen=True)
class Orders:
    """Per-device orders, waits, and the order on channels that serve several streams.

    `waits`: ops of other streams of the same device whose end an op waits for, beyond the rules of the model.
    `channels`: for each channel that serves more than one stream (half duplex, or devices behind one switch), its
    transfers in order. A channel that is not listed is left to the order of its only stream.
    """

    devices: Sequence[DeviceOrders]
    waits: Mapping[Op, Sequence[Op]] = field(default_factory=dict)
    channels: Sequence[Sequence[Op]] = ()

    @classmethod
    def of_compute(cls, compute: Iterable[Sequence[Op]]) -> Self:
        """Orders without offload: one list of compute ops a device."""
        return cls(devices=[DeviceOrders(compute=list(ops)) for ops in compute])

    def ops(self) -> Iterator[Op]:
        """Every op, device by device, stream by stream."""
        for device in self.devices:
            for stream in device.streams():
                yield from stream
