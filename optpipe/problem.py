"""The scheduling problem (document `optpipe.problem/1`).

A problem holds the stages with their costs and memory, their placement on devices, the memory budgets, and the copy
channels to the host. Times are microseconds, memory is bytes; stages, devices and microbatches count from 0.

Where microbatches are cut into slices, or have costs of their own, every unit (a microbatch, or a slice of one) has its
own costs on each stage: those of the stage times factors. `Problem.stage_of` gives them as a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag, model_validator

from optpipe.display import Displayed
from optpipe.document import UNION_TAG, Document, read_document
from optpipe.fields import (
    MAX_BYTES,
    MAX_COUNT,
    MAX_DEVICES,
    MAX_NAME,
    MAX_TIME_US,
    Bytes,
    Count,
    Factor,
    Index,
    TimeUs,
    at_most,
    reject,
)
from optpipe.kinds import KIND
from optpipe.ops import Op
from optpipe.spread import MAX_PASSES, MAX_WAITS, Gate, SpreadPass, check_spread
from optpipe.stage import SliceFactors, Stage, UnitFactors, UnitStage, exact, scaled_bytes, scaled_us

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")

MAX_PROBLEM_BYTES = 16 * 2**20
"""Enough for tens of thousands of stages; a larger file is some other kind of file."""

MAX_OVERLAPS = 100_000
"""Most pairs of stages that may run as one block."""

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
    name: str = Field(default="", max_length=MAX_NAME)


class MicrobatchFactors(Document):
    """Costs of one microbatch as multiples of its stages': of times, of bytes and copies, and of transfers.

    `forward`, `backward_input`, `backward_weight` and `recompute` are of times of one kind; None: as `time`.
    """

    time: Factor = 1
    bytes: Factor = 1
    transfer: Factor = 1
    forward: Factor | None = None
    backward_input: Factor | None = None
    backward_weight: Factor | None = None
    recompute: Factor | None = None

    @property
    def by_name(self) -> UnitFactors:
        """The factor of each kind of time, of spread passes, of bytes and of transfers."""
        given = (getattr(self, name) for name in UnitFactors._fields)
        return UnitFactors._make(exact(self.time if factor is None else factor) for factor in given)


class Slices(Document):
    """A cut of each microbatch's sequences into `count` slices, with their factors on every stage."""

    count: Count
    factors: SliceFactors = SliceFactors()


class Overlap(Document):
    """A block of a forward and the fused backward of another microbatch on one device, which takes `us` in one.

    The communication of each hides behind the other's computation (DualPipe, arXiv 2412.19437).
    """

    forward_stage: Index
    backward_stage: Index
    us: TimeUs


class CopyChannels(Document):
    """Copy channels between devices and the host.

    `duplex`: one channel per direction; otherwise one channel for both. `shared_by`: groups of devices behind one
    switch, which share its channels.
    """

    duplex: bool = True
    shared_by: Annotated[list[list[Index]], at_most(MAX_DEVICES)] = []


class Problem(Displayed, Document):
    """A scheduling problem. Frozen; unknown fields are rejected; `to_json` reproduces the input."""

    format: Literal["optpipe.problem/1"]
    name: str = Field(default="", max_length=MAX_NAME)
    microbatches: Count
    objective: Objective = "makespan"
    transfer_us: _Transfer = 0
    devices: Annotated[list[Device], Field(min_length=1), at_most(MAX_DEVICES)]
    stages: Annotated[list[Stage], Field(min_length=1)]
    source: str = Field(default="", max_length=2000)
    copy_channels: CopyChannels = CopyChannels()
    host_memory_bytes: Bytes | None = None
    microbatch_factors: list[MicrobatchFactors] | None = None
    microbatch_order: Literal["given", "free"] = "given"
    slices: Slices | None = None
    overlaps: Annotated[list[Overlap], at_most(MAX_OVERLAPS)] | None = None
    spread: Annotated[list[SpreadPass], at_most(MAX_PASSES)] | None = None
    gates: Annotated[list[Gate], at_most(MAX_WAITS)] | None = None

    def __eq__(self, other: object) -> bool:
        """True if all fields are equal. What was derived from them meanwhile, arrays included, says nothing more."""
        if not isinstance(other, Problem):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a problem file. Raises InputError naming the field, the value and the limit."""
        return cls.from_data(read_document(path, MAX_PROBLEM_BYTES, "problem"), str(path))

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        for s, stage in enumerate(self.stages):
            if stage.device >= len(self.devices):
                raise reject(
                    "unknown_device",
                    f"stages[{s}].device is {stage.device} but there are {len(self.devices)} devices, counted from 0. "
                    "Maybe a device is missing from devices",
                )
        for s, stage in enumerate(self.stages[1:], 1):
            if stage.backward == "none" and self.stages[s - 1].backward == "full":
                raise reject(
                    "trained_before",
                    f"stages[{s}].backward is 'none' but stages[{s - 1}].backward is 'full': gradients reach a stage "
                    "through all those behind it. Maybe only first stages are frozen",
                )
        boundaries = len(self.stages) - 1
        if isinstance(self.transfer_us, list) and (entries := len(self.transfer_us)) != boundaries:
            likely = (
                "one entry too many was written for the last stage"
                if entries > boundaries
                else "one was left out: a boundary within a device has its entry, 0, too"
            )
            raise reject(
                "wrong_length",
                f"transfer_us has {entries} entries but {len(self.stages)} stages have {boundaries} boundaries. "
                f"Maybe {likely}",
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

    @model_validator(mode="after")
    def _overlaps_agree(self) -> Self:
        seen: dict[tuple[int, int], int] = {}
        for n, overlap in enumerate(self.overlaps or ()):
            where, pair = f"overlaps[{n}]", (overlap.forward_stage, overlap.backward_stage)
            for name, s in zip(("forward_stage", "backward_stage"), pair, strict=True):
                if s >= len(self.stages):
                    raise reject("unknown_stage", f"{where}.{name} is {s} of {len(self.stages)} stages, from 0")
            if pair in seen:
                raise reject("repeated_pair", f"{where} names the stages {pair}, which overlaps[{seen[pair]}] names")
            seen[pair] = n
            forward, backward = (self.stages[s] for s in pair)
            if forward.device != backward.device:
                devices = f"stages {pair[0]} and {pair[1]} on devices {forward.device} and {backward.device}"
                raise reject("two_devices", f"{where} has {devices}, but a block runs on one device")
            if backward.backward == "none":
                raise reject("no_backward", f"{where}.backward_stage is {pair[1]}, whose backward is 'none'")
            least_us = max(forward.duration_us("F"), backward.duration_us("BW"))
            if overlap.us < least_us:
                detail = f"{where}.us is {overlap.us} but the longer of the two takes {least_us}"
                raise reject("too_short", f"{detail}. Maybe it is the time that the block saves")
        return self

    @model_validator(mode="after")
    def _spread_agrees(self) -> Self:
        if not self.spread and not self.gates:
            return self
        if self.slices is not None:
            raise reject("with_slices", "spread and gates are for whole microbatches, but slices is given")
        check_spread(self.spread or (), self.gates or (), self.stages, len(self.devices))
        gated = {gate.stage for gate in self.gates or ()}
        for n, one in enumerate(self.overlaps or ()):
            for s in {one.forward_stage, one.backward_stage} & gated:
                raise reject("gated_block", f"overlaps[{n}] names stage {s}, an op of which gates delay")
        return self

    @cached_property
    def pass_names(self) -> tuple[str, ...]:
        """Names of the spread passes: the kinds of their ops, behind KINDS."""
        return tuple(one.name for one in self.spread or ())

    @cached_property
    def block_us(self) -> dict[tuple[int, int], int | float]:
        """Time of a block by the stages of its forward and its backward, for units with factor 1."""
        return {(one.forward_stage, one.backward_stage): one.us for one in self.overlaps or ()}

    def block_of_units_us(self, forward: Op, backward: Op) -> int | float | None:
        """Time of two ops as one block: that of their stages times the larger factor; None if they may not be one."""
        time_us = self.block_us.get((forward.stage, backward.stage))
        apart = (forward.kind, backward.kind) != ("F", "BW") or forward.microbatch == backward.microbatch
        if time_us is None or apart:
            return None
        first, last = (self.unit_factors(op.stage, op.microbatch) for op in (forward, backward))
        return scaled_us(time_us, max(first.forward, last.backward_input, last.backward_weight))

    def hidden_us(self, blocks: Mapping[Op, Op]) -> list[float]:
        """Time that blocks, from forwards to backwards, spare each device."""
        hidden = [0.0] * len(self.devices)
        for forward, backward in blocks.items():
            first, last = (self.unit_factors(op.stage, op.microbatch) for op in (forward, backward))
            before, behind = self.stages[forward.stage], self.stages[backward.stage]
            apart_us = scaled_us(before.forward_us, first.forward)
            apart_us += scaled_us(behind.backward_input_us, last.backward_input)
            apart_us += scaled_us(behind.backward_weight_us, last.backward_weight)
            together_us = self.block_of_units_us(forward, backward)
            assert together_us is not None, "blocks are of pairs that may be one"
            hidden[before.device] += apart_us - together_us
        return hidden

    @model_validator(mode="after")
    def _factors_agree(self) -> Self:
        own = self.microbatch_factors
        if own is not None and len(own) != self.microbatches:
            raise reject(
                "wrong_length",
                f"microbatch_factors has {len(own)} entries but microbatches is {self.microbatches}. "
                "Maybe the last microbatches are missing",
            )
        count = self.slices.count if self.slices else 1
        if self.microbatches * count > MAX_COUNT:
            raise reject(
                "too_large", f"has {self.microbatches} microbatches of {count} slices but at most {MAX_COUNT} slices"
            )
        named = [("slices.factors", self.slices.factors)] if self.slices else []
        for s, stage in enumerate(self.stages):
            for name in ("slice_factors", "slice_gradient_bytes"):
                if getattr(stage, name) not in (None, 0) and self.slices is None:
                    detail = f"stages[{s}].{name} is given but slices is not. Maybe slices.count is missing"
                    raise reject("missing_slices", detail)
            if stage.slice_factors is not None:
                named.append((f"stages[{s}].slice_factors", stage.slice_factors))
        for where, factors in named:
            for name in SliceFactors.model_fields:
                entries = getattr(factors, name)
                if entries is not None and len(entries) != count:
                    detail = f"{where}.{name} has {len(entries)} entries but slices.count is {count}"
                    raise reject("wrong_length", f"{detail}. Maybe it is of another number of slices")
        if self.has_factors:
            self._check_scaled()
        return self

    def _check_scaled(self) -> None:
        """Reject costs that are within their limits, but not for the largest unit."""
        own = self.microbatch_factors or [MicrobatchFactors()]
        largest = UnitFactors._make(max(column) for column in zip(*(one.by_name for one in own), strict=True))
        sends = [*map(max, zip([*self.forward_delay_us, 0], [0, *self.backward_delay_us], strict=True))]
        common = self.slices.factors if self.slices else SliceFactors()
        for s, stage in enumerate(self.stages):
            slices = common if stage.slice_factors is None else stage.slice_factors
            forward, backward, weight, again, _, large, transfer = map(mul, slices.largest, largest)
            copies = [copy for copy in (stage.offload, *(mode.offload for mode in stage.modes)) if copy]
            work = stage.workspace_bytes
            sizes = [stage.activation_bytes, stage.backward_weight_bytes, work.F, work.B, work.W, work.BW]
            for mode in stage.modes:
                sizes += [mode.forward_workspace_bytes or 0, mode.workspace_bytes, mode.segment_bytes or 0]
            most_us = max(
                stage.forward_us * forward,
                stage.backward_input_us * backward,
                stage.backward_weight_us * weight,
                max((mode.recompute_us or 0 for mode in stage.modes), default=0) * again,
                max((max(copy.offload_us, copy.reload_us) for copy in copies), default=0) * large,
                sends[s] * transfer,
            )
            if most_us > MAX_TIME_US:
                detail = f"stages[{s}] has a time of {float(most_us):g} us with its largest factor"
                raise reject(
                    "too_large", f"{detail} but at most {MAX_TIME_US} us are allowed. Maybe a factor is a time"
                )
            earlier = self.slice_count - 1 if slices.bytes is None else slices.earlier_bytes
            gradients = stage.slice_gradient_bytes * earlier
            most_bytes = max(max(sizes) * large, gradients * largest.bytes)
            if most_bytes > MAX_BYTES:
                detail = f"stages[{s}] has {float(most_bytes):g} bytes with its largest factor"
                raise reject("too_large", f"{detail} but at most {MAX_BYTES} are allowed. Maybe a factor is a size")
        for n, one in enumerate(self.spread or ()):
            if max(one.us) * largest.time > MAX_TIME_US:
                detail = f"spread[{n}] has a time of {float(max(one.us) * largest.time):g} us with its largest factor"
                raise reject(
                    "too_large", f"{detail} but at most {MAX_TIME_US} us are allowed. Maybe a factor is a time"
                )
            most_bytes = max([0, *(one.kept_bytes or ()), *(one.workspace_bytes or ())]) * largest.bytes
            if most_bytes > MAX_BYTES:
                detail = f"spread[{n}] has {float(most_bytes):g} bytes with its largest factor"
                raise reject("too_large", f"{detail} but at most {MAX_BYTES} are allowed. Maybe a factor is a size")

    @property
    def units(self) -> int:
        """Number of parts into which the batch is cut, each with an F and a backward on every stage.

        Slice q of microbatch i is unit ``i * slices.count + q``. `Op.microbatch` counts units, and arrays over ops have
        the shape (stages, units).
        """
        return self.microbatches * self.slice_count

    @property
    def slice_count(self) -> int:
        """Number of slices of a microbatch; 1 where sequences are whole."""
        return self.slices.count if self.slices else 1

    @cached_property
    def has_factors(self) -> bool:
        """True if some unit has other costs than those that its stages state."""
        listed = self.microbatch_factors or ()
        if any(factor != 1 for entry in listed for factor in entry.by_name):
            return True
        if self.slices is None:
            return False
        if self.slice_count > 1 and any(stage.slice_gradient_bytes for stage in self.stages):
            return True
        # The lists as they stand: a count of a million slices without lists builds nothing.
        own = (stage.slice_factors for stage in self.stages)
        used = {id(factors): factors for factors in (self.slices.factors if one is None else one for one in own)}
        lists = [getattr(factors, name) or () for factors in used.values() for name in SliceFactors.model_fields]
        return any(factor != 1 for entries in lists for factor in entries)

    @cached_property
    def has_free_order(self) -> bool:
        """True if microbatches that differ may run in any order, the same on all stages."""
        return self.microbatch_order == "free" and len({entry.by_name for entry in self.microbatch_factors or ()}) > 1

    @property
    def has_equal_microbatches(self) -> bool:
        """True if microbatches are whole, and all have the costs that the stages state."""
        return not self.has_factors and self.slice_count == 1

    def units_in_order(self, kind: str, microbatch_order: Sequence[int] | None = None) -> Ints:
        """Units in the order in which a stage runs its ops of `kind`, for an order of microbatches (None: as given).

        F and O run slice after slice; backwards, R and C begin with a microbatch's last slice.
        """
        microbatches = np.arange(self.microbatches) if microbatch_order is None else np.asarray(microbatch_order)
        slices = np.arange(self.slice_count)
        slices = slices if KIND[kind].ascends else slices[::-1]
        units: Ints = (microbatches[:, None] * self.slice_count + slices).ravel()
        return units

    def stage_of(self, stage: int, unit: int) -> Stage:
        """A stage with the costs of one unit."""
        of_classes: Sequence[Stage] = self.unit_stages[stage]
        return of_classes[int(self.unit_class[unit])]

    @property
    def unit_class(self) -> Ints:
        """Class of each unit, as an index into each entry of `unit_stages`; units of one class have equal costs."""
        return self._classes[0]

    def unit_name(self, unit: int) -> str:
        """The number of a unit's microbatch, with that of its slice where there are slices: ``2/0``."""
        return str(unit) if self.slice_count == 1 else "/".join(map(str, divmod(unit, self.slice_count)))

    @property
    def class_units(self) -> Sequence[int]:
        """The first unit of each class."""
        return self._classes[1]

    @cached_property
    def unit_stages(self) -> Sequence[Sequence[Stage]]:
        """Each stage with the costs of each class of units; the stage alone where no unit has costs of its own."""
        if not self.has_factors:
            return [[stage] for stage in self.stages]
        return [
            [
                UnitStage.of(stage, self.unit_factors(s, unit), *self._gradients_bytes(s, unit))
                for unit in self.class_units
            ]
            for s, stage in enumerate(self.stages)
        ]

    @cached_property
    def _classes(self) -> tuple[Ints, Sequence[int]]:
        """Class of each unit, and the first unit of each class."""
        if not self.has_factors:
            return np.zeros(self.units, np.int64), [0]
        n = self.slice_count
        gradients = any(stage.slice_gradient_bytes for stage in self.stages)
        slices = _numbered(
            (*(self._slice_factors[s][q] for s in range(len(self.stages))), gradients and q == n - 1) for q in range(n)
        )
        factors = self.microbatch_factors or [MicrobatchFactors()] * self.microbatches
        entries = _numbered(entry.by_name for entry in factors)
        classes = np.array(_numbered(product(entries, slices)), np.int64)
        return classes, np.unique(classes, return_index=True)[1].tolist()

    def pass_factors(self, unit: int) -> UnitFactors:
        """Factors of spread passes, which are those of a unit's whole microbatch."""
        own = self.microbatch_factors
        return (own[unit // self.slice_count] if own else MicrobatchFactors()).by_name

    def unit_factors(self, stage: int, unit: int) -> UnitFactors:
        """The factors of a unit on a stage: those of its microbatch times those of its slice."""
        i, q = divmod(unit, self.slice_count)
        own = self.microbatch_factors[i] if self.microbatch_factors else MicrobatchFactors()
        return UnitFactors._make(map(mul, self._slice_factors[stage][q], own.by_name))

    @cached_property
    def _slice_factors(self) -> Sequence[Sequence[UnitFactors]]:
        """Factors of each slice on each stage."""

        def of_slices(factors: SliceFactors) -> Sequence[UnitFactors]:
            lists = [getattr(factors, name, None) or [1] * self.slice_count for name in UnitFactors._fields]
            return [UnitFactors(*map(exact, column)) for column in zip(*lists, strict=True)]

        common = of_slices(self.slices.factors if self.slices else SliceFactors())
        own = [stage.slice_factors for stage in self.stages]  # which replace all lists of the problem
        return [common if factors is None else of_slices(factors) for factors in own]

    def _gradients_bytes(self, stage: int, unit: int) -> tuple[int, int]:
        """Gradients of keys and values that the backward of a unit takes at its start, and that it frees at its end."""
        size, last = self.stages[stage].slice_gradient_bytes, self.slice_count - 1
        if unit % self.slice_count < last:
            return 0, scaled_bytes(size, self.unit_factors(stage, unit).bytes)
        return sum(scaled_bytes(size, self.unit_factors(stage, unit - k).bytes) for k in range(1, last + 1)), 0

    @cached_property
    def unit_delays_us(self) -> dict[str, Floats]:
        """Transfer delays of every unit, ``forward`` and ``backward``: arrays (boundaries, units).

        Factors are those of the stage that sends.
        """
        result = {}
        for sender, (direction, delays) in enumerate(self._delays.items()):  # forwards from s, gradients from s + 1
            base = np.asarray(delays, np.float64)[:, None]
            if not self.has_factors:
                result[direction] = np.broadcast_to(base, (len(delays), self.units))
                continue
            classes, firsts = self._classes
            of_classes = [
                [scaled_us(delay, self.unit_factors(s + sender, unit).transfer) for unit in firsts]
                for s, delay in enumerate(delays)
            ]
            result[direction] = np.array(of_classes, np.float64).reshape(len(delays), len(firsts))[:, classes]
        return result

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
    def microbatch_work_us(self) -> Sequence[float]:
        """Total time of the compute ops of each microbatch on all stages, without recomputation."""
        of_classes = [
            sum(stage.duration_us("F") + stage.duration_us("BW") for stage in stages)
            for stages in zip(*self.unit_stages, strict=True)
        ]
        of_units = np.array(of_classes, np.float64)[self.unit_class]
        work_us: list[float] = of_units.reshape(self.microbatches, self.slice_count).sum(axis=1).tolist()
        return work_us

    @cached_property
    def work_us(self) -> Sequence[int | float]:
        """Total time of all compute ops of each device, spread passes included, without recomputation."""
        counts = np.bincount(self.unit_class).tolist()
        passes = [float(self.pass_factors(unit).time) for unit in self.class_units]
        return [
            sum(
                count * sum(stage.duration_us("F") + stage.duration_us("BW") for stage in of_class)
                for count, of_class in zip(
                    counts, zip(*(self.unit_stages[s] for s in stages), strict=True), strict=False
                )
            )
            + sum(map(mul, counts, passes)) * sum(one.us[d] for one in self.spread or ())
            for d, stages in enumerate(self.stages_of)
        ]

    def derived(self, make: Callable[[Problem], T]) -> T:
        """The result of `make` for this problem, made once and kept with it."""
        if make not in self._derived:
            self._derived[make] = make(self)
        result: T = self._derived[make]
        return result

    @cached_property
    def _derived(self) -> dict[Callable[[Problem], Any], Any]:
        return {}

    @cached_property
    def has_modes(self) -> bool:
        """True if some stage has activation modes besides `kept` and `offload`."""
        return any(stage.modes for stage in self.stages)

    def with_microbatches(self, count: int) -> Self:
        """The problem with another number of microbatches, all of them alike (`has_factors` is False)."""
        assert not self.has_factors, "which microbatches are left out, or come more than once, is not said"
        return self.replaced(microbatches=count, microbatch_factors=None)

    def with_equal_units(self) -> Self:
        """The problem whose units all have the costs that its stages state."""
        if not self.has_factors:
            return self
        stages = [stage.replaced(slice_factors=None, slice_gradient_bytes=0) for stage in self.stages]
        slices = self.slices and Slices.model_construct(count=self.slices.count)
        return self.replaced(microbatch_factors=None, slices=slices, stages=stages)

    def without_modes(self) -> Self:
        """The problem in which every activation is kept, or offloaded whole."""
        return self.replaced(stages=[stage.replaced(modes=[]) for stage in self.stages])

    @cached_property
    def channel_groups(self) -> Sequence[Sequence[int]]:
        """Groups of devices behind one switch; every device is in exactly one group."""
        shared = [list(group) for group in self.copy_channels.shared_by if group]
        named = {device for group in shared for device in group}
        return shared + [[d] for d in range(len(self.devices)) if d not in named]


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """The number of each value among the different ones, which count from 0 in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
