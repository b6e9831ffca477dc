"""Schedule: who does what when (document `optpipe.schedule/1`), standing alone with its problem inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from optpipe.display import Displayed
from optpipe.document import Document, read_document
from optpipe.fields import Bytes, Instant, Share, TimeUs, reject
from optpipe.orders import STREAM_OF_KIND, STREAMS, DeviceOrders, Op, OpArray, Orders, StreamName
from optpipe.planned_ops import PlannedOps, ScheduledOp
from optpipe.problem import Objective, Problem

__all__ = ["DevicePlan", "PlannedOps", "Schedule", "ScheduledOp", "shared_channels"]

MAX_SCHEDULE_BYTES = 256 * 2**20
"""64 devices x 1024 microbatches with every activation offloaded take about 100 MiB."""


class DevicePlan(Document):
    """What one device does, stream by stream in execution order, and what that costs it.

    `peak_bytes`: peak of activation memory at the predicted times. `peak_bytes_any_timing`: the largest peak over
    every choice of durations that keeps order and waits. `bubble` is ``1 - busy_us / value_us``.
    """

    compute: PlannedOps
    offload: PlannedOps = Field(default_factory=PlannedOps)
    reload: PlannedOps = Field(default_factory=PlannedOps)
    peak_bytes: Bytes
    peak_bytes_any_timing: Bytes
    busy_us: Instant
    bubble: Share

    def streams(self) -> Iterator[tuple[StreamName, PlannedOps]]:
        """Each stream's name with its ops, in the order of STREAMS."""
        for name in STREAMS:
            yield name, getattr(self, name)


class Schedule(Displayed, Document):
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
        hints = {
            "optpipe.problem/": "is a problem but a schedule is needed. Maybe run 'optpipe solve' on it first.",
            "optpipe.layers/": "is a layer profile but a schedule is needed. Maybe run 'optpipe plan' on it first.",
            "optpipe.trace/": "is a trace but a schedule is needed. Maybe use 'optpipe trace'.",
        }
        return cls.from_data(read_document(path, MAX_SCHEDULE_BYTES, hints), str(path))

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        if len(self.devices) != len(self.problem.devices):
            raise reject(
                "wrong_length", f"devices has {len(self.devices)} entries but the problem {len(self.problem.devices)}"
            )
        for d, device in enumerate(self.devices):
            for stream, (name, ops) in enumerate(device.streams()):
                self._check_ops(f"devices[{d}].{name}", stream, ops.ops)
        return self

    def _check_ops(self, where: str, stream: int, ops: OpArray) -> None:
        """Raise at the first op that is on no stage, of no microbatch, or on another stream than its own."""
        stages, microbatches = len(self.problem.stages), self.problem.microbatches
        wrong = (ops.stage >= stages) | (ops.microbatch >= microbatches)
        wrong |= np.asarray(STREAM_OF_KIND)[ops.kind] != stream
        if not wrong.any():
            return
        place = int(np.argmax(wrong))
        op, where = ops[place], f"{where}[{place}]"
        if op.stage >= stages:
            raise reject("unknown_stage", f"{where}.stage is {op.stage} of {stages} stages")
        if op.microbatch >= microbatches:
            raise reject("unknown_microbatch", f"{where}.microbatch is {op.microbatch} of {microbatches}")
        raise reject("wrong_stream", f"{where}.op is {op.kind}, which belongs to the stream {op.stream}")

    @property
    def bubble(self) -> float:
        """The bubble rate: that of the busiest device."""
        return max(self.devices, key=lambda device: device.busy_us).bubble

    @property
    def largest_peak_bytes(self) -> int:
        """The largest peak of any device under any timing."""
        return max(device.peak_bytes_any_timing for device in self.devices)

    def figures(self) -> dict[str, Any]:
        """The schedule in short as JSON values, as `optpipe solve --json` prints it; of peaks one for each device."""
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

    @property
    def time_span_us(self) -> tuple[float, float]:
        """First start and last end over all devices and streams."""
        streams = [ops for device in self.devices for _, ops in device.streams() if ops]
        starts, ends = ([*map(min, (o.starts for o in streams))], [*map(max, (o.ends for o in streams))])
        return min(starts, default=0.0), max(ends, default=0.0)

    @cached_property
    def orders(self) -> Orders:
        """Order and waits alone, as an executor obeys them; channels that serve several streams in planned order."""
        devices = [DeviceOrders(*(ops.ops for _, ops in device.streams())) for device in self.devices]
        waits: dict[Op, list[Op]] = {}
        for device in self.devices:
            for _, ops in device.streams():
                waits |= ops.waits_of()
        return Orders(devices, waits, self._channel_orders())

    def _channel_orders(self) -> Sequence[Sequence[Op]]:
        shared = shared_channels(self.problem)
        if not shared:
            return []
        at = {
            op: times
            for device in self.devices
            for _, ops in device.streams()
            for op, times in zip(ops.ops, zip(ops.starts, ops.ends, strict=True), strict=True)
        }
        place = {op: k for k, op in enumerate(self._in_causal_order(at))}
        channels = []
        for lists in shared:
            ops = [op for device, stream in lists for op in getattr(self.devices[device], stream).ops]
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
                graph.add_edges_from(pairwise(ops.ops))
                waits = ops.waits_of().items()
                graph.add_edges_from((before, op) for op, others in waits for before in others if before in at)
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
