"""A problem with its planned ops (document `optpipe.schedule/1`), and its text.

A schedule may hold hundreds of thousands of ops. They are checked, kept and written as columns, at a fraction of the
cost of an object per op; such an object is built when one op is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from optpipe.display import Displayed
from optpipe.document import UNION_TAG, Document, read_document
from optpipe.errors import InputError, Issue
from optpipe.fields import Bytes, Index, Instant, Share, TimeUs, are_indices, are_instants, reject
from optpipe.kinds import (
    COPIES,
    KIND,
    KINDS,
    RECOMPUTATIONS,
    STREAMS,
    KindName,
    StreamName,
    codes,
    covering,
    needs_of,
)
from optpipe.mode_names import KEPT, OFFLOAD
from optpipe.ops import PASS_NAME, DeviceOrders, Op, OpArray, Orders, WaitArray, is_op_name
from optpipe.problem import Objective, Problem
from optpipe.stage import MAX_MODE_NAME, ModeName

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _op_name(name: str) -> str:
    try:
        Op.parse(name)
    except ValueError as error:
        raise reject("bad_op_name", f"is wrong: {error}") from None
    return name


def _is_list_of_names(value: Any) -> bool:
    return type(value) is list and all(isinstance(name, str) and is_op_name(name) for name in value)


class ScheduledOp(Document):
    """An op with its predicted times and the ops of other streams that it waits for.

    `mode` is given for an F whose activation is not kept; None: as stages[].offload if there is an O, else kept.
    `partner` (``with`` in the document): the other op of a block.
    """

    op: KindName
    stage: Index
    microbatch: Index
    start_us: Instant
    end_us: Instant
    mode: ModeName | None = None
    partner: Annotated[str, AfterValidator(_op_name)] | None = Field(None, alias="with")
    waits: list[Annotated[str, AfterValidator(_op_name)]] = []

    @property
    def key(self) -> Op:
        """The op without its times."""
        return Op(self.op, self.stage, self.microbatch)


class ScheduledPass(ScheduledOp):
    """An op of a spread pass: `op` is the name of the pass, and `stage` (``part`` in the document) its device."""

    op: Annotated[str, Field(pattern=PASS_NAME)]  # type: ignore[assignment]
    stage: Index = Field(alias="part")


_STAGE, _PART = UNION_TAG + "stage", UNION_TAG + "part"


def _place_tag(value: Any) -> str:
    is_pass = "part" in value if isinstance(value, dict) else isinstance(value, ScheduledPass)
    return _PART if is_pass else _STAGE


_Row = Annotated[Annotated[ScheduledOp, Tag(_STAGE)] | Annotated[ScheduledPass, Tag(_PART)], Discriminator(_place_tag)]

_FIELDS = ("op", "stage", "microbatch", "start_us", "end_us")
_RARE_FIELDS = ("mode", "with", "waits")
_PLACE = {False: "stage", True: "part"}
_FIELD_SETS = {frozenset((*_FIELDS, *more)) for n in range(4) for more in combinations(_RARE_FIELDS, n)}


class PlannedOps(Sequence[ScheduledOp]):
    """The ops of one stream in execution order, held as columns; reads like a list of ScheduledOp.

    `starts` and `ends` are the times of `ops` in us, as given. `waits` maps the index of an op to the names of the ops
    that it waits for. `silent`: indices of ops for which the document has no field `waits`, kept for the round trip.
    `modes` maps the index of an op to its field `mode`, where the document has one; `partners` to its field `with`.
    """

    def __init__(
        self,
        ops: OpArray | None = None,
        starts: Sequence[int | float] = (),
        ends: Sequence[int | float] = (),
        waits: Mapping[int, Sequence[str]] | None = None,
        silent: frozenset[int] = frozenset(),
        modes: Mapping[int, str | None] | None = None,
        partners: Mapping[int, str | None] | None = None,
    ) -> None:
        self.ops = OpArray([], [], []) if ops is None else ops
        self.starts, self.ends = starts, ends
        self.waits = waits or {}
        self.silent = silent
        self.modes = modes or {}
        self.partners = partners or {}

    @cached_property
    def start_us(self) -> Floats:
        """Starts as an array."""
        return np.asarray(self.starts, np.float64)

    @cached_property
    def end_us(self) -> Floats:
        """Ends as an array."""
        return np.asarray(self.ends, np.float64)

    def waits_of(self) -> WaitArray:
        """The waits of every op that has any."""
        index = np.array([k for k, names in self.waits.items() for _ in names], np.int64)
        before = OpArray.parse(" ".join(name for names in self.waits.values() for name in names))
        return WaitArray(self.ops[index], before.numbered(self.ops.passes))

    def number_passes(self, passes: Sequence[str]) -> None:
        """Number the spread passes as a problem does. Raises KeyError for one that it does not have."""
        self.ops = self.ops.numbered(passes)
        if any(wait.rstrip("0123456789.") not in KINDS for names in self.waits.values() for wait in names):
            self.waits_of()

    def to_data(self) -> list[dict[str, Any]]:
        """The ops as plain JSON values, with only the fields that were given."""
        ops = self.ops
        columns = (ops.kinds, self.places, ops.stage.tolist(), ops.microbatch.tolist())
        rows = [
            {"op": kind, place: stage, "microbatch": microbatch, "start_us": start, "end_us": end, "waits": []}
            for kind, place, stage, microbatch, start, end in zip(*columns, self.starts, self.ends, strict=True)
        ]
        for name, column in (("mode", self.modes), ("with", self.partners)):
            for index, value in column.items():
                row = rows[index]
                row[name], row["waits"] = value, row.pop("waits")
        for index, names in self.waits.items():
            rows[index]["waits"] = list(names)
        for index in self.silent:
            del rows[index]["waits"]
        return rows

    @property
    def places(self) -> list[str]:
        """The field that says where each op is."""
        return [_PLACE[spread] for spread in self.ops.spread.tolist()]

    def __len__(self) -> int:
        return len(self.ops)

    @overload
    def __getitem__(self, index: int) -> ScheduledOp: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScheduledOp]: ...
    def __getitem__(self, index: int | slice) -> ScheduledOp | list[ScheduledOp]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index], self.ops[index])

    def __iter__(self) -> Iterator[ScheduledOp]:
        return map(self._row, range(len(self)), self.ops)

    def _row(self, index: int, op: Op) -> ScheduledOp:
        values = dict(zip(_FIELDS, (*op, self.starts[index], self.ends[index]), strict=True))
        waits = list(self.waits.get(index, ()))
        given = {*_FIELDS} if index in self.silent else {*_FIELDS, "waits"}
        given |= {name for name, column in (("mode", self.modes), ("partner", self.partners)) if index in column}
        rare = {"mode": self.modes.get(index), "partner": self.partners.get(index)}
        row = ScheduledOp if op.kind in KIND else ScheduledPass
        return row.model_construct(given, **values, **rare, waits=waits)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlannedOps):
            return isinstance(other, list) and list(self) == other
        columns = [
            (list(ops.starts), list(ops.ends), dict(ops.waits), dict(ops.modes), dict(ops.partners))
            for ops in (self, other)
        ]
        return self.ops == other.ops and columns[0] == columns[1]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PlannedOps({list(self)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Schema of a list of ScheduledOp."""
        return core_schema.no_info_wrap_validator_function(
            cls._read,
            handler.generate_schema(list[_Row]),
            serialization=core_schema.plain_serializer_function_ser_schema(cls.to_data),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema["schema"])

    @classmethod
    def _read(cls, value: Any, one_by_one: ValidatorFunctionWrapHandler) -> PlannedOps:
        """Check whole columns at once; op by op only if that fails, for the errors and for rare but valid input."""
        if isinstance(value, PlannedOps):
            return value
        if (columns := cls._from_rows(value)) is not None:
            return columns
        ops = one_by_one(value)
        return cls(
            OpArray.of([op.key for op in ops]),
            [op.start_us for op in ops],
            [op.end_us for op in ops],
            {k: op.waits for k, op in enumerate(ops) if op.waits},
            frozenset(k for k, op in enumerate(ops) if "waits" not in op.model_fields_set),
            {k: op.mode for k, op in enumerate(ops) if "mode" in op.model_fields_set},
            {k: op.partner for k, op in enumerate(ops) if "partner" in op.model_fields_set},
        )

    @classmethod
    def _from_rows(cls, rows: Any) -> PlannedOps | None:
        """Columns of JSON objects; None if there are none, or any of them might be wrong."""
        if not isinstance(rows, list) or set(map(type, rows)) != {dict}:
            return None
        fields = set(map(frozenset, rows))
        if not fields <= _FIELD_SETS:
            return None
        kinds, stages, microbatches, starts, ends = zip(*map(itemgetter(*_FIELDS), rows), strict=True)
        if set(map(type, kinds)) != {str} or not set(kinds) <= set(KINDS):
            return None
        if not all(map(are_indices, (stages, microbatches))) or not all(map(are_instants, (starts, ends))):
            return None
        waits = {k: row["waits"] for k, row in enumerate(rows) if row.get("waits", []) != []}
        if not all(map(_is_list_of_names, waits.values())):
            return None
        silent = frozenset(k for k, row in enumerate(rows) if "waits" not in row)
        modes = {}
        if any("mode" in names for names in fields):
            modes = {k: row["mode"] for k, row in enumerate(rows) if "mode" in row}
            if not all(type(mode) is str and 0 < len(mode) <= MAX_MODE_NAME for mode in modes.values()):
                return None
        partners = {k: row["with"] for k, row in enumerate(rows) if "with" in row}
        if not _is_list_of_names([*partners.values()]):
            return None
        return cls(OpArray.of_columns(kinds, stages, microbatches), starts, ends, waits, silent, modes, partners)


__all__ = ["DevicePlan", "PlannedOps", "Schedule", "ScheduledOp", "shared_channels"]

MAX_SCHEDULE_BYTES = 256 * 2**20
"""A schedule of 64 devices x 1024 microbatches that offloads every activation takes about 100 MiB."""


class DevicePlan(Document):
    """Ops of one device by stream, in execution order, with the resulting memory and bubble.

    `peak_bytes`: peak activation memory at the predicted times. `peak_bytes_any_timing`: largest peak over every choice
    of durations that keeps order and waits. `bubble` is ``1 - busy_us / value_us``.
    """

    compute: PlannedOps
    offload: PlannedOps = Field(default_factory=PlannedOps)
    reload: PlannedOps = Field(default_factory=PlannedOps)
    peak_bytes: Bytes
    peak_bytes_any_timing: Bytes
    busy_us: Instant
    bubble: Share

    def streams(self) -> Iterator[tuple[StreamName, PlannedOps]]:
        """Name and ops of each stream, in the order of STREAMS."""
        for name in STREAMS:
            yield name, getattr(self, name)

    @property
    def recomputed(self) -> int:
        """Number of activations that are recomputed, ahead of their backward or inside it."""
        return int(np.isin(self.compute.ops.kind, codes(RECOMPUTATIONS)).sum())


def idle_times_us(start_us: Floats, end_us: Floats, step_us: tuple[float, float]) -> tuple[float, float, float]:
    """Time of a step, given by its begin and end, in which no op runs: before the first, between, and after the last.

    Ops are in order of their starts; the two of a block run at the same time.
    """
    first_us, last_us = step_us
    if not len(start_us):
        return last_us - first_us, 0.0, 0.0
    ended_us = np.maximum.accumulate(end_us)
    within_us = float(np.maximum(0.0, start_us[1:] - ended_us[:-1]).sum())
    return float(start_us.min()) - first_us, within_us, last_us - float(ended_us[-1])


class Schedule(Displayed, Document):
    """A schedule with its problem. This class checks the form of the document; `verify` checks the rules of the model.

    `value_us` is the objective, `bound_us` a proved lower bound on it, ``gap = (value - bound) / value``.
    `microbatch_order`: the order in which microbatches run where the problem leaves it free; None: ascending.
    """

    format: Literal["optpipe.schedule/1"]
    problem: Problem
    status: Literal["optimal", "feasible"]
    objective: Objective
    value_us: Instant
    bound_us: Instant
    gap: Share
    method: str = Field(max_length=100)
    solve_seconds: TimeUs
    microbatch_order: list[Index] | None = None
    devices: list[DevicePlan]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a schedule file. Raises InputError naming the field, the value and the limit."""
        return cls.from_data(read_document(path, MAX_SCHEDULE_BYTES, "schedule"), str(path))

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        if len(self.devices) != len(self.problem.devices):
            raise reject(
                "wrong_length", f"devices has {len(self.devices)} entries but the problem {len(self.problem.devices)}"
            )
        if self.microbatch_order is not None and sorted(self.microbatch_order) != list(
            range(self.problem.microbatches)
        ):
            raise reject(
                "not_a_permutation", f"microbatch_order must hold each of {self.problem.microbatches} microbatches once"
            )
        for d, device in enumerate(self.devices):
            for stream, (name, ops) in enumerate(device.streams()):
                self._number_passes(f"devices[{d}].{name}", ops)
                self._check_ops(f"devices[{d}].{name}", stream, ops.ops)
                self._check_modes(f"devices[{d}].{name}", ops)
        return self

    def _check_modes(self, where: str, planned: PlannedOps) -> None:
        """Reject the first `mode` that belongs to no F, or that the stage does not have."""
        for index, mode in planned.modes.items():
            op = planned.ops[index]
            if op.kind != "F":
                raise reject("misplaced_mode", f"{where}[{index}].mode is given for {op}, but only an F has a mode")
            choices = self.problem.stages[op.stage].choice_numbers
            if mode is not None and mode not in choices:
                raise reject(
                    "unknown_mode",
                    f"{where}[{index}].mode is {mode!r}, but stages[{op.stage}] has {', '.join(choices)}. "
                    "Maybe the schedule is of another problem",
                )

    def _number_passes(self, where: str, planned: PlannedOps) -> None:
        """Number spread passes as the problem does; reject one that it does not have."""
        try:
            planned.number_passes(self.problem.pass_names)
        except KeyError as error:
            passes = ", ".join(self.problem.pass_names) or "none"
            raise reject(
                "unknown_pass", f"{where} has an op {error}; the problem's spread passes are: {passes}"
            ) from None

    def _check_ops(self, where: str, stream: int, ops: OpArray) -> None:
        """Reject the first op with an unknown stage or microbatch, or on another stream than its own."""
        microbatches = self.problem.units
        places = np.where(ops.spread, len(self.problem.devices), len(self.problem.stages))
        wrong = (ops.stage >= places) | (ops.microbatch >= microbatches)
        wrong |= ops.stream != stream
        if not wrong.any():
            return
        index = int(np.argmax(wrong))
        op, where = ops[index], f"{where}[{index}]"
        if op.kind in self.problem.pass_names and op.stage >= len(self.problem.devices):
            raise reject("unknown_device", f"{where}.part is {op.stage} of {len(self.problem.devices)} devices")
        if op.kind in KINDS and op.stage >= len(self.problem.stages):
            raise reject("unknown_stage", f"{where}.stage is {op.stage} of {len(self.problem.stages)} stages")
        if op.microbatch >= microbatches:
            of = f" ({self.problem.microbatches} of {self.problem.slice_count} slices)" if self.problem.slices else ""
            raise reject("unknown_microbatch", f"{where}.microbatch is {op.microbatch} of {microbatches}{of}")
        raise reject("wrong_stream", f"{where}.op is {op.kind}, which belongs to the stream {op.stream}")

    @property
    def bubble(self) -> float:
        """Bubble rate of the busiest device."""
        return max(self.devices, key=lambda device: device.busy_us).bubble

    @property
    def bubble_with_recomputation(self) -> float:
        """Share of the value in which the device with the most work does none of the model's own: C counts as idle."""
        works = zip(self.problem.work_us, self.problem.hidden_us(self.orders.blocks), strict=True)
        return 1 - max(work_us - hidden_us for work_us, hidden_us in works) / self.value_us if self.value_us else 0.0

    @property
    def largest_peak_bytes(self) -> int:
        """Largest worst-case peak of any device."""
        return max(device.peak_bytes_any_timing for device in self.devices)

    def figures(self) -> dict[str, Any]:
        """Summary as JSON values, as `optpipe solve --json` prints it, with one peak per device."""
        return {
            "name": self.problem.name,
            "method": self.method,
            "status": self.status,
            "objective": self.objective,
            "value_us": self.value_us,
            "bound_us": self.bound_us,
            "gap": self.gap,
            "bubble": self.bubble,
            "solve_seconds": self.solve_seconds,
            "peak_bytes": [device.peak_bytes for device in self.devices],
            "peak_bytes_any_timing": [device.peak_bytes_any_timing for device in self.devices],
            "memory_bytes": [device.memory_bytes for device in self.problem.devices],
        }

    def idle_us(self, device: int) -> tuple[float, float, float]:
        """Time in which a device does not compute: before its first op, between its ops, and after its last.

        The three and the device's `busy_us` add up to the time from the first start to the last end on any device.
        """
        ops = self.devices[device].compute
        return idle_times_us(ops.start_us, ops.end_us, self.time_span_us)

    @cached_property
    def time_span_us(self) -> tuple[float, float]:
        """First start and last end over all devices and streams."""
        streams = [ops for device in self.devices for _, ops in device.streams() if ops]
        starts, ends = ([*map(min, (o.starts for o in streams))], [*map(max, (o.ends for o in streams))])
        return min(starts, default=0.0), max(ends, default=0.0)

    @cached_property
    def orders(self) -> Orders:
        """Orders and waits, as an executor obeys them; shared channels in planned order."""
        devices = [DeviceOrders(*(ops.ops for _, ops in device.streams())) for device in self.devices]
        waits = WaitArray.joined([ops.waits_of() for device in self.devices for _, ops in device.streams()])
        shared = shared_channels(self.problem)
        if not shared:
            return Orders(
                devices, waits, modes=self.modes, microbatch_order=self.microbatch_order, blocks=self._blocks()
            )
        at = {
            op: times
            for device in self.devices
            for _, ops in device.streams()
            for op, times in zip(ops.ops, zip(ops.starts, ops.ends, strict=True), strict=True)
        }
        index = {op: k for k, op in enumerate(self._in_causal_order(at))}
        channels = []
        for lists in shared:
            transfers = [op for device, stream in lists for op in getattr(self.devices[device], stream).ops]
            channels.append(sorted(transfers, key=lambda op: (*at[op], index.get(op, 0))))
        used = [channel for channel in channels if channel]
        return Orders(devices, waits, used, self.modes, self.microbatch_order, self._blocks())

    def _blocks(self) -> dict[Op, Op]:
        """The fused backward of each F that names one."""
        streams = (device.compute for device in self.devices)
        named = ((ops.ops[index], partner) for ops in streams for index, partner in ops.partners.items())
        return {op: Op.parse(partner) for op, partner in named if partner is not None and op.kind == "F"}

    def orders_in(self, problem: Problem) -> Orders:
        """The orders for another problem with the same stages and microbatches; activation modes are those of one name.

        Raises InputError where a stage there has no mode of that name.
        """
        if self.modes is None:
            return self.orders
        modes = self.modes.copy()
        for s, (own, other) in enumerate(zip(self.problem.stages, problem.stages, strict=True)):
            for number in np.unique(self.modes[s]).tolist():
                name = own.choices[number].name
                if name not in other.choice_numbers:
                    detail = f"has no mode {name!r}, in which the schedule holds activations. Maybe leave it out there."
                    raise InputError([Issue(f"stages[{s}].modes", "missing_mode", detail)])
                modes[s][self.modes[s] == number] = other.choice_numbers[name]
        return replace(self.orders, modes=modes)

    @property
    def mode_names(self) -> Sequence[str]:
        """Names of the modes that the schedule uses, without those that a problem has by itself."""
        return list(dict.fromkeys(name for device in self.devices for name in device.compute.modes.values() if name))

    @cached_property
    def modes(self) -> Ints | None:
        """Activation mode of each unit on each stage: an index into its `choices`, (stages, units).

        None where each is offloaded whole or kept, as it has an O or not.
        """
        if not any(device.compute.modes for device in self.devices):
            return None
        implied = implied_modes(self.problem, [device.offload.ops for device in self.devices])
        modes = implied.copy()
        for device in self.devices:
            for index, name in device.compute.modes.items():
                op = device.compute.ops[index]
                if name is not None:
                    modes[op.stage, op.microbatch] = self.problem.stages[op.stage].choice_numbers[name]
        return None if np.array_equal(modes, implied) else modes

    def _in_causal_order(self, at: Mapping[Op, tuple[float, float]]) -> Sequence[Op]:
        """Ops by time, ties broken by precedence; empty unless some transfer takes no time.

        Only transfers of zero length can share an instant on a channel, where times do not determine their order.
        """
        if not any(op.kind in COPIES and start == end for op, (start, end) in at.items()):
            return []
        import networkx  # slow to import, and rarely needed

        graph = networkx.DiGraph()
        graph.add_nodes_from(at)
        for device in self.devices:
            for _, ops in device.streams():
                graph.add_edges_from(pairwise(ops.ops))
                waits = ops.waits_of().items()
                graph.add_edges_from((before, op) for op, others in waits for before in others if before in at)
        for op in at:
            needs = [need.duty for need in needs_of(op.kind) if not need.stage and not need.slice]
            befores = (Op(kind, *op[1:]) for duty in needs for kind in covering(duty))
            graph.add_edges_from((before, op) for before in befores if before in at)
        try:
            return list(networkx.lexicographical_topological_sort(graph, key=lambda op: (*at[op], op)))
        except networkx.NetworkXUnfeasible:
            return []  # simulation and verification report the cycle


def implied_modes(problem: Problem, offloads: Iterable[Sequence[Op]]) -> Ints:
    """Activation modes of microbatches that are offloaded whole if they have an O, else kept: (stages, units).

    `offloads`: the offload streams.
    """
    modes = np.zeros((len(problem.stages), problem.units), np.int64)
    whole = np.array([stage.choice_numbers.get(OFFLOAD, 0) for stage in problem.stages])
    for stream in offloads:
        ops = OpArray.of(stream)
        modes[ops.stage, ops.microbatch] = whole[ops.stage]
    return modes


def named_modes(problem: Problem, modes: Ints | None, ops: OpArray) -> dict[int, str]:
    """Modes that a schedule states: those of each F, by its index, that is neither kept nor offloaded whole.

    `modes` as in `Orders`.
    """
    if modes is None:
        return {}
    stages = problem.stages
    unsaid = [
        {stage.choice_numbers[name] for name in (KEPT, OFFLOAD) if name in stage.choice_numbers} for stage in stages
    ]
    forwards = np.flatnonzero(ops.kind == KINDS.index("F"))
    found = modes[ops.stage[forwards], ops.microbatch[forwards]]
    named = zip(forwards.tolist(), ops.stage[forwards].tolist(), found.tolist(), strict=True)
    return {k: stages[s].choices[mode].name for k, s, mode in named if mode not in unsaid[s]}


def named_partners(orders: Orders, ops: OpArray) -> dict[int, str]:
    """The other op of each op of a block, by its index."""
    if not orders.blocks:
        return {}
    partners = {**orders.blocks, **{backward: forward for forward, backward in orders.blocks.items()}}
    return {k: str(partners[op]) for k, op in enumerate(ops) if op in partners}


def shared_channels(problem: Problem) -> Sequence[Sequence[tuple[int, StreamName]]]:
    """Copy channels that serve more than one stream, each as its (device, stream) pairs."""
    directions: list[list[StreamName]] = (
        [["offload"], ["reload"]] if problem.copy_channels.duplex else [["offload", "reload"]]
    )
    channels = [[(d, s) for d in group for s in streams] for group in problem.channel_groups for streams in directions]
    return [channel for channel in channels if len(channel) > 1]


def schedule_text(schedule: Schedule) -> str:
    """The document as text with one op per line, which `Schedule.load` reads back to an equal schedule."""
    data = schedule.model_dump(mode="json", exclude_unset=True, exclude={"devices"})
    head = ",\n".join(f"  {_line(key)}: {_line(value)}" for key, value in data.items())
    texts = []
    for device in schedule.devices:
        fields = []
        for name in (name for name in DevicePlan.model_fields if name in device.model_fields_set):
            value = getattr(device, name)
            if isinstance(value, PlannedOps):
                text = "[\n" + ",\n".join(_op_lines(value)) + "\n      ]" if value else "[]"
            else:
                text = _line(value)
            fields.append(f"      {_line(name)}: {text}")
        texts.append("    {\n" + ",\n".join(fields) + "\n    }")
    devices = ",\n".join(texts)
    return f'{{\n{head},\n  "devices": [\n{devices}\n  ]\n}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "), allow_nan=False)


def _op_lines(planned: PlannedOps) -> list[str]:
    """One line per op. Finite floats and integers are written by `repr`, as `json` does."""
    ops = planned.ops
    columns = (ops.kinds, planned.places, ops.stage.tolist(), ops.microbatch.tolist())
    rows = zip(*columns, planned.starts, planned.ends, strict=True)
    lines = [
        f'        {{"op": "{kind}", "{place}": {stage}, "microbatch": {microbatch}, '
        f'"start_us": {start!r}, "end_us": {end!r}, "waits": []}}'
        for kind, place, stage, microbatch, start, end in rows
    ]
    for name, column in (("mode", planned.modes), ("with", planned.partners)):
        for index, value in column.items():
            lines[index] = lines[index].removesuffix('"waits": []}') + f'"{name}": {_line(value)}, "waits": []}}'
    for index, names in planned.waits.items():
        lines[index] = lines[index].removesuffix("[]}") + f"{_line(list(names))}}}"
    for index in planned.silent:
        lines[index] = lines[index].removesuffix(', "waits": []}') + "}"
    return lines


def relative_gap(value_us: float, bound_us: float) -> float:
    """``(value - bound) / value``; 0 for a value of 0."""
    return (value_us - bound_us) / value_us if value_us else 0.0
