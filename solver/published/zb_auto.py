"""Zero Bubble's automatic schedule: a list heuristic with three switches, eight runs (Zero Bubble, section 3).

Every run builds the orders of all stages together, op by op:

1. Warm-up: each stage takes as many forwards as its memory and the stages before it allow while its first B is on
   its way. Switch `even`: not more than keep the numbers of forwards evenly spread over the stages.
2. Then forwards and B alternate, round by round. Switch `by_time`: the op that can start first goes first, B before F.
3. A W goes where the device would idle at least as long as the W takes, where memory has no room for the next op,
   and where a smaller idle gap would make this stage's bubble the largest of all. Switch `fill`: also where the device
   would idle half as long as the W takes.
4. The W that are left go last.

Stage s always stays ahead of stage s + 1 in forwards. Costs, delays and budgets are each stage's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import floor

from optpipe.errors import MethodError
from optpipe.memory import device_effect
from optpipe.orders import Op, Orders
from optpipe.problem import Problem, Stage
from optpipe.simulate import simulate
from solver.published.placement import require_one_stage_a_device

NO_LIMIT = 2**62


def zb_auto(problem: Problem) -> Orders:
    """The best of the eight runs. Raises MethodError on placement, or where a single microbatch exceeds a budget."""
    require_one_stage_a_device(problem, "zb-auto")
    _check_one_microbatch_fits(problem)
    built = [_Run(problem, switches).build() for switches in Switches.all()]
    orders = [Orders.of_compute(by_stage[s] for (s,) in problem.stages_of) for by_stage in built if by_stage]
    if not orders:
        raise MethodError("zb-auto found no room for the next op in any of its runs. Maybe use an exact method.")
    return min(orders, key=lambda o: simulate(problem, o).value_us)


def _check_one_microbatch_fits(problem: Problem) -> None:
    for s, stage in enumerate(problem.stages):
        budget = problem.devices[stage.device].memory_bytes
        needed = _room(stage)["F"]
        if budget is not None and needed > budget:
            raise MethodError(
                f"zb-auto needs {needed} bytes for one microbatch on stages[{s}], but device {stage.device} has "
                f"{budget}: {needed - budget} too few. Maybe offload, with an exact method."
            )


def _room(stage: Stage) -> dict[str, int]:
    """Bytes that must be free when an op starts, so that it and the rest of its microbatch's ops can run."""
    work, grows = stage.workspace_bytes, stage.backward_weight_bytes - stage.activation_bytes
    backward = max(work.B, grows, grows + work.W)
    return {"F": stage.activation_bytes + max(work.F, backward), "B": backward, "W": work.W}


@dataclass(frozen=True)
class Switches:
    """The three choices of a run."""

    even: bool
    by_time: bool
    fill: bool

    @classmethod
    def all(cls) -> Iterator[Switches]:
        """All eight combinations."""
        return (cls(*bits) for bits in product((False, True), repeat=3))


_PENDING = {"F": 0, "B": 1, "W": -1}
"""What an op adds to the number of W that are left."""


class _Stage:
    """What one stage has done so far in a run; `pending` is how many W are left."""

    def __init__(self, problem: Problem, number: int) -> None:
        stage = problem.stages[number]
        budget = problem.devices[stage.device].memory_bytes
        self.duration = {kind: stage.duration_us(kind) for kind in "FBW"}
        self.change = {kind: sum(device_effect(stage, kind)) for kind in "FBW"}
        self.room = _room(stage)
        self.budget = NO_LIMIT if budget is None else budget
        self.number = number
        self.order: list[Op] = []
        self.count = {"F": 0, "B": 0, "W": 0}
        self.end: dict[str, list[float]] = {"F": [], "B": [], "W": []}
        self.pending = 0
        self.now = 0.0
        self.memory = 0
        self.idle = 0.0

    def fits(self, kind: str, memory: int | None = None) -> bool:
        """Whether an op has room, at the present level or at `memory`."""
        return (self.memory if memory is None else memory) + self.room[kind] <= self.budget

    def fits_after_weights(self, kind: str) -> bool:
        """Whether an op has room once all pending W are done."""
        return self.fits(kind, self.memory + self.pending * self.change["W"])

    def run(self, kind: str, start: float) -> None:
        if self.order:
            self.idle += start - self.now
        self.now = start + self.duration[kind]
        self.memory += self.change[kind]
        self.order.append(Op(kind, self.number, self.count[kind]))
        self.count[kind] += 1
        self.pending += _PENDING[kind]
        self.end[kind].append(self.now)


class _Run:
    """One run of the heuristic under given switches."""

    def __init__(self, problem: Problem, switches: Switches) -> None:
        self.problem = problem
        self.switches = switches
        self.microbatches = problem.microbatches
        self.stages = [_Stage(problem, s) for s in range(len(problem.stages))]
        self.last = len(self.stages) - 1
        self.backwards_left = len(self.stages) * self.microbatches

    def build(self) -> list[list[Op]] | None:
        """The orders by stage; None where this run found no op with room for it."""
        self._warm_up()
        finished = self._by_time() if self.switches.by_time else self._by_rounds()
        if not finished:
            return None
        for stage in self.stages:
            while stage.pending:
                stage.run("W", stage.now)
        return [stage.order for stage in self.stages]

    def _ready(self, s: int, kind: str) -> float:
        """When the next F or B of stage `s` has its input."""
        i = self.stages[s].count[kind]
        if kind == "F":
            return self.stages[s - 1].end["F"][i] + self.problem.forward_delay_us[s - 1] if s else 0.0
        if s == self.last:
            return self.stages[s].end["F"][i]
        return self.stages[s + 1].end["B"][i] + self.problem.backward_delay_us[s]

    def _put(self, s: int, kind: str) -> None:
        self.stages[s].run(kind, max(self.stages[s].now, self._ready(s, kind)))
        self.backwards_left -= kind == "B"

    def _warm_up(self) -> None:
        """Forwards up to the first B of every stage, and these first B."""
        for s in range(len(self.stages)):
            self._put(s, "F")
        for s in reversed(range(len(self.stages))):
            while s < self.last and self._wants_forward(s) and self._lead(s):
                pass
            if self.stages[s].fits("B"):
                self._put(s, "B")
            else:
                return

    def _wants_forward(self, s: int) -> bool:
        """Whether stage `s` takes one more forward before its first B."""
        stage = self.stages[s]
        if stage.count["F"] >= self.microbatches:
            return False
        if self.switches.even and stage.count["F"] >= self._even_share(s):
            return False
        return stage.now + stage.duration["F"] <= self._ready(s, "B")

    def _even_share(self, s: int) -> int:
        """Forwards of stage `s` before its first B if the first stage fills its memory and the last takes one."""
        first = self.stages[0]
        room = min(first.budget // max(first.change["F"], 1), self.microbatches)
        return max(self.last + 1 - s, floor(room - s * (room - 1) / self.last))

    def _lead(self, s: int) -> bool:
        """One more forward on stage `s`, and on the stages before it as many as keep each ahead of the next.

        Does nothing and returns False where one of them has no room for that.
        """
        wanted = [min(self.microbatches, self.stages[s].count["F"] + 1 + s - j) for j in range(s + 1)]
        more = [max(0, wanted[j] - self.stages[j].count["F"]) for j in range(s + 1)]
        for stage, extra in zip(self.stages, more, strict=False):
            if extra and not stage.fits("F", stage.memory + (extra - 1) * stage.change["F"]):
                return False
        for j, extra in enumerate(more):
            for _ in range(extra):
                self._put(j, "F")
        return True

    def _step(self, s: int, kind: str) -> None:
        """An F or B of stage `s`, with the W that should go before it."""
        stage = self.stages[s]
        ready = self._ready(s, kind)
        while stage.pending and not stage.fits(kind):
            stage.run("W", stage.now)
        while stage.pending and ready - stage.now >= stage.duration["W"]:
            stage.run("W", stage.now)
        if stage.pending and self._fills_gap(stage, ready - stage.now):
            stage.run("W", stage.now)
        self._put(s, kind)

    def _fills_gap(self, stage: _Stage, gap: float) -> bool:
        """Whether a W goes into an idle gap shorter than itself."""
        if gap <= 0:
            return False
        half_fills = self.switches.fill and 2 * gap >= stage.duration["W"]
        return half_fills or stage.idle + gap > max(other.idle for other in self.stages)

    def _can(self, s: int, kind: str) -> bool:
        """Whether the next F or B of stage `s` has its input planned and room."""
        stage = self.stages[s]
        i = stage.count[kind]
        if i >= self.microbatches or not stage.fits_after_weights(kind):
            return False
        if kind == "F":
            return s == 0 or self.stages[s - 1].count["F"] > i
        return stage.count["F"] > i and (s == self.last or self.stages[s + 1].count["B"] > i)

    def _by_rounds(self) -> bool:
        """One F on every stage, first to last, then one B on every stage, last to first. False when stuck."""
        while self.backwards_left:
            moved = False
            passes = [(s, "F") for s in range(self.last + 1)] + [(s, "B") for s in reversed(range(self.last + 1))]
            for s, kind in passes:
                if self._can(s, kind):
                    self._step(s, kind)
                    moved = True
            if not moved:
                return False
        return True

    def _by_time(self) -> bool:
        """Always the op that can start first; at equal times B before F. False when stuck."""
        choices = [self._first_choice(s) for s in range(self.last + 1)]
        while self.backwards_left:
            *_, s, kind = min(choices)
            if not kind:
                return False
            self._step(s, kind)
            fed = s + 1 if kind == "F" else s - 1
            for changed in (s, fed) if 0 <= fed <= self.last else (s,):
                choices[changed] = self._first_choice(changed)
        return True

    def _first_choice(self, s: int) -> tuple[float, int, int, int, str]:
        """The F or B that stage `s` could start first, as (start, kind's rank, place in that rank, stage, kind)."""
        now = self.stages[s].now
        options = []
        if self._can(s, "B"):
            options.append((max(now, self._ready(s, "B")), 0, -s, s, "B"))
        if self._can(s, "F"):
            options.append((max(now, self._ready(s, "F")), 1, s, s, "F"))
        return min(options, default=(float("inf"), 2, s, s, ""))
