"""The floor: one microbatch at a time, with activations offloaded where the budget asks for it.

Slow, but it needs less memory than anything else known for a placement, so it is where a search can begin when no
published schedule fits, and it tells which budgets are known to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe.costs import device_effect
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Problem, Stage
from solver.build import orders_from_times, peak_budgets


def serial_orders(problem: Problem) -> Orders | None:
    """Orders of the floor within the budgets, or None where even it needs more."""
    return _within(problem, [device.memory_bytes for device in problem.devices])


def known_budgets_bytes(problem: Problem) -> list[int]:
    """For each device the smallest budget with which the floor runs, all of them together."""
    no_limits: list[int | None] = [None] * len(problem.devices)
    eager, lazy = _Serial(problem, no_limits, eager=True).orders(), _Serial(problem, no_limits).orders()
    assert eager is not None
    assert lazy is not None
    everything_leaves = peak_budgets(problem, eager)
    least = [min(pair) for pair in zip(everything_leaves, peak_budgets(problem, lazy), strict=True)]
    # With little room on the host what leaves one device may keep that of another from leaving.
    return least if _within(problem, least) is not None else everything_leaves


def _within(problem: Problem, budgets: Sequence[int | None]) -> Orders | None:
    """Orders in which what is in the way leaves or, where the host has no room for that, whatever may leave."""
    lazy = _Serial(problem, budgets).orders()
    return lazy if lazy is not None else _Serial(problem, budgets, eager=True).orders()


def impossible_budgets(problem: Problem) -> list[tuple[int, int, int]]:
    """Devices whose budget is below what a single microbatch of one of their stages needs.

    Each as (device, bytes needed, budget). No schedule exists if there is any: the activation is whole when its F
    has run and again when its B runs.
    """
    short = []
    for d, stages in enumerate(problem.stages_of):
        budget = problem.devices[d].memory_bytes
        needed = max((_alone_bytes(problem.stages[s]) for s in stages), default=0)
        if budget is not None and needed > budget:
            short.append((d, needed, budget))
    return short


def _alone_bytes(stage: Stage) -> int:
    """The least peak of one microbatch alone on a stage, whether its backward is split or fused."""
    return stage.activation_bytes + max(stage.workspace_bytes.F, _backward_room_bytes(stage)[0])


def _backward_room_bytes(stage: Stage) -> tuple[int, list[str]]:
    """Memory of a backward beside the activation, and its ops: split, unless fused needs less."""
    work, grows = stage.workspace_bytes, stage.backward_weight_bytes - stage.activation_bytes
    split = max(work.B, grows, grows + work.W)
    return (work.BW, ["BW"]) if split > work.BW else (split, ["B", "W"])


def _repeated(orders: Orders, microbatches: int) -> Orders:
    """Orders of two microbatches, one after the other, with the second repeated for all that follow."""
    if microbatches <= 2:
        return orders
    waits = dict(orders.waits)
    for op, others in orders.waits.items():
        for later in range(1, microbatches - 1) if op.microbatch else ():
            waits[_later(op, later)] = [_later(other, later) for other in others]
    devices = [DeviceOrders(*(_tiled(ops, microbatches) for ops in device.streams())) for device in orders.devices]
    return Orders(devices, waits, [_tiled(channel, microbatches) for channel in orders.channels])


def _tiled(ops: Sequence[Op], microbatches: int) -> OpArray:
    first = OpArray.of(ops)[: len(ops) // 2]
    which = np.repeat(np.arange(microbatches), len(first))
    return OpArray(np.tile(first.kind, microbatches), np.tile(first.stage, microbatches), which)


def _later(op: Op, microbatches: int) -> Op:
    return op._replace(microbatch=op.microbatch + microbatches)


class _Serial:
    """Plans one op after another, one microbatch after another; the place in that sequence is the planned time.

    A microbatch leaves every device empty, so each runs as the one before. Two are planned (the first finds no
    releases to wait for) and the second is repeated.
    Offloads the longest-lived activation when an op needs room or, if `eager`, whatever may leave as soon as it may.
    """

    def __init__(self, problem: Problem, budgets: Sequence[int | None], eager: bool = False) -> None:
        self.problem = problem
        self.budgets = budgets
        self.eager = eager
        self.planned: dict[Op, tuple[float, float]] = {}
        self.memory = [0] * len(problem.devices)
        self.away: set[int] = set()
        self.on_host_bytes = 0
        self.resident: list[list[int]] = [[] for _ in problem.devices]

    def orders(self) -> Orders | None:
        """The orders, or None where a budget (or the host's) is too small."""
        if not all(self._microbatch(i) for i in range(min(self.problem.microbatches, 2))):
            return None
        return _repeated(orders_from_times(self.problem, self.planned), self.problem.microbatches)

    def _microbatch(self, i: int) -> bool:
        for s in range(len(self.problem.stages)):
            if not self._forward(s, i):
                return False
        return all(self._backward(s, i) for s in reversed(range(len(self.problem.stages))))

    def _forward(self, s: int, i: int) -> bool:
        stage = self.problem.stages[s]
        if not self._make_room(stage.device, stage.activation_bytes + stage.workspace_bytes.F, i):
            return False
        self._run(Op("F", s, i))
        self.resident[stage.device].append(s)
        if self.eager and self._may_leave(s):
            self._offload(s, i)
        return True

    def _backward(self, s: int, i: int) -> bool:
        stage = self.problem.stages[s]
        device = stage.device
        room, kinds = _backward_room_bytes(stage)
        back = self._moved(s) if s in self.away else 0
        if s in self.resident[device]:
            self.resident[device].remove(s)
        if not self._make_room(device, back + room, i):
            return False
        if s in self.away:
            self._run(Op("R", s, i))
            self.away.remove(s)
            self.on_host_bytes -= back
        for kind in kinds:
            self._run(Op(kind, s, i))
        return True

    def _make_room(self, device: int, needed: int, i: int) -> bool:
        """Offload activations of a device, of those that may leave the longest-lived, until `needed` bytes are free."""
        budget = self.budgets[device]
        while budget is not None and self.memory[device] + needed > budget:
            leaving = next((s for s in self.resident[device] if self._may_leave(s)), None)
            if leaving is None:
                return False
            self._offload(leaving, i)
        return True

    def _may_leave(self, s: int) -> bool:
        """True if the activation can be offloaded and the host has room for it."""
        limit = self.problem.host_memory_bytes
        if self.problem.stages[s].offload is None:
            return False
        return limit is None or self.on_host_bytes + self._moved(s) <= limit

    def _moved(self, s: int) -> int:
        offload = self.problem.stages[s].offload
        return offload.bytes if offload else 0

    def _offload(self, s: int, i: int) -> None:
        self.resident[self.problem.stages[s].device].remove(s)
        self.away.add(s)
        self.on_host_bytes += self._moved(s)
        self._run(Op("O", s, i))

    def _run(self, op: Op) -> None:
        stage = self.problem.stages[op.stage]
        self.planned[op] = (len(self.planned), len(self.planned) + 1)
        self.memory[stage.device] += sum(device_effect(stage, op.kind))
