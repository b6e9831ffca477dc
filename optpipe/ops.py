"""Ops, the orders in which devices run them (the output of every solver), and their compact text.

An executor obeys orders and waits; times and memory follow from them (`optpipe.simulate`). A large pipeline has
hundreds of thousands of ops, so a list of ops may be held as columns (`OpArray`), which reads like any other list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optpipe.kinds import CODE, KIND, KINDS, STREAM_OF_KIND, StreamName

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_PASS_NAME = 8
"""Most letters of the name of a spread pass: capital letters, and no kind of op."""

PASS_NAME = f"^[A-Z]{{1,{MAX_PASS_NAME}}}$"
"""Pattern of the name of a spread pass."""

_OP = rf"([A-Z]{{1,{MAX_PASS_NAME}}})(0|[1-9]\d{{0,6}})\.(0|[1-9]\d{{0,6}})"
_NAME = re.compile(_OP, re.ASCII)
_NAMES = re.compile(f"(?:{_OP}(?: {_OP})*+)?", re.ASCII)
_PASS = re.compile(PASS_NAME, re.ASCII)
_DOTS_AS_SPACES = bytes.maketrans(b".", b" ")
_LETTERS = bytes(range(ord("A"), ord("Z") + 1))


class Op(NamedTuple):
    """One op: its kind (one of KINDS), stage and microbatch. Written as ``B2.7``.

    The kind of a spread pass is its name, and its stage the number of the device.
    """

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
            raise _no_name(name)
        return cls(match[1], int(match[2]), int(match[3]))

    @property
    def stream(self) -> StreamName:
        """Stream of the device that runs this op."""
        return KIND[self.kind].stream if self.kind in KIND else "compute"


def is_op_name(text: str) -> bool:
    """True if `Op.parse` accepts the text."""
    return _NAME.fullmatch(text) is not None


def _no_name(text: str) -> ValueError:
    return ValueError(f"{text!r} is not the name of an op. Maybe write it as kind, stage, microbatch: B2.7")


class OpArray(Sequence[Op]):
    """Ops as three columns of equal length: `kind` (index into KINDS), `stage` and `microbatch`.

    Behind the kinds come `passes`, the names of spread passes, whose `stage` is a device. Reads like a list of Op. The
    columns must not be modified.
    """

    def __init__(self, kind: ArrayLike, stage: ArrayLike, microbatch: ArrayLike, passes: Sequence[str] = ()) -> None:
        self.kind: Ints = np.asarray(kind, np.int64)
        self.stage: Ints = np.asarray(stage, np.int64)
        self.microbatch: Ints = np.asarray(microbatch, np.int64)
        self.passes = tuple(passes)

    @classmethod
    def of(cls, ops: Sequence[Op]) -> OpArray:
        """Convert a list of ops to columns. Raises KeyError for a kind that is none, and no name of a pass."""
        if isinstance(ops, OpArray):
            return ops
        kind, stage, microbatch = zip(*ops, strict=True) if ops else ((), (), ())
        return cls.of_columns(kind, stage, microbatch)

    @classmethod
    def of_columns(cls, kind: Sequence[str], stage: ArrayLike, microbatch: ArrayLike) -> OpArray:
        """Build from columns, with kinds by name. Raises KeyError for a kind that is none, and no name of a pass."""
        try:
            return cls([CODE[name] for name in kind], stage, microbatch)
        except KeyError:
            names = dict.fromkeys(name for name in kind if name not in CODE)
            wrong = next((name for name in names if not (isinstance(name, str) and _PASS.fullmatch(name))), None)
            if wrong is not None or None in names:
                raise
        code = CODE | {name: len(KINDS) + n for n, name in enumerate(names)}
        return cls([code[name] for name in kind], stage, microbatch, [*names])

    @classmethod
    def parse(cls, names: str) -> OpArray:
        """Read space-separated names, as `names` writes them. Raises ValueError or TypeError."""
        if not _NAMES.fullmatch(names):
            raise _no_name(next(name for name in names.split(" ") if not is_op_name(name)))
        text = names.encode()
        kinds = text.translate(None, b"0123456789.").decode().split()
        numbers = np.fromstring(text.translate(_DOTS_AS_SPACES, _LETTERS), np.int64, sep=" ")
        return cls.of_columns(kinds, *numbers.reshape(-1, 2).T)

    def numbered(self, passes: Sequence[str]) -> OpArray:
        """The same ops with the passes of a problem behind the kinds. Raises KeyError for one that it does not have."""
        if self.passes == tuple(passes):
            return self
        code = [
            *range(len(KINDS)),
            *(len(KINDS) + {name: n for n, name in enumerate(passes)}[own] for own in self.passes),
        ]
        return OpArray(np.array(code, np.int64)[self.kind], self.stage, self.microbatch, passes)

    @property
    def kinds(self) -> list[str]:
        """Kind of each op by name."""
        names = (*KINDS, *self.passes)
        return [names[code] for code in self.kind.tolist()]

    @property
    def spread(self) -> Bools:
        """True for each op of a spread pass."""
        return np.asarray(self.kind >= len(KINDS))

    @property
    def stream(self) -> Ints:
        """Index into STREAMS of the stream of each op; passes run on that of compute."""
        streams = np.append(STREAM_OF_KIND, np.zeros(len(self.passes), np.int64))
        return np.asarray(streams[self.kind])

    @property
    def names(self) -> str:
        """Space-separated names of the ops."""
        rows = zip(self.kinds, self.stage.tolist(), self.microbatch.tolist(), strict=True)
        return " ".join([f"{kind}{stage}.{microbatch}" for kind, stage, microbatch in rows])

    @classmethod
    def joined(cls, parts: Sequence[OpArray]) -> OpArray:
        """Concatenate the ops of all parts (at least one)."""
        passes = [*dict.fromkeys(name for part in parts for name in part.passes)]
        parts = [part.numbered(passes) for part in parts] if passes else parts
        columns = ([part.kind for part in parts], [part.stage for part in parts], [part.microbatch for part in parts])
        kind, stage, microbatch = map(np.concatenate, columns)
        return cls(kind, stage, microbatch, passes)

    @cached_property
    def _ops(self) -> list[Op]:
        return list(map(Op._make, zip(self.kinds, self.stage.tolist(), self.microbatch.tolist(), strict=True)))

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice | Ints) -> OpArray: ...
    def __getitem__(self, index: int | slice | Ints) -> Op | OpArray:
        """One op, or the ops of a slice or of an array of indices."""
        if isinstance(index, slice | np.ndarray):
            return OpArray(self.kind[index], self.stage[index], self.microbatch[index], self.passes)
        return self._ops[index]

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OpArray) and self.passes == other.passes:
            columns = ((self.kind, other.kind), (self.stage, other.stage), (self.microbatch, other.microbatch))
            return all(np.array_equal(*pair) for pair in columns)
        return isinstance(other, list | tuple | OpArray) and self._ops == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"OpArray({' '.join(map(str, self))})"


class WaitArray(Mapping[Op, Sequence[Op]]):
    """Waits as two columns of equal length: op `op[k]` waits for the end of `before[k]`. Reads like a dict of lists."""

    def __init__(self, op: OpArray, before: OpArray) -> None:
        self.op = op
        self.before = before

    @classmethod
    def of(cls, waits: Mapping[Op, Sequence[Op]]) -> WaitArray:
        """Convert a dict of lists to columns. Raises KeyError for a kind that is not in KINDS."""
        if isinstance(waits, WaitArray):
            return waits
        pairs = [(op, before) for op, others in waits.items() for before in others]
        return cls(OpArray.of([op for op, _ in pairs]), OpArray.of([before for _, before in pairs]))

    @classmethod
    def joined(cls, parts: Sequence[WaitArray]) -> WaitArray:
        """Concatenate the waits of all parts (at least one)."""
        return cls(OpArray.joined([part.op for part in parts]), OpArray.joined([part.before for part in parts]))

    @cached_property
    def _lists(self) -> dict[Op, list[Op]]:
        lists: dict[Op, list[Op]] = {}
        for op, before in zip(self.op, self.before, strict=True):
            lists.setdefault(op, []).append(before)
        return lists

    def __getitem__(self, op: Op) -> Sequence[Op]:
        return self._lists[op]

    def __iter__(self) -> Iterator[Op]:
        return iter(self._lists)

    def __len__(self) -> int:
        return len(self._lists)

    def __bool__(self) -> bool:
        return len(self.op) > 0

    def __repr__(self) -> str:
        return f"WaitArray({self._lists})"


@dataclass(frozen=True)
class DeviceOrders:
    """Ops of one device in execution order, a list for each stream."""

    compute: Sequence[Op] = ()
    offload: Sequence[Op] = ()
    reload: Sequence[Op] = ()

    def streams(self) -> Iterator[Sequence[Op]]:
        """The three lists, in the order of STREAMS."""
        yield from (self.compute, self.offload, self.reload)


@dataclass(frozen=True)
class Orders:
    """Order of each stream of each device, waits, and the order on shared channels.

    `waits[op]`: ops of other streams of the same device that must end before `op` starts, beyond the rules of the
    model. `channels`: for each channel that serves more than one stream (half duplex, or devices behind one switch),
    its transfers in order. Other channels follow the order of their only stream. `modes`: the activation mode of each
    unit on each stage, as an index into the stage's `choices`, of shape (stages, units); None where each is offloaded
    whole or kept, as it has an O or not. `microbatch_order`: the microbatches in the order in which they run, where a
    problem leaves it free; None: ascending. `blocks[op]`: the fused backward that runs as one block with an F, right
    behind which it stands (`Problem.overlaps`).
    """

    devices: Sequence[DeviceOrders]
    waits: Mapping[Op, Sequence[Op]] = field(default_factory=dict)
    channels: Sequence[Sequence[Op]] = ()
    modes: Ints | None = None
    microbatch_order: Sequence[int] | None = None
    blocks: Mapping[Op, Op] = field(default_factory=dict)

    @classmethod
    def of_compute(cls, compute: Iterable[Sequence[Op]]) -> Self:
        """Orders without offload: one list of compute ops per device."""
        return cls(devices=[DeviceOrders(compute=ops) for ops in compute])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Orders):
            return NotImplemented
        pairs = ((self.devices, other.devices), (self.waits, other.waits), (self.channels, other.channels))
        if (self.modes is None) != (other.modes is None) or not all(own == others for own, others in pairs):
            return False
        if self.microbatch_order != other.microbatch_order or self.blocks != other.blocks:
            return False
        return self.modes is None or other.modes is None or np.array_equal(self.modes, other.modes)

    def ops(self) -> Iterator[Op]:
        """Every op, device by device, stream by stream."""
        for device in self.devices:
            for stream in device.streams():
                yield from stream


def orders_to_data(orders: Orders) -> dict[str, Any]:
    """Orders as JSON values, such as ``{"devices": [["F0.0 B0.0 W0.0", "", ""]], "waits": {}, "channels": []}``.

    With modes there is also ``"modes"``, a list of indices for each stage; ``"microbatch_order"`` if there is one; with
    blocks ``"blocks"``, the two ops of each one after the other.
    """
    columns = WaitArray.of(orders.waits)
    waits: dict[str, str] = {}
    for op, before in zip(columns.op.names.split(), columns.before.names.split(), strict=True):
        waits[op] = f"{waits[op]} {before}" if op in waits else before
    data: dict[str, Any] = {
        "devices": [[OpArray.of(stream).names for stream in device.streams()] for device in orders.devices],
        "waits": waits,
        "channels": [OpArray.of(channel).names for channel in orders.channels],
    }
    if orders.modes is not None:
        data["modes"] = orders.modes.tolist()
    if orders.microbatch_order is not None:
        data["microbatch_order"] = list(orders.microbatch_order)
    if orders.blocks:
        data["blocks"] = " ".join(f"{forward} {backward}" for forward, backward in orders.blocks.items())
    return data


def orders_from_data(data: dict[str, Any]) -> Orders:
    """Orders from their JSON values. Raises ValueError, TypeError or KeyError if the values have another form.

    `simulate` checks that they fit a problem.
    """
    waits = {name: others for name, others in data["waits"].items() if others}
    counts = [others.count(" ") + 1 for others in waits.values()]
    modes = np.array(data["modes"]) if "modes" in data else None
    if modes is not None and (modes.ndim != 2 or modes.dtype != np.int64):
        raise ValueError("modes must be a list of integers for each stage")
    microbatch_order = data.get("microbatch_order")
    if microbatch_order is not None and not all(type(i) is int for i in microbatch_order):
        raise ValueError("microbatch_order must be a list of integers")
    waiting, joined = OpArray.parse(" ".join(waits)), [*OpArray.parse(data.get("blocks", ""))]
    return Orders(
        [DeviceOrders(*map(OpArray.parse, streams)) for streams in data["devices"]],
        WaitArray(waiting[np.repeat(np.arange(len(counts)), counts)], OpArray.parse(" ".join(waits.values()))),
        [OpArray.parse(channel) for channel in data["channels"]],
        modes,
        microbatch_order,
        dict(zip(joined[::2], joined[1::2], strict=True)),
    )
