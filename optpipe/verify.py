"""The judge: every rule of the contract checked from the document alone.

It shares no code with the simulator's kernel or with any solver, so that a mistake there cannot hide here. Times
are compared with a tolerance of one part in a billion of the schedule's length, which is what sums of decimal
fractions need; bytes are compared exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from optpipe.any_timing import any_timing_peak_bytes
from optpipe.errors import DeadlockError
from optpipe.orders import Op
from optpipe.problem import Stage
from optpipe.schedule import DevicePlan, Schedule, ScheduledOp

RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Violation:
    """One broken rule: its short name, where (op, device or field), when, and a sentence."""

    rule: str
    where: str
    time_us: float | None
    detail: str

    def __str__(self) -> str:
        at = "" if self.time_us is None else f" at {self.time_us:g} us"
        return f"{self.where}{at}: {self.detail} [{self.rule}]"


@dataclass(frozen=True)
class DeviceFacts:
    """What the verifier itself found for one device."""

    peak_bytes: int
    peak_bytes_any_timing: int | None
    busy_us: float
    bubble: float
    span_us: float


@dataclass(frozen=True)
class Verdict:
    """All violations (none: the schedule is valid) with the recomputed figures."""

    violations: Sequence[Violation]
    value_us: float
    makespan_us: float
    device_span_us: float
    host_peak_bytes: int
    devices: Sequence[DeviceFacts] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.violations


def verify(schedule: Schedule) -> Verdict:
    """Judge a schedule: every rule of the model, the budgets at any times, every claimed figure."""
    return _Judge(schedule).verdict()


class _Judge:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.problem = schedule.problem
        self.violations: list[Violation] = []
        self.at: dict[Op, ScheduledOp] = {}
        self.home: dict[Op, int] = {}
        for d, device in enumerate(schedule.devices):
            for op in _all_ops(device):
                if op.key in self.at:
                    self._broken("once", str(op.key), op.start_us, "is in the schedule more than once.")
                self.at[op.key], self.home[op.key] = op, d
        times = [t for op in self.at.values() for t in (op.start_us, op.end_us)]
        self.length_us = max(times) - min(times) if times else 0.0
        self.tolerance = RELATIVE_TOLERANCE * max([self.length_us, *map(abs, times)], default=0.0)

    def verdict(self) -> Verdict:
        self._check_presence()
        self._check_placement_and_duration()
        self._check_streams()
        self._check_dependencies()
        self._check_waits()
        self._check_channels()
        spans = [_span(device) for device in self.schedule.devices]
        value = self.length_us if self.problem.objective == "makespan" else max(spans)
        facts = [self._device_facts(d, value, spans[d]) for d in range(len(spans))]
        host = self._check_host()
        self._check_claims(value, facts)
        return Verdict(self.violations, value, self.length_us, max(spans), host, facts)

    def _broken(self, rule: str, where: str, time_us: float | None, detail: str) -> None:
        self.violations.append(Violation(rule, where, time_us, detail))

    def _check_presence(self) -> None:
        """Every microbatch passes every stage forward and backward, and what leaves comes back."""
        for s in range(len(self.problem.stages)):
            for i in range(self.problem.microbatches):
                here = {kind for kind in _ALL_KINDS if Op(kind, s, i) in self.at}
                if here - {"O", "R"} not in ({"F", "B", "W"}, {"F", "BW"}):
                    found = ", ".join(sorted(here - {"O", "R"})) or "none"
                    self._broken("presence", f"{s}.{i}", None, f"needs F, B, W or F, BW; {found} found.")
                if len(here & {"O", "R"}) == 1:
                    self._broken("presence", f"{s}.{i}", None, "has only one of O and R.")

    def _check_placement_and_duration(self) -> None:
        for op, entry in self.at.items():
            stage = self.problem.stages[op.stage]
            if self.home[op] != stage.device:
                self._broken(
                    "placement", str(op), entry.start_us, f"is on device {self.home[op]}, not on {stage.device}."
                )
            expected = _duration_us(stage, op.kind)
            if expected is None:
                self._broken("offload", str(op), entry.start_us, "moves although this stage never offloads.")
            elif abs(entry.end_us - entry.start_us - expected) > self.tolerance:
                took = entry.end_us - entry.start_us
                self._broken("duration", str(op), entry.start_us, f"takes {took:g} us instead of {expected:g} us.")

    def _check_streams(self) -> None:
        """One op at a time on a stream, in the order of its list; microbatches in order within op type and stage."""
        for device in self.schedule.devices:
            for _, ops in device.streams():
                last_microbatch: dict[tuple[str, int], int] = defaultdict(lambda: -1)
                for before, op in zip([None, *ops], ops, strict=False):
                    if before and op.start_us < before.end_us - self.tolerance:
                        self._broken(
                            "overlap",
                            str(op.key),
                            op.start_us,
                            f"starts before {before.key} on its stream ends ({before.end_us:g} us).",
                        )
                    if op.microbatch < last_microbatch[op.op, op.stage]:
                        earlier = Op(op.op, op.stage, last_microbatch[op.op, op.stage])
                        self._broken("microbatch-order", str(op.key), op.start_us, f"comes after {earlier}.")
                    last_microbatch[op.op, op.stage] = op.microbatch

    def _check_dependencies(self) -> None:
        for op, entry in self.at.items():
            for before, delay_us in self._dependencies(op):
                if before in self.at and entry.start_us < self.at[before].end_us + delay_us - self.tolerance:
                    ready = self.at[before].end_us + delay_us
                    self._broken(
                        "dependency", str(op), entry.start_us, f"starts before {before} lets it ({ready:g} us)."
                    )

    def _dependencies(self, op: Op) -> Iterator[tuple[Op, float]]:
        """What an op waits for by the rules of the model, with the delay."""
        kind, s, i = op
        if kind == "F" and s > 0:
            yield Op("F", s - 1, i), self.problem.forward_delay_us[s - 1]
        if kind in ("B", "BW"):
            yield Op("F", s, i), 0.0
            yield Op("R", s, i), 0.0
            if s + 1 < len(self.problem.stages):
                after = Op("B", s + 1, i)
                yield after if after in self.at else Op("BW", s + 1, i), self.problem.backward_delay_us[s]
        if kind in ("W", "O", "R"):
            yield Op({"W": "B", "O": "F", "R": "O"}[kind], s, i), 0.0

    def _check_waits(self) -> None:
        for op, entry in self.at.items():
            for name in entry.waits:
                before = Op.parse(name)
                if before not in self.at:
                    self._broken("wait", str(op), entry.start_us, f"waits for {name}, which is not in the schedule.")
                elif self.home[before] != self.home[op] or before.stream == op.stream:
                    self._broken(
                        "wait", str(op), entry.start_us, f"waits for {name}, not on another stream of its device."
                    )
                elif entry.start_us < self.at[before].end_us - self.tolerance:
                    end = self.at[before].end_us
                    self._broken(
                        "wait", str(op), entry.start_us, f"starts before {name}, which it waits for, ends ({end:g} us)."
                    )

    def _check_channels(self) -> None:
        """One transfer at a time on a channel, also where devices or directions share it."""
        kinds = ("O", "R") if self.problem.copy_channels.duplex else ("OR",)
        for group in self.problem.channel_groups:
            for letters in kinds:
                moves = [op for op, home in self.home.items() if home in group and op.kind in letters]
                moves.sort(key=lambda op: (self.at[op].start_us, self.at[op].end_us))
                for before, op in pairwise(moves):
                    if self.at[op].start_us < self.at[before].end_us - self.tolerance:
                        self._broken(
                            "channel", str(op), self.at[op].start_us, f"overlaps {before} on a shared channel."
                        )

    def _device_facts(self, d: int, value_us: float, span_us: float) -> DeviceFacts:
        device = self.schedule.devices[d]
        budget = self.problem.devices[d].memory_bytes
        peak, time_us = _peak(self._memory_events(device))
        if budget is not None and peak > budget:
            self._broken("budget", f"device {d}", time_us, f"holds {peak} bytes of {budget}.")
        anyhow = self._any_timing(d, device)
        if budget is not None and anyhow is not None and anyhow > budget:
            self._broken("budget-any-timing", f"device {d}", None, f"can reach {anyhow} bytes of {budget}.")
        busy = sum(op.end_us - op.start_us for op in device.compute)
        return DeviceFacts(peak, anyhow, busy, 1 - busy / value_us if value_us else 0.0, span_us)

    def _any_timing(self, d: int, device: DevicePlan) -> int | None:
        waits = {op.key: [Op.parse(name) for name in op.waits] for op in _all_ops(device)}
        compute, offload, reload = ([op.key for op in ops] for _, ops in device.streams())
        try:
            return any_timing_peak_bytes(self.problem, (compute, offload, reload), waits)
        except DeadlockError as error:
            self._broken("deadlock", f"device {d}", None, str(error))
            return None

    def _memory_events(self, device: DevicePlan) -> Iterator[tuple[float, int]]:
        """Changes of a device's memory as (time, bytes)."""
        for op in _all_ops(device):
            stage = self.problem.stages[op.stage]
            moved = stage.offload.bytes if stage.offload else 0
            freed = {
                "F": -stage.activation_bytes,
                "B": stage.activation_bytes - stage.backward_weight_bytes,
                "W": stage.backward_weight_bytes,
                "BW": stage.activation_bytes,
                "O": moved,
                "R": -moved,
            }[op.op]
            work = getattr(stage.workspace_bytes, op.op, 0)
            if op.op in "FR":
                yield op.start_us, work - freed
                yield op.end_us, -work
            else:
                yield op.start_us, work
                yield op.end_us, -work - freed

    def _check_host(self) -> int:
        """A host buffer is held from the start of O to the end of R."""

        def events() -> Iterator[tuple[float, int]]:
            for op, entry in self.at.items():
                offload = self.problem.stages[op.stage].offload
                if op.kind == "O" and offload:
                    yield entry.start_us, offload.bytes
                elif op.kind == "R" and offload:
                    yield entry.end_us, -offload.bytes

        peak, time_us = _peak(events())
        limit = self.problem.host_memory_bytes
        if limit is not None and peak > limit:
            self._broken("host-budget", "host", time_us, f"holds {peak} bytes of {limit}.")
        return peak

    def _check_claims(self, value_us: float, facts: Sequence[DeviceFacts]) -> None:
        """Every figure in the document is what the verifier computes."""
        claimed = self.schedule
        if claimed.objective != self.problem.objective:
            self._broken("claim", "objective", None, f"is {claimed.objective}, the problem's {self.problem.objective}.")
        self._claim("value_us", claimed.value_us, value_us)
        if claimed.bound_us > value_us + self.tolerance:
            self._broken("claim", "bound_us", None, f"is {claimed.bound_us:g}, above the value {value_us:g}.")
        gap = (claimed.value_us - claimed.bound_us) / claimed.value_us if claimed.value_us else 0.0
        self._claim("gap", claimed.gap, gap, RELATIVE_TOLERANCE)
        if claimed.status == "optimal" and value_us - claimed.bound_us > self.tolerance:
            self._broken(
                "claim", "status", None, f"is optimal, but value {value_us:g} exceeds the bound {claimed.bound_us:g}."
            )
        for d, (device, fact) in enumerate(zip(claimed.devices, facts, strict=True)):
            where = f"devices[{d}]"
            self._claim(f"{where}.peak_bytes", device.peak_bytes, fact.peak_bytes, 0)
            if fact.peak_bytes_any_timing is not None:
                self._claim(
                    f"{where}.peak_bytes_any_timing", device.peak_bytes_any_timing, fact.peak_bytes_any_timing, 0
                )
            self._claim(f"{where}.busy_us", device.busy_us, fact.busy_us)
            self._claim(f"{where}.bubble", device.bubble, fact.bubble, RELATIVE_TOLERANCE)

    def _claim(self, where: str, claimed: float, found: float, tolerance: float | None = None) -> None:
        if abs(claimed - found) > (self.tolerance if tolerance is None else tolerance):
            self._broken("claim", where, None, f"is {claimed!r}, but {found!r} is found.")


_ALL_KINDS = ("F", "B", "W", "BW", "O", "R")


def _all_ops(device: DevicePlan) -> Iterator[ScheduledOp]:
    for _, ops in device.streams():
        yield from ops


def _duration_us(stage: Stage, kind: str) -> float | None:
    """What the problem says an op takes; None for a transfer of a stage that never offloads."""
    durations = {
        "F": stage.forward_us,
        "B": stage.backward_input_us,
        "W": stage.backward_weight_us,
        "BW": stage.backward_input_us + stage.backward_weight_us,
        "O": stage.offload.offload_us if stage.offload else None,
        "R": stage.offload.reload_us if stage.offload else None,
    }
    return durations[kind]


def _span(device: DevicePlan) -> float:
    ops = list(_all_ops(device))
    return max(op.end_us for op in ops) - min(op.start_us for op in ops) if ops else 0.0


def _peak(events: Iterable[tuple[float, int]]) -> tuple[int, float]:
    """The highest level that lasts, and when it is first reached; all changes of one instant count together."""
    level = peak = 0
    time_of_peak = 0.0
    for time, changes in groupby(sorted(events), key=lambda event: event[0]):
        level += sum(change for _, change in changes)
        if level > peak:
            peak, time_of_peak = level, time
    return peak, time_of_peak
