"""Schedule: who does what when (document `optpipe.schedule/1`), standing alone with its problem inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from optpipe.document import Document, read_document
from optpipe.fields import Bytes, Index, Instant, Share, TimeUs, reject
from optpipe.orders import STREAMS, DeviceOrders, Op, Orders, StreamName
from optpipe.problem import Objective, Problem

MAX_SCHEDULE_BYTES = 256 * 2**20
"""64 devices x 1024 microbatches with every activation offloaded take about 100 MiB."""


def _op_name(name: str) -> str:
    try:
        Op.parse(name)
    except ValueError as error:
        raise reject("bad_op_name", f"is wrong: {error}") from None
    return name


class ScheduledOp(Document):
    """An op at its predicted times, with the ops of other streams that it waits for."""

    op: Literal["F", "B", "W", "BW", "O", "R"]
    stage: Index
    microbatch: Index
    start_us: Instant
    end_us: Instant
    waits: list[Annotated[str, AfterValidator(_op_name)]] = []

    @property
    def key(self) -> Op:
        return Op(self.op, self.stage, self.microbatch)


class DevicePlan(Document):
    """What one device does, stream by stream in execution order, and what that costs it.

    `peak_bytes`: peak of activation memory at the predicted times. `peak_bytes_any_timing`: the largest peak over
    every choice of durations that keeps order and waits. `bubble` is ``1 - busy_us / value_us``.
    """

    compute: list[ScheduledOp]
    offload: list[ScheduledOp] = []
    reload: list[ScheduledOp] = []
    peak_bytes: Bytes
    peak_bytes_any_timing: Bytes
    busy_us: Instant
    bubble: Share

    def streams(self) -> Iterator[tuple[StreamName, list[ScheduledOp]]]:
        """Each stream's name with its ops, in the order of STREAMS."""
        for name in STREAMS:
            yield name, getattr(self, name)


class Schedule(Document):
    """A schedule with the problem that it answers. `verify` judges it; this class only reads it.

    `value_us` is the objective, `bound_us` a proved lower bound on it, ``gap = (value - bound) / value``.
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
    devices: list[DevicePlan]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a schedule file. Raises InputError naming the field, the value and the limit."""
        hint = "is a problem but a schedule is needed. Maybe run 'optpipe solve' on it first."
        return cls.from_data(read_document(path, MAX_SCHEDULE_BYTES, {"optpipe.problem/": hint}), str(path))

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        if len(self.devices) != len(self.problem.devices):
            raise reject(
                "wrong_length", f"devices has {len(self.devices)} entries but the problem {len(self.problem.devices)}"
            )
        for d, device in enumerate(self.devices):
            for name, ops in device.streams():
                for place, op in enumerate(ops):
                    self._check_op(f"devices[{d}].{name}[{place}]", name, op)
        return self

    def _check_op(self, where: str, stream: StreamName, op: ScheduledOp) -> None:
        if op.stage >= len(self.problem.stages):
            raise reject("unknown_stage", f"{where}.stage is {op.stage} of {len(self.problem.stages)} stages")
        if op.microbatch >= self.problem.microbatches:
            raise reject("unknown_microbatch", f"{where}.microbatch is {op.microbatch} of {self.problem.microbatches}")
        if op.key.stream != stream:
            raise reject("wrong_stream", f"{where}.op is {op.op}, which belongs to the stream {op.key.stream}")

    @property
    def bubble(self) -> float:
        """The bubble rate: that of the busiest device."""
        return max(self.devices, key=lambda device: device.busy_us).bubble

    @property
    def time_span_us(self) -> tuple[float, float]:
        """First start and last end over all devices and streams."""
        ops = [op for device in self.devices for _, stream in device.streams() for op in stream]
        return min((op.start_us for op in ops), default=0.0), max((op.end_us for op in ops), default=0.0)

    @cached_property
    def orders(self) -> Orders:
        """Order and waits alone, as an executor obeys them; channels that serve several streams in planned order."""
        devices = [DeviceOrders(*([op.key for op in ops] for _, ops in device.streams())) for device in self.devices]
        waits = {
            op.key: [Op.parse(name) for name in op.waits]
            for device in self.devices
            for _, ops in device.streams()
            for op in ops
            if op.waits
        }
        return Orders(devices, waits, self._channel_orders())

    def _channel_orders(self) -> Sequence[Sequence[Op]]:
        at = {op.key: (op.start_us, op.end_us) for device in self.devices for _, ops in device.streams() for op in ops}
        place = {op: k for k, op in enumerate(self._in_causal_order(at))}
        channels = []
        for lists in shared_channels(self.problem):
            ops = [op.key for device, stream in lists for op in getattr(self.devices[device], stream)]
            channels.append(sorted(ops, key=lambda op: (*at[op], place.get(op, 0))))
        return [channel for channel in channels if channel]

    def _in_causal_order(self, at: Mapping[Op, tuple[float, float]]) -> Sequence[Op]:
        """The ops by time, those at one instant after what they wait for; empty unless some transfer takes no time.

        Transfers without length can share an instant, where times say nothing about who goes first.
        """
        if not any(op.kind in "OR" and start == end for op, (start, end) in at.items()):
            return []
        import networkx  # slow to load, and hardly ever needed

        graph = networkx.DiGraph()
        graph.add_nodes_from(at)
        for device in self.devices:
            for _, ops in device.streams():
                graph.add_edges_from(pairwise(op.key for op in ops))
                graph.add_edges_from(
                    (Op.parse(name), op.key) for op in ops for name in op.waits if Op.parse(name) in at
                )
        for kind, s, i in at:
            before = {"O": ("F",), "R": ("O",), "B": ("R",), "BW": ("R",)}.get(kind, ())
            graph.add_edges_from((Op(other, s, i), Op(kind, s, i)) for other in before if Op(other, s, i) in at)
        try:
            return list(networkx.lexicographical_topological_sort(graph, key=lambda op: (*at[op], op)))
        except networkx.NetworkXUnfeasible:
            return []  # a circle: simulation and verification name it


def shared_channels(problem: Problem) -> Sequence[Sequence[tuple[int, StreamName]]]:
    """The copy channels that serve more than one stream, each as its (device, stream) pairs."""
    directions: list[list[StreamName]] = (
        [["offload"], ["reload"]] if problem.copy_channels.duplex else [["offload", "reload"]]
    )
    channels = [[(d, s) for d in group for s in streams] for group in problem.channel_groups for streams in directions]
    return [channel for channel in channels if len(channel) > 1]
