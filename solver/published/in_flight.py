"""Compute orders for any placement from one number: how many microbatches may be in flight.

A list schedule in time: whenever a device is free it takes what is ready, B before F (the stage nearest to the loss
first), and W when nothing else is ready or too many W are left over. Budgets are not looked at: fewer microbatches in
flight need less memory.
"""

from __future__ import annotations

from heapq import heappop, heappush

from optpipe.orders import Op, Orders
from optpipe.problem import Problem


def in_flight_orders(problem: Problem, in_flight: int, late_weights: int) -> Orders:
    """Orders with at most `in_flight` microbatches between their first F and their last B.

    At most `late_weights` W are left over on a device while it does other things. Never deadlocks.
    """
    return Orders.of_compute(_Run(problem, in_flight, late_weights).orders())


class _Run:
    """Events in time: `arrivals[d]` holds what device d may run from when, `ready[d]` what it may run now."""

    def __init__(self, problem: Problem, in_flight: int, late_weights: int) -> None:
        self.problem = problem
        self.in_flight = in_flight
        self.late_weights = late_weights
        devices = range(len(problem.devices))
        self.free_us = [0.0 for _ in devices]
        self.arrivals: list[list[tuple[float, Op]]] = [[] for _ in devices]
        self.ready: list[list[tuple[int, int, int, Op]]] = [[] for _ in devices]
        self.weights: list[list[Op]] = [[] for _ in devices]
        self.order: list[list[Op]] = [[] for _ in devices]
        self.wake: list[tuple[float, int]] = []

    def orders(self) -> list[list[Op]]:
        """Run until nothing is left."""
        for i in range(min(self.in_flight, self.problem.microbatches)):
            self._arrive(Op("F", 0, i), 0.0)
        while self.wake:
            now, device = heappop(self.wake)
            if now >= self.free_us[device]:
                self._act(device, now)
        return self.order

    def _arrive(self, op: Op, when_us: float) -> None:
        device = self.problem.stages[op.stage].device
        heappush(self.arrivals[device], (when_us, op))
        heappush(self.wake, (max(when_us, self.free_us[device]), device))

    def _act(self, device: int, now: float) -> None:
        """Let a free device take its next op, or sleep until one arrives."""
        arrivals, ready, weights = self.arrivals[device], self.ready[device], self.weights[device]
        while arrivals and arrivals[0][0] <= now:
            _, op = heappop(arrivals)
            heappush(ready, (op.kind == "F", op.microbatch, -op.stage, op))
        if weights and (len(weights) > self.late_weights or (not ready and self._gap_is_long(device, now))):
            self._run(device, weights.pop(0), now)
        elif ready:
            self._run(device, heappop(ready)[-1], now)

    def _gap_is_long(self, device: int, now: float) -> bool:
        """Whether the oldest W is done before the next op arrives."""
        arrivals = self.arrivals[device]
        weight_us = self.problem.stages[self.weights[device][0].stage].backward_weight_us
        return not arrivals or now + weight_us <= arrivals[0][0]

    def _run(self, device: int, op: Op, now: float) -> None:
        end = now + self.problem.stages[op.stage].duration_us(op.kind)
        self.free_us[device] = end
        self.order[device].append(op)
        self._release(op, end)
        heappush(self.wake, (end, device))

    def _release(self, op: Op, end_us: float) -> None:
        """What an op's end makes possible."""
        kind, s, i = op
        last = len(self.problem.stages) - 1
        if kind == "F":
            delay = self.problem.forward_delay_us[s] if s < last else 0.0
            self._arrive(Op("F", s + 1, i) if s < last else Op("B", s, i), end_us + delay)
        elif kind == "B":
            self.weights[self.problem.stages[s].device].append(Op("W", s, i))
            if s:
                self._arrive(Op("B", s - 1, i), end_us + self.problem.backward_delay_us[s - 1])
            elif i + self.in_flight < self.problem.microbatches:
                self._arrive(Op("F", 0, i + self.in_flight), end_us)
