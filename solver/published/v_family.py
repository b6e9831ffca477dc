"""V-Min, V-Half and V-ZB: schedules with controllable memory along a V (arXiv 2405.15362, sections 3 and 4).

A building block says when each pass of one microbatch runs, with F, B and W of a chunk one unit of time long. It is
repeated every six units, in which a device runs F, B and W of both its chunks. Along the devices every leg is a
straight line: a leg away from device 0 takes `out` units a device and a leg towards it `back` units,

    F going out: out * d,  F coming back: c1 - back * d,  B going out: c2 + out * d,  B coming back: c3 - back * d.

The two chunks of a device then live for 2 (out + back) (p - 1) units together, and some for turning round. So every
device holds about (out + back) p / 6 microbatches: a third of 1F1B's memory for V-Min, half for V-Half, all for V-ZB.

What repetition leaves idle at both ends is then filled: a device that would wait takes a later pass if that keeps its
peak, and once its forwards are done it takes B before W. The costs are the problem's own.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import product

from optpipe.memory import device_effect
from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.finish import peak_budgets
from solver.published.placement import require_v_shape

PERIOD = 6

Block = tuple[dict[tuple[str, int], int], ...]
"""For each device, the start of each of its passes, by kind and stage."""


def v_min(problem: Problem) -> Orders:
    """V-Min, the least memory: (p + 4) // 3 microbatches. Its block fits unit costs alone. Raises MethodError."""
    return _best(problem, "v-min", [(1, 1)])


def v_half(problem: Problem) -> Orders:
    """V-Half: (p + 2) // 2 microbatches, and no bubble that repeats for measured costs. Raises MethodError."""
    return _best(problem, "v-half", [(2, 1), (1, 2)])


def v_zb(problem: Problem) -> Orders:
    """V-ZB: p microbatches, as 1F1B, and next to no bubble. Raises MethodError on placement."""
    return _best(problem, "v-zb", [(3, 3)])


def _best(problem: Problem, method: str, slopes: list[tuple[int, int]]) -> Orders:
    """The best of the blocks with these slopes, as they are, and with their ends filled at unit or real costs."""
    require_v_shape(problem, method)
    candidates = []
    for out, back in slopes:
        plan = _repeated(problem, building_block(len(problem.devices), out, back))
        candidates += [plan, *(_Filling(problem, plan, unit_costs).orders() for unit_costs in (True, False))]
    return min(candidates, key=lambda orders: simulate(problem, orders).value_us)


@lru_cache(maxsize=64)
def building_block(p: int, out: int, back: int) -> Block:
    """The block of these slopes that holds the least memory, and of these the shortest.

    Where a leg ends and the next begins the microbatch may pause. Pauses of up to a period are tried: some are needed
    so that no device has two passes at a time.
    """
    blocks = [(sum(pauses), _block(p, out, back, pauses)) for pauses in product(range(PERIOD), repeat=3)]
    free_of_collisions = [(chunks_held(block), pause, k) for k, (pause, block) in enumerate(blocks) if block]
    return blocks[min(free_of_collisions)[2]][1]


def _block(p: int, out: int, back: int, pauses: tuple[int, ...]) -> Block:
    """The block with these pauses at the three turns; empty where two passes of a device collide."""
    first_back = (p - 1) * (out + back) + 1 + pauses[0]
    first_out = first_back + 1 + pauses[1]
    last_back = first_out + (p - 1) * (out + back) + 1 + pauses[2]
    devices = []
    for d in range(p):
        there, here = d, 2 * p - 1 - d
        starts = {
            ("F", there): out * d,
            ("F", here): first_back - back * d,
            ("B", here): first_out + out * d,
            ("B", there): last_back - back * d,
        }
        free = sorted(set(range(PERIOD)) - {start % PERIOD for start in starts.values()})
        if len(free) != 2:
            return ()
        devices.append(starts | _weights(starts["B", there], starts["B", here], there, here, free))
    return tuple(devices)


def _weights(b_there: int, b_here: int, there: int, here: int, free: list[int]) -> dict[tuple[str, int], int]:
    """Both W in the two slots of the period that are free, as soon as can be after their B."""
    ways = []
    for slot_there, slot_here in (free, reversed(free)):
        after = 1 + (slot_there - b_there - 1) % PERIOD, 1 + (slot_here - b_here - 1) % PERIOD
        ways.append((sum(after), {("W", there): b_there + after[0], ("W", here): b_here + after[1]}))
    return min(ways, key=lambda way: way[0])[1]


def chunks_held(block: Block) -> int:
    """The most chunks that a device holds at any time once the block repeats, from the start of F to the end of W."""
    most = 0
    for starts in block:
        lives = [(start, starts["W", stage] + 1) for (kind, stage), start in starts.items() if kind == "F"]
        for now, _ in lives:
            held = sum((now - begin) // PERIOD - (now - end) // PERIOD for begin, end in lives)
            most = max(most, held)
    return most


def _repeated(problem: Problem, block: Block) -> Orders:
    """The block once for each microbatch: the passes of a device in the order of their starts."""
    orders = []
    for starts in block:
        passes = [
            (start + PERIOD * i, Op(kind, stage, i))
            for (kind, stage), start in starts.items()
            for i in range(problem.microbatches)
        ]
        orders.append([op for _, op in sorted(passes)])
    return Orders.of_compute(orders)


class _DevicePlan:
    """The planned passes of one device, which of them are done, and the memory they leave."""

    def __init__(self, plan: list[Op], limit: int) -> None:
        self.plan = plan
        self.limit = limit
        self.place = {op: k for k, op in enumerate(plan)}
        self.done = [False] * len(plan)
        self.head = 0
        self.order: list[Op] = []
        self.next = {(op.kind, op.stage): 0 for op in plan}
        self.memory = 0
        self.free_at = 0.0

    @property
    def finished(self) -> bool:
        return self.head == len(self.plan)

    def forwards_done(self, microbatches: int) -> bool:
        return all(i == microbatches for (kind, _), i in self.next.items() if kind == "F")

    def skipped(self, op: Op) -> list[Op]:
        """The passes planned before this one that are still to run."""
        return [self.plan[k] for k in range(self.head, self.place[op]) if not self.done[k]]

    def run(self, op: Op, change: int, end: float) -> None:
        self.done[self.place[op]] = True
        self.order.append(op)
        self.next[op.kind, op.stage] += 1
        self.memory += change
        self.free_at = end
        while not self.finished and self.done[self.head]:
            self.head += 1


class _Filling:
    """Runs a plan in the order of time, and lets a device take a later pass where the planned one has to wait.

    A pass is only taken early when its input is there, and when all that is planned before it still has room. So
    what is left of the plan can always run, and the peak of the plan is kept.
    """

    def __init__(self, problem: Problem, plan: Orders, unit_costs: bool) -> None:
        self.problem = problem
        self.unit_costs = unit_costs
        self.effect = [{kind: device_effect(stage, kind) for kind in "FBW"} for stage in problem.stages]
        limits = peak_budgets(problem, plan)
        self.devices = [_DevicePlan(list(d.compute), limit) for d, limit in zip(plan.devices, limits, strict=True)]
        self.end: dict[Op, float] = {}

    def orders(self) -> Orders:
        """The order in which every device runs its passes."""
        wake = [(0.0, d) for d in range(len(self.devices))]
        while wake:
            now, d = heapq.heappop(wake)
            device = self.devices[d]
            if device.finished or now < device.free_at:
                continue
            op = self._choose(device, now)
            if op is None:
                continue
            end = now + self._duration(op)
            self.end[op] = end
            device.run(op, sum(self.effect[op.stage][op.kind]), end)
            for near, ready in self._woken(op, end):
                heapq.heappush(wake, (max(ready, self.devices[near].free_at), near))
        return Orders.of_compute(device.order for device in self.devices)

    def _duration(self, op: Op) -> float:
        return 1.0 if self.unit_costs else self.problem.stages[op.stage].duration_us(op.kind)

    def _delay(self, boundary: int, kind: str) -> float:
        delays = self.problem.forward_delay_us if kind == "F" else self.problem.backward_delay_us
        return 0.0 if self.unit_costs else delays[boundary]

    def _woken(self, op: Op, end: float) -> list[tuple[int, float]]:
        """The devices that may go on after an op, and when: its own, and the one that waits for the result."""
        stages, s = self.problem.stages, op.stage
        woken = [(stages[s].device, end)]
        if op.kind == "F" and s + 1 < len(stages):
            woken.append((stages[s + 1].device, end + self._delay(s, "F")))
        if op.kind == "B" and s > 0:
            woken.append((stages[s - 1].device, end + self._delay(s - 1, "B")))
        return woken

    def _choose(self, device: _DevicePlan, now: float) -> Op | None:
        """The pass to run now: by plan, once the forwards are done B before W; None where the device must wait."""
        cool_down = device.forwards_done(self.problem.microbatches)
        ready = [
            (cool_down and op.kind == "W", device.place[op], op)
            for (kind, stage), i in device.next.items()
            if i < self.problem.microbatches and self._is_ready(op := Op(kind, stage, i), now)
        ]
        return next((op for _, place, op in sorted(ready) if place == device.head or self._fits(device, op)), None)

    def _is_ready(self, op: Op, now: float) -> bool:
        """Whether the input of an op has arrived."""
        kind, s, i = op
        if kind == "W":
            return Op("B", s, i) in self.end
        if kind == "F":
            return s == 0 or self._arrived(Op("F", s - 1, i), self._delay(s - 1, "F"), now)
        last = s + 1 == len(self.problem.stages)
        return Op("F", s, i) in self.end and (last or self._arrived(Op("B", s + 1, i), self._delay(s, "B"), now))

    def _arrived(self, source: Op, delay: float, now: float) -> bool:
        return source in self.end and self.end[source] + delay <= now

    def _fits(self, device: _DevicePlan, early: Op) -> bool:
        """Whether an op has room now, and after it everything that is planned before it."""
        memory = device.memory
        for op in (early, *device.skipped(early)):
            effect = self.effect[op.stage][op.kind]
            if memory + max(effect.at_start, sum(effect)) > device.limit:
                return False
            memory += sum(effect)
        return True
