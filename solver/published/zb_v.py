"""ZB-V: two chunks a device along a V, zero bubble at the memory of 1F1B (Zero Bubble, arXiv 2401.10241, section 6).

Device d holds stage d on the way out and stage 2p - 1 - d on the way back. Forwards go out and come back, and so do
backwards: each starts at device 0, turns at device p - 1 and ends at device 0. A run builds all orders together:

1. The first microbatch goes out and back. A device that waits for it to come back takes more forwards, as long as
   all the microbatches on the devices before it can still come back.
2. Each device takes forwards of both stages in turn, until it is as far as the device before it.
3. Rounds: one backward on every device, then one forward. What comes back goes before what goes out.
4. A W goes where the device would idle for at least as long, where memory has no room for the next op, and where a
   smaller gap would make this device's span the largest. Switches `in_forward` and `in_backward` say before which
   ops that last rule holds; before backwards on their way back it always does. The W that are left go last.

A run is repeated with the idle times of its devices granted to the next, as long as that makes the largest smaller.
Costs, delays and budgets are each stage's and device's own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import product

from optpipe.errors import MethodError
from optpipe.memory import device_effect
from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.published.placement import require_v_shape


def zb_v(problem: Problem) -> Orders:
    """The best of all runs. Raises MethodError on placement, or where a budget is too small for every run."""
    require_v_shape(problem, "zb-v")
    runs = [run for switches in Switches.all() for run in _repeated(problem, switches)]
    finished = [Orders.of_compute(device.order for device in run.devices) for run in runs if not run.stuck]
    if not finished:
        raise MethodError(runs[0].stuck)
    return min(finished, key=lambda orders: simulate(problem, orders).value_us)


@dataclass(frozen=True)
class Switches:
    """Before which ops a W may fill a gap that is shorter than itself."""

    in_forward: bool
    in_backward: bool

    @classmethod
    def all(cls) -> list[Switches]:
        """All four combinations."""
        return [cls(*bits) for bits in product((True, False), repeat=2)]


def _repeated(problem: Problem, switches: Switches) -> list[_Run]:
    """Runs, each with the spans of the one before granted, until that helps no more."""
    runs = [_Run(problem, switches, []).build()]
    while not runs[-1].stuck:
        again = _Run(problem, switches, runs[-1].spans).build()
        if again.stuck or max(again.spans) >= max(runs[-1].spans):
            break
        runs.append(again)
    return runs


class _Device:
    """What one device has done so far in a run. `out` and `back` are its stages."""

    def __init__(self, problem: Problem, number: int) -> None:
        self.number = number
        self.out, self.back = number, len(problem.stages) - 1 - number
        self.budget = problem.devices[number].memory_bytes
        self.work = problem.work_us[number]
        self.order: list[Op] = []
        self.pending: deque[Op] = deque()
        self.now = 0.0
        self.idle = 0.0
        self.memory = 0

    @property
    def span(self) -> float:
        """The time from begin to end, were there no more idle time."""
        return self.work + self.idle

    def legs(self, kind: str) -> tuple[int, int]:
        """The stages on which an F or B passes this device on its way out and on its way back."""
        return (self.out, self.back) if kind == "F" else (self.back, self.out)


class _Run:
    """One run under given switches; `granted` are the spans of an earlier run, if any."""

    def __init__(self, problem: Problem, switches: Switches, granted: list[float]) -> None:
        self.problem = problem
        self.switches = switches
        self.granted = granted
        self.devices = [_Device(problem, d) for d in range(len(problem.devices))]
        self.end: dict[str, list[list[float]]] = {kind: [[] for _ in problem.stages] for kind in "FBW"}
        self.effect = [{kind: device_effect(stage, kind) for kind in "FBW"} for stage in problem.stages]
        self.stuck = ""

    @property
    def spans(self) -> list[float]:
        """The span of every device."""
        return [device.span for device in self.devices]

    def build(self) -> _Run:
        """Fill the orders of all devices, or say in `stuck` why that fails."""
        self._first_microbatch()
        self._forwards_in_turn()
        while min(map(len, self.end["B"])) < self.problem.microbatches:
            if not self._round():
                self.stuck = self._shortage()
                return self
        for device in self.devices:
            while device.pending:
                self._put_weight(device)
        return self

    def _ready(self, kind: str, stage: int) -> float | None:
        """When the next F or B of a stage has its input; None where that is not planned, or none is left."""
        i, end = len(self.end[kind][stage]), self.end
        if i == self.problem.microbatches:
            return None
        last = len(self.problem.stages) - 1
        if kind == "F" and stage == 0:
            return 0.0
        if kind == "F":
            source, delay = end["F"][stage - 1], self.problem.forward_delay_us[stage - 1]
        elif stage == last:
            source, delay = end["F"][last], 0
        else:
            source, delay = end["B"][stage + 1], self.problem.backward_delay_us[stage]
        return source[i] + delay if i < len(source) else None

    def _rise(self, kind: str, stage: int) -> int:
        """By how much memory is higher while an op runs or after it, whichever is more."""
        effect = self.effect[stage][kind]
        return max(effect.at_start, sum(effect))

    def _fits(self, device: _Device, kind: str, stage: int, more: int = 0) -> bool:
        """Whether an op has room now, and leaves `more` bytes."""
        return device.budget is None or device.memory + self._rise(kind, stage) + more <= device.budget

    def _can(self, device: _Device, kind: str, stage: int) -> bool:
        """Whether the next op of a stage is planned up to it, and has room once all pending W are done."""
        return self._ready(kind, stage) is not None and self._fits(device, kind, stage, self._pending_change(device))

    def _pending_change(self, device: _Device) -> int:
        """What all pending W change in memory: a negative number of bytes, or 0."""
        return sum(sum(self.effect[op.stage]["W"]) for op in device.pending)

    def _put(self, device: _Device, kind: str, stage: int) -> None:
        """The next op of a stage, as soon as it can start."""
        start = max(device.now, self._ready(kind, stage) or 0.0)
        if device.order:
            device.idle += start - device.now
        op = Op(kind, stage, len(self.end[kind][stage]))
        self._run(device, op, start)
        if kind == "B":
            device.pending.append(op._replace(kind="W"))

    def _put_weight(self, device: _Device) -> None:
        self._run(device, device.pending.popleft(), device.now)

    def _run(self, device: _Device, op: Op, start: float) -> None:
        device.now = start + self.problem.stages[op.stage].duration_us(op.kind)
        device.memory += sum(self.effect[op.stage][op.kind])
        device.order.append(op)
        self.end[op.kind][op.stage].append(device.now)

    def _first_microbatch(self) -> None:
        for device in self.devices:
            if self._can(device, "F", device.out):
                self._put(device, "F", device.out)
        for device in reversed(self.devices):
            while self._waits(device) and self._lead(device.number):
                pass
            if self._can(device, "F", device.back):
                self._put(device, "F", device.back)

    def _waits(self, device: _Device) -> bool:
        """Whether one more forward fits in time and memory before the first microbatch comes back to a device.

        Each device before may start the way back once more for this, and then must hold both stages of it.
        """
        back = self._ready("F", device.back)
        if device.number == len(self.devices) - 1 or back is None:
            return False
        stages = self.problem.stages
        pair = stages[device.out].activation_bytes + stages[device.back].activation_bytes
        reserve = (device.number + 1) * pair - stages[device.out].activation_bytes
        return device.now + stages[device.out].forward_us <= back and self._fits(device, "F", device.out, reserve)

    def _lead(self, number: int) -> bool:
        """One more forward on the way out on every device up to this one; False where that cannot be."""
        for device in self.devices[: number + 1]:
            if not self._can(device, "F", device.out) or not self._fits(device, "F", device.out):
                return False
            self._put(device, "F", device.out)
        return True

    def _forwards_in_turn(self) -> None:
        back = False
        for d in range(1, len(self.devices)):
            tries = 0
            while self._behind(d) and tries < 2:
                moved = False
                for device in reversed(self.devices[d:]):
                    stage = device.back if back else device.out
                    if self._can(device, "F", stage) and self._fits(device, "F", stage):
                        self._put(device, "F", stage)
                        moved = True
                back = not back
                tries = 0 if moved else tries + 1

    def _behind(self, d: int) -> bool:
        """Whether device d has fewer forwards than the one before it."""
        forwards = self.end["F"]
        done = [(len(forwards[device.out]), len(forwards[device.back])) for device in self.devices[d - 1 : d + 1]]
        return sum(done[1]) < sum(done[0]) or done[1][1] <= done[0][1] < self.problem.microbatches

    def _round(self) -> bool:
        """One backward, then one forward on every device that has one; False where no device has."""
        chosen = [(device, self._next(device, "B")) for device in self.devices]
        coming_back = [(device, stage) for device, stage in reversed(chosen) if stage == device.out]
        going_out = [(device, stage) for device, stage in chosen if stage != device.out]
        moved = [self._step(device, "B", stage) for device, stage in coming_back + going_out]
        moved += [self._step(device, "F", self._next(device, "F")) for device in self.devices]
        return any(moved)

    def _next(self, device: _Device, kind: str) -> int:
        """The stage of the next F or B: on the way back where its input is planned, else on the way out."""
        out, back = device.legs(kind)
        return out if self._ready(kind, back) is None else back

    def _step(self, device: _Device, kind: str, stage: int) -> bool:
        """An F or B of a device, with the W that go before it; False where it has no input or no room."""
        if not self._can(device, kind, stage):
            return False
        while device.pending and not self._fits(device, kind, stage):
            self._put_weight(device)
        ready = self._ready(kind, stage) or 0.0
        while device.pending and ready - device.now >= self._next_weight_us(device):
            self._put_weight(device)
        if device.pending and ready - device.now > self._slack(device) and self._may_fill(device, kind, stage):
            self._put_weight(device)
        self._put(device, kind, stage)
        return True

    def _next_weight_us(self, device: _Device) -> float:
        return self.problem.stages[device.pending[0].stage].backward_weight_us

    def _slack(self, device: _Device) -> float:
        """How long a device may idle before its span is the largest, or uses up what an earlier run grants."""
        granted = max(self.granted) - self.granted[device.number] - device.idle if self.granted else 0.0
        return max(max(self.spans) - device.span, granted, 0.0)

    def _may_fill(self, device: _Device, kind: str, stage: int) -> bool:
        if kind == "F":
            return self.switches.in_forward
        return self.switches.in_backward or stage == device.out

    def _shortage(self) -> str:
        """Which device lacks the least memory for its next op, and how much."""
        lacks = [
            (least + self._rise(kind, stage) - device.budget, device.number, Op(kind, stage, i))
            for device in self.devices
            for least in [device.memory + self._pending_change(device)]
            for kind in "FB"
            for stage in [self._next(device, kind)]
            for i in [len(self.end[kind][stage])]
            if device.budget is not None and self._ready(kind, stage) is not None
        ]
        missing, number, op = min(lacks)
        return (
            f"zb-v comes to a halt before {op}, for which device {number} has {missing} bytes too few with its budget "
            f"of {self.devices[number].budget}. Maybe offload, with an exact method."
        )
