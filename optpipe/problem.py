"""The scheduling problem (document `optpipe.problem/1`), and the number types that all documents share.

A problem holds the stages with their costs and memory, their placement on devices, the memory budgets, and the copy
channels to the host. Times are microseconds, memory is bytes; stages, devices and microbatches count from 0.

Validators return the value unchanged, so that 10 stays 10 and 10.0 stays 10.0 on a round trip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeGuard

import numpy as np
from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from optpipe.display import Displayed
from optpipe.document import UNION_TAG, Document, read_document, shown

MAX_TIME_US = 10**12
"""Longest op or transfer: eleven days."""
MAX_BYTES = 2**53 - 1
"""Largest integer that every JSON reader represents exactly."""
MAX_NUMBER = 1e30
"""Far above any sum of times, far below float overflow."""
MAX_COUNT = 10**6
"""Most microbatches, devices or stages."""


def reject(code: str, detail: str) -> PydanticCustomError:
    """Validation error whose `detail` is shown to the user verbatim, after the path of the field."""
    # pydantic expands {} in templates; passing the text as a value keeps its braces intact.
    return PydanticCustomError(f"optpipe.{code}", "{detail}", {"detail": detail})


def _is_real(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Check that float arithmetic can take the value: a finite number, and no integer of 400 digits."""
    return _is_real(value) and abs(value) <= MAX_NUMBER


def _time_us(value: Any) -> int | float:
    if not _is_real(value) or value != value:
        raise reject("not_a_number", f"is {shown(value)} but must be a finite number of microseconds")
    if value < 0:
        raise reject("negative", f"is {shown(value)} but must be at least 0. Maybe a sign slipped in")
    if value > MAX_TIME_US:
        detail = f"is {shown(value)} but at most {MAX_TIME_US} us are allowed. Maybe the unit is nanoseconds"
        raise reject("too_large", detail)
    return value


def _whole(value: Any, low: int, high: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise reject("not_an_integer", f"is {shown(value)} but must be an integer ({what})")
    if not low <= value <= high:
        raise reject("out_of_range", f"is {shown(value)} but must be from {low} to {high} ({what})")
    return value


def _size_bytes(value: Any) -> int:
    return _whole(value, 0, MAX_BYTES, "bytes")


def _positive_count(value: Any) -> int:
    return _whole(value, 1, MAX_COUNT, "a count")


def _index(value: Any) -> int:
    return _whole(value, 0, MAX_COUNT - 1, "counted from 0")


def _any_time_us(value: Any) -> int | float:
    if not _is_number(value):
        raise reject("not_a_number", f"is {shown(value)} but must be a finite number of at most {MAX_NUMBER:g}")
    # NumPy's float64 is a float, but its repr is not a number.
    return float(value) if isinstance(value, float) else value


def _share(value: Any) -> int | float:
    if not _is_number(value) or value > 1:
        raise reject("not_a_share", f"is {shown(value)} but must be a finite number of at most 1")
    return value


def are_indices(values: Iterable[Any]) -> bool:
    """Check a whole column at once: True if `Index` accepts every value."""
    values = list(values)
    return set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < MAX_COUNT))


def are_instants(values: Sequence[Any]) -> bool:
    """Check a whole column at once: True if `Instant` accepts every value; may be False for one at MAX_NUMBER."""
    if not set(map(type, values)) <= {int, float}:
        return False
    try:
        return bool((np.abs(np.asarray(values, np.float64)) < MAX_NUMBER).all())
    except OverflowError:
        return False


def _schema(kind: str, **limits: float) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, **limits})


TimeUs = Annotated[int | float, PlainValidator(_time_us), _schema("number", minimum=0, maximum=MAX_TIME_US)]
Bytes = Annotated[int, PlainValidator(_size_bytes), _schema("integer", minimum=0, maximum=MAX_BYTES)]
Count = Annotated[int, PlainValidator(_positive_count), _schema("integer", minimum=1, maximum=MAX_COUNT)]
Index = Annotated[int, PlainValidator(_index), _schema("integer", minimum=0, maximum=MAX_COUNT - 1)]
Instant = Annotated[int | float, PlainValidator(_any_time_us), _schema("number")]
"""A point in time, or a claimed value or bound in microseconds: any finite number."""
Share = Annotated[int | float, PlainValidator(_share), _schema("number", maximum=1)]
"""A gap or a bubble. A false claim may be negative: `verify` judges it."""


MAX_PROBLEM_BYTES = 16 * 2**20
"""Enough for tens of thousands of stages; a larger file is some other kind of file."""

Objective = Literal["makespan", "device_span"]


class DirectedTransfer(Document):
    """Transfer delays over one stage boundary: `forward` for activations, `backward` for gradients."""

    forward: TimeUs
    backward: TimeUs


_TIME, _DIRECTED, _LIST = (UNION_TAG + name for name in ("time", "directed", "list"))


def _boundary_tag(value: Any) -> str:
    return _DIRECTED if isinstance(value, dict | DirectedTransfer) else _TIME


def _transfer_tag(value: Any) -> str:
    return _LIST if isinstance(value, list | tuple) else _boundary_tag(value)


_Boundary = Annotated[
    Annotated[TimeUs, Tag(_TIME)] | Annotated[DirectedTransfer, Tag(_DIRECTED)], Discriminator(_boundary_tag)
]
_Transfer = Annotated[
    Annotated[TimeUs, Tag(_TIME)]
    | Annotated[DirectedTransfer, Tag(_DIRECTED)]
    | Annotated[list[_Boundary], Tag(_LIST)],
    Discriminator(_transfer_tag),
]


class Device(Document):
    """One accelerator. `memory_bytes` is its budget for activations; None: no limit."""

    memory_bytes: Bytes | None
    name: str = Field(default="", max_length=200)


class Offload(Document):
    """Offloadable part of a stage's activation: `bytes`, and the copy time in each direction."""

    bytes: Bytes
    offload_us: TimeUs
    reload_us: TimeUs


class Workspace(Document):
    """Temporary bytes of each kind of op: taken at its start, freed at its end, on top of what it keeps."""

    F: Bytes = 0
    B: Bytes = 0
    W: Bytes = 0
    BW: Bytes = 0


MAX_MODE_NAME = 100
"""Longest name of an activation mode."""

ModeName = Annotated[str, Field(min_length=1, max_length=MAX_MODE_NAME)]


class ActivationMode(Document):
    """One way to hold a microbatch's activation on a stage, as given; `Stage.choices` has it with its defaults.

    `kept_bytes` stay from F until the recomputation, which takes `recompute_us` and makes the whole activation anew.
    `segment_bytes`: the most beyond `kept_bytes` while a backward recomputes segment by segment; None: it cannot.
    """

    name: ModeName
    kept_bytes: Bytes | None = None
    recompute_us: TimeUs | None = None
    forward_workspace_bytes: Bytes | None = None
    workspace_bytes: Bytes = 0
    segment_bytes: Bytes | None = None
    offload: Offload | None = None


class Mode(NamedTuple):
    """A choice for the activation of one microbatch on one stage, with all defaults filled in.

    Between F and its recomputation or backward it holds `kept_bytes`, of which `offload` may send a part to the host.
    `recomputed_bytes` are made anew in `recompute_us`; both are 0 where nothing is recomputed.
    """

    name: str
    kept_bytes: int
    recomputed_bytes: int
    recompute_us: int | float
    forward_workspace_bytes: int
    workspace_bytes: int
    segment_bytes: int | None
    offload: Offload | None

    @property
    def recomputes(self) -> bool:
        """True if a C, or a backward CB or CBW, has to make the activation anew."""
        return self.recomputed_bytes > 0


KEPT, OFFLOAD = "kept", "offload"
"""Names of the modes that need no entry in `modes`: held until the backward, and `stages[].offload`."""


class Stage(Document):
    """One stage of the model on its device, with the costs of one microbatch.

    F takes `activation_bytes` at its start. The end of B frees `activation_bytes - backward_weight_bytes` (or takes
    memory, if that is negative), the end of W frees the rest. `modes` are other ways to hold the activation than to
    keep it. `split_backward`: False if the backward is always one fused op.
    """

    device: Index
    forward_us: TimeUs
    backward_input_us: TimeUs
    backward_weight_us: TimeUs
    activation_bytes: Bytes
    backward_weight_bytes: Bytes
    workspace_bytes: Workspace = Workspace()
    offload: Offload | None = None
    modes: list[ActivationMode] = []
    split_backward: bool = True

    @model_validator(mode="after")
    def _offload_fits(self) -> Self:
        if self.offload and self.offload.bytes > self.activation_bytes:
            raise reject(
                "offload_too_large",
                f"has offload.bytes {self.offload.bytes} but activation_bytes is {self.activation_bytes}. "
                "Maybe the sizes are per layer in one and per stage in the other",
            )
        return self

    @model_validator(mode="after")
    def _modes_agree(self) -> Self:
        seen = {KEPT, OFFLOAD}
        for n, mode in enumerate(self.modes):
            where = f"has modes[{n}]"
            if mode.name in seen:
                raise reject(
                    "repeated_mode",
                    f"{where}.name {mode.name!r}, which is taken; '{KEPT}' and '{OFFLOAD}' always are. "
                    "Maybe name it after what is recomputed",
                )
            seen.add(mode.name)
            kept = self.activation_bytes if mode.kept_bytes is None else mode.kept_bytes
            if kept > self.activation_bytes:
                raise reject(
                    "mode_too_large",
                    f"{where}.kept_bytes {kept} but activation_bytes is {self.activation_bytes}. "
                    "Maybe the sizes are per layer in one and per stage in the other",
                )
            if kept < self.activation_bytes and mode.recompute_us is None:
                raise reject(
                    "missing_recompute_us",
                    f"{where}.kept_bytes {kept}, less than activation_bytes {self.activation_bytes}, but no "
                    "recompute_us. Maybe the recomputation takes as long as the forward",
                )
            if kept == self.activation_bytes:
                for name in ("recompute_us", "forward_workspace_bytes", "workspace_bytes", "segment_bytes"):
                    if getattr(mode, name):
                        raise reject(
                            "nothing_recomputed",
                            f"{where}.{name} {getattr(mode, name)}, but keeps all {kept} bytes, so that nothing is "
                            "recomputed. Maybe kept_bytes is missing",
                        )
            if mode.offload and mode.offload.bytes > kept:
                raise reject(
                    "offload_too_large",
                    f"{where}.offload.bytes {mode.offload.bytes} but keeps {kept} bytes. "
                    "Maybe the offload is of the whole activation: what is recomputed cannot leave",
                )
        return self

    @cached_property
    def choices(self) -> tuple[Mode, ...]:
        """The modes among which each microbatch may choose: `kept`, then `offload` if given, then those of `modes`."""

        def choice(mode: ActivationMode) -> Mode:
            kept = self.activation_bytes if mode.kept_bytes is None else mode.kept_bytes
            again = self.activation_bytes - kept
            forward = again if mode.forward_workspace_bytes is None else mode.forward_workspace_bytes
            segment = mode.segment_bytes if again else None
            recompute_us = mode.recompute_us or 0
            return Mode(mode.name, kept, again, recompute_us, forward, mode.workspace_bytes, segment, mode.offload)

        offload = [ActivationMode.model_construct(name=OFFLOAD, offload=self.offload)] if self.offload else []
        return tuple(map(choice, [ActivationMode.model_construct(name=KEPT), *offload, *self.modes]))

    @cached_property
    def choice_numbers(self) -> dict[str, int]:
        """Index in `choices` of each mode by name."""
        return {mode.name: n for n, mode in enumerate(self.choices)}

    def duration_us(self, kind: str) -> int | float:
        """Duration of an op of `kind` (F, B, W, BW, O or R) on this stage, of a microbatch kept or offloaded whole."""
        if kind == "BW":
            return self.backward_input_us + self.backward_weight_us
        if kind in "OR":
            assert self.offload is not None, "this stage never offloads"
            return self.offload.offload_us if kind == "O" else self.offload.reload_us
        return {"F": self.forward_us, "B": self.backward_input_us, "W": self.backward_weight_us}[kind]


class CopyChannels(Document):
    """Copy channels between devices and the host.

    `duplex`: one channel per direction; otherwise one channel for both. `shared_by`: groups of devices behind one
    switch, which share its channels.
    """

    duplex: bool = True
    shared_by: list[list[Index]] = []


class Problem(Displayed, Document):
    """A scheduling problem. Frozen; unknown fields are rejected; `to_json` reproduces the input."""

    format: Literal["optpipe.problem/1"]
    name: str = Field(default="", max_length=200)
    microbatches: Count
    objective: Objective = "makespan"
    transfer_us: _Transfer = 0
    devices: Annotated[list[Device], Field(min_length=1)]
    stages: Annotated[list[Stage], Field(min_length=1)]
    source: str = Field(default="", max_length=2000)
    copy_channels: CopyChannels = CopyChannels()
    host_memory_bytes: Bytes | None = None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a problem file. Raises InputError naming the field, the value and the limit."""
        hints = {
            "optpipe.schedule/": "is a schedule but a problem is needed. Maybe use 'optpipe verify' or 'plot'.",
            "optpipe.layers/": "is a layer profile but a problem is needed. Maybe use 'optpipe plan'.",
        }
        return cls.from_data(read_document(path, MAX_PROBLEM_BYTES, hints), str(path))

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        for s, stage in enumerate(self.stages):
            if stage.device >= len(self.devices):
                raise reject(
                    "unknown_device",
                    f"stages[{s}].device is {stage.device} but there are {len(self.devices)} devices, counted from 0. "
                    "Maybe a device is missing from devices",
                )
        boundaries = len(self.stages) - 1
        if isinstance(self.transfer_us, list) and len(self.transfer_us) != boundaries:
            raise reject(
                "wrong_length",
                f"transfer_us has {len(self.transfer_us)} entries but {len(self.stages)} stages have {boundaries} "
                "boundaries. Maybe one entry too many was written for the last stage",
            )
        group_of: dict[int, int] = {}
        for g, group in enumerate(self.copy_channels.shared_by):
            for device in group:
                where = f"copy_channels.shared_by[{g}]"
                if device >= len(self.devices):
                    raise reject(
                        "unknown_device",
                        f"{where} names device {device} of {len(self.devices)}, counted from 0. "
                        "Maybe a device is missing from devices",
                    )
                if device in group_of:
                    raise reject(
                        "repeated_device",
                        f"{where} names device {device}, which shared_by[{group_of[device]}] names already. "
                        "Maybe the groups should be disjoint",
                    )
                group_of[device] = g
        return self

    @property
    def units(self) -> int:
        """Number of parts into which the batch is cut, each with an F and a backward on every stage.

        `Op.microbatch` counts them, and arrays over ops have the shape (stages, units).
        """
        return self.microbatches

    @property
    def forward_delay_us(self) -> Sequence[int | float]:
        """Transfer delay of activations over each boundary s -> s+1; 0 if both stages are on one device."""
        return self._delays["forward"]

    @property
    def backward_delay_us(self) -> Sequence[int | float]:
        """Transfer delay of gradients over each boundary s+1 -> s; 0 if both stages are on one device."""
        return self._delays["backward"]

    @cached_property
    def _delays(self) -> dict[str, list[int | float]]:
        transfer = self.transfer_us
        boundaries = transfer if isinstance(transfer, list) else [transfer] * (len(self.stages) - 1)
        delays: dict[str, list[int | float]] = {"forward": [], "backward": []}
        for s, boundary in enumerate(boundaries):
            crosses = self.stages[s].device != self.stages[s + 1].device
            for direction in ("forward", "backward"):
                delay = getattr(boundary, direction) if isinstance(boundary, DirectedTransfer) else boundary
                delays[direction].append(delay if crosses else 0)
        return delays

    @cached_property
    def stages_of(self) -> Sequence[Sequence[int]]:
        """Stages of each device, ascending."""
        placed: list[list[int]] = [[] for _ in self.devices]
        for s, stage in enumerate(self.stages):
            placed[stage.device].append(s)
        return placed

    @cached_property
    def work_us(self) -> Sequence[int | float]:
        """Total time of all compute ops of each device, without recomputation."""
        return [
            self.units * sum(self.stages[s].duration_us("F") + self.stages[s].duration_us("BW") for s in stages)
            for stages in self.stages_of
        ]

    @cached_property
    def has_modes(self) -> bool:
        """True if some stage has activation modes besides `kept` and `offload`."""
        return any(stage.modes for stage in self.stages)

    def without_modes(self) -> Self:
        """The problem in which every activation is kept, or offloaded whole."""
        data = self.to_data()
        for stage in data["stages"]:
            stage.pop("modes", None)
        return self.from_data(data)

    @cached_property
    def channel_groups(self) -> Sequence[Sequence[int]]:
        """Groups of devices behind one switch; every device is in exactly one group."""
        shared = [list(group) for group in self.copy_channels.shared_by if group]
        named = {device for group in shared for device in group}
        return shared + [[d] for d in range(len(self.devices)) if d not in named]
