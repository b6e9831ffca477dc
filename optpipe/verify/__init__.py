"""Independent verifier: checks every rule of the model from the schedule document alone.

It shares no code with the simulator's kernel or any solver, so a bug there cannot hide here. Times are compared with a
tolerance of one part in a billion of the schedule's length, as sums of decimal fractions require; to keep many such
errors from adding up, the value is also compared with that of exact times. Bytes are compared exactly.

Cycles need a check of their own. An op of positive length ends after it starts, so times that keep every rule exclude a
cycle through it. But zero-length ops at one instant can wait for one another: the times keep every rule, and still no
executor could start any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import DeadlockError
from optpipe.kinds import KINDS, STREAMS
from optpipe.ops import WaitArray
from optpipe.schedule import Schedule
from optpipe.stage import Stage
from optpipe.units import budget_text, difference_text, time_text
from optpipe.verify.columns import RELATIVE_TOLERANCE, Violation, among, codes_of, leaves, offload_of, span
from optpipe.verify.order import Causes, OrderedOps
from optpipe.worst_case_memory import (
    UnitSort,
    memory_changes,
    mode_names,
    pass_changes,
    unit_sizes,
    worst_case_peak_bytes,
)

__all__ = ["Causes", "DeviceFacts", "Verdict", "Violation", "find_causes", "verify"]

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DeviceFacts:
    """Figures of one device as the verifier computes them; no worst-case peak if the device deadlocks."""

    peak_bytes: int
    peak_bytes_any_timing: int | None
    busy_us: float
    bubble: float
    span_us: float


@dataclass(frozen=True)
class Verdict:
    """All violations (none for a valid schedule) with the recomputed figures."""

    violations: Sequence[Violation]
    value_us: float
    makespan_us: float
    device_span_us: float
    host_peak_bytes: int
    devices: Sequence[DeviceFacts] = field(default=())

    @property
    def ok(self) -> bool:
        """True if no rule is broken."""
        return not self.violations


def verify(schedule: Schedule) -> Verdict:
    """Check every rule of the model, the budgets at planned and worst-case times, and every claimed figure."""
    return _Verifier(schedule).verdict()


def find_causes(schedule: Schedule) -> Causes:
    """Why each op starts when it does, at the times of the schedule, be it valid or not."""
    return _Verifier(schedule).causes()


class _Verifier(OrderedOps):
    """Checks of one schedule."""

    def verdict(self) -> Verdict:
        self._check_once()
        self._check_presence()
        self._check_modes()
        self._check_placement_and_duration()
        self._check_blocks()
        self._check_begins()
        self._check_stated_order()
        self._check_streams()
        self._check_dependencies()
        self._check_waits()
        self._check_cycles()
        self._check_channels()
        slices = [self._device_slice(d) for d in range(len(self.schedule.devices))]
        spans = [span(self.start_us[s], self.end_us[s]) for s in slices]
        value = self.length_us if self.problem.objective == "makespan" else max(spans)
        facts = [self._device_facts(d, value, spans[d]) for d in range(len(spans))]
        host = self._check_host()
        if not self.violations:  # exact times exist only for orders that are complete and free of cycles
            self._check_sums()
        self._check_claims(value, facts)
        return Verdict(self.violations, value, self.length_us, max(spans), host, facts)

    def _check_once(self) -> None:
        repeated = np.zeros(len(self.key), bool)
        repeated[self.by_key[1:]] = self.sorted_key[1:] == self.sorted_key[:-1]
        self._broken_where("once", repeated, lambda _: "is in the schedule more than once.")

    def _check_presence(self) -> None:
        """Every microbatch has F and all of its backward on every stage, and each O has an R."""
        microbatches, total = self.problem.units, len(self.problem.stages) * self.problem.units
        ops = self.ops[np.flatnonzero(~self.spread)]
        pairs, group = np.unique(ops.stage * microbatches + ops.microbatch, return_inverse=True)
        kinds_present = np.zeros(len(pairs), np.int64)
        np.bitwise_or.at(kinds_present, group, 1 << ops.kind)
        passes = kinds_present & _bits("F", "B", "W", "BW", "CB", "CBW")
        complete = [_bits("F", *backward) for backward in (("B", "W"), ("BW",), ("CB", "W"), ("CBW",))]
        frozen = np.array([stage.backward == "none" for stage in self.problem.stages])[pairs // microbatches]
        incomplete = np.where(frozen, kinds_present != _bits("F"), ~np.isin(passes, complete))
        for pair, kinds in zip(pairs[incomplete].tolist(), kinds_present[incomplete].tolist(), strict=True):
            found = ", ".join(sorted(kind for kind in KINDS if kinds & _bits(kind))) or "none"
            stage, unit = divmod(pair, microbatches)
            needed = "F, B, W or F, BW" if self.problem.stages[stage].backward == "full" else "F alone"
            self._broken("presence", f"{stage}.{unit}", None, f"needs {needed}; {found} found.")
        copies = kinds_present & _bits("O", "R")
        for pair in pairs[(copies != 0) & (copies != _bits("O", "R"))].tolist():
            where = f"{pair // microbatches}.{pair % microbatches}"
            self._broken("presence", where, None, "has only one of O and R.")
        if len(pairs) < total:
            gap = int(np.argmax(np.append(pairs, -1) != np.arange(len(pairs) + 1)))
            where = f"{gap // microbatches}.{gap % microbatches}"
            detail = f"needs F, B, W or F, BW; none found, and {total - len(pairs) - 1} more are missing altogether."
            self._broken("presence", where, None, detail)
        whole = np.array([not stage.split_backward for stage in self.problem.stages])
        apart = among(self.ops.kind, "B", "W", "CB") & whole[self.stage]
        self._broken_where("split", apart, lambda _: "is part of a backward, but this stage never splits it.")
        for n, (name, one) in enumerate(self._passes.items()):
            for d, us in enumerate(one.us):
                here = (self.ops.kind == len(KINDS) + n) & (self.ops.stage == d)
                there = {*self.ops.microbatch[here].tolist()}
                for i in sorted(there ^ {*(range(self.problem.units) if us else ())}):
                    detail = "is missing." if us else f"is there, but the pass takes no time on device {d}."
                    self._broken("presence", f"{name}{d}.{i}", None, detail)

    def _check_modes(self) -> None:
        """Each microbatch is recomputed once where its mode says so, and moved to the host where its mode does.

        A CB or CBW needs a mode with segment_bytes.
        """
        ops = self.ops
        if self.modes is None and not among(ops.kind, "O", "R", "C", "CB", "CBW").any():
            return  # everything is kept

        def has(kinds: Sequence[str]) -> Bools:
            """True for each op whose microbatch has an op of these kinds on its stage."""
            keys = [self._keys(np.full(len(ops), code), ops.stage, ops.microbatch) for code in codes_of(*kinds)]
            present: Bools = np.any([self._find(key) >= 0 for key in keys], axis=0)
            return present

        forward = ops.kind == KINDS.index("F")
        again, inside, moves = (self._by_mode(rule) for rule in (_recomputes, _by_segments, leaves))
        recomputation = among(ops.kind, "C", "CB", "CBW")
        mode_of = self._mode_name
        self._broken_where(
            "mode", recomputation & ~again, lambda k: f"recomputes, but its mode {mode_of(k)} keeps everything."
        )
        if recomputation.any() or (forward & again).any():
            ahead, within = has(("C",)), has(("CB", "CBW"))
            self._broken_where(
                "mode",
                forward & again & ~ahead & ~within,
                lambda k: f"is in mode {mode_of(k)}, but nothing recomputes its activation.",
            )
            self._broken_where(
                "mode", (ops.kind == KINDS.index("C")) & within, lambda _: "comes with a CB or CBW, which recomputes."
            )
            self._broken_where(
                "segments",
                recomputation & again & ~inside & (ops.kind != KINDS.index("C")),
                lambda k: f"recomputes inside, but its mode {mode_of(k)} has no segment_bytes.",
            )
        copies = among(ops.kind, "O", "R")
        stays = [
            "its mode {} does not offload" if stage.modes else "this stage never offloads"
            for stage in self.problem.stages
        ]
        self._broken_where(
            "offload", copies & ~moves, lambda k: f"moves although {stays[ops.stage[k]].format(mode_of(k))}."
        )
        if self.modes is not None:
            self._broken_where(
                "offload",
                forward & moves & ~has(("O",)),
                lambda k: f"is in mode {mode_of(k)}, which offloads, but has no O.",
            )

    def _mode_name(self, k: int) -> str:
        return repr(mode_names(self.problem.stages[self.ops.stage[k]])[self.mode[k]])

    def _check_placement_and_duration(self) -> None:
        stages = self.problem.stages
        placed = np.where(self.spread, self.ops.stage, np.array([stage.device for stage in stages])[self.stage])
        self._broken_where(
            "placement", placed != self.home, lambda k: f"is on device {self.home[k]}, not on {placed[k]}."
        )
        expected, took = self.duration_us, self.end_us - self.start_us
        self._broken_where(
            "duration",
            np.abs(took - expected) > self.tolerance,
            lambda k: (
                f"takes {time_text(took[k])} instead of {time_text(expected[k])} "
                f"({difference_text(took[k] - expected[k])})."
            ),
        )

    def _check_blocks(self) -> None:
        """The two ops of a block start and end together."""
        for k in self.joined.tolist():
            starts, ends = self.start_us[k : k + 2], self.end_us[k : k + 2]
            if max(abs(starts[1] - starts[0]), abs(ends[1] - ends[0])) > self.tolerance:
                detail = f"runs as one block with {self.ops[k + 1]}, but they do not start and end together."
                self._broken("block", str(self.ops[k]), float(starts[0]), detail)

    def _check_begins(self) -> None:
        early = self.start_us < -self.tolerance
        self._broken_where(
            "begin", early, lambda k: f"starts at {time_text(self.start_us[k])}, but times count from 0."
        )

    def _check_streams(self) -> None:
        """One op at a time on a stream, in listed order; microbatches in order within one kind of op of one stage."""
        if not len(self.key):
            return
        early = np.zeros(len(self.key), bool)
        early[1:] = (self.start_us[1:] < self.end_us[:-1] - self.tolerance) & (self.list_of[1:] == self.list_of[:-1])
        early[self.joined + 1] = False
        self._broken_where(
            "overlap",
            early,
            lambda k: (
                f"starts {time_text(self.end_us[k - 1] - self.start_us[k])} before {self.ops[k - 1]} "
                "on its stream ends."
            ),
        )
        backward = among(self.ops.kind, "BW", "CB", "CBW")  # all count as B, BW and CBW not as W
        kind = np.where(backward, KINDS.index("B"), self.ops.kind)
        alike = (self.list_of * (len(KINDS) + len(self._passes)) + kind) * self._places_of_kind + self.ops.stage
        order = np.argsort(alike, kind="stable")
        group, place = alike[order], self._places()[order]
        previous = np.full(len(order), -1)
        wrong = np.zeros(len(order), bool)
        wrong[order[1:]] = (place[1:] < place[:-1]) & (group[1:] == group[:-1])
        previous[order[1:]] = order[:-1]
        self._broken_where("microbatch-order", wrong, lambda k: f"comes after {self.ops[int(previous[k])]}.")

    def _places(self) -> Ints:
        """Position of each op's unit among those of one kind of op of one stage.

        Microbatches are in the order stated; slices of one ascend for F and O, and descend for all else.
        """
        microbatch, number = np.divmod(self.ops.microbatch, self.slices)
        if self.schedule.microbatch_order is not None:
            place = np.empty(self.problem.microbatches, np.int64)
            place[self.schedule.microbatch_order] = np.arange(len(place))
            microbatch = place[microbatch]
        ascending = among(self.ops.kind, "F", "O") | self.spread
        return microbatch * self.slices + np.where(ascending, number, self.slices - 1 - number)

    def _check_stated_order(self) -> None:
        """Microbatches are in another order than ascending only where the problem leaves it free."""
        stated = self.schedule.microbatch_order
        if stated is not None and self.problem.microbatch_order == "given" and stated != sorted(stated):
            self._broken("free-order", "microbatch_order", None, "is not ascending, but the problem's order is given.")

    def _device_facts(self, d: int, value_us: float, span_us: float) -> DeviceFacts:
        budget = self.problem.devices[d].memory_bytes
        ops = self._device_slice(d)
        changes = self._memory_changes[ops]
        peak, time_us = _peak(self.start_us[ops], self.end_us[ops], changes)
        if budget is not None and peak > budget:
            self._broken("budget", f"device {d}", time_us, f"holds {budget_text(peak, budget)}.")
        worst_case = self._worst_case_peak_bytes(d)
        if budget is not None and worst_case is not None and worst_case > budget:
            self._broken("budget-any-timing", f"device {d}", None, f"can reach {budget_text(worst_case, budget)}.")
        computes = self._stream_of_kind[self.ops.kind[ops]] == STREAMS.index("compute")
        counted = self.duration_us.copy()
        counted[self.joined + 1] = 0.0
        busy = float(np.nansum(counted[ops][computes]))
        return DeviceFacts(peak, worst_case, busy, 1 - busy / value_us if value_us else 0.0, span_us)

    def _worst_case_peak_bytes(self, d: int) -> int | None:
        streams = [ops for _, ops in self.schedule.devices[d].streams()]
        waits = WaitArray.joined([ops.waits_of() for ops in streams])
        compute, offload, reload = (ops.ops for ops in streams)
        try:
            blocks = {self.ops[k]: self.ops[k + 1] for k in self.joined.tolist()}
            return worst_case_peak_bytes(self.problem, (compute, offload, reload), waits, self.modes, blocks)
        except DeadlockError:  # reported as a violation by _check_cycles
            return None

    @cached_property
    def _memory_changes(self) -> Ints:
        """Changes of device memory at the start and end of each op: an array (ops, 2)."""

        def of_unit(s: int, kind: str, mode: str, sort: UnitSort) -> tuple[int, int]:
            return memory_changes(self.problem.stages[s], kind, mode, unit_sizes(self.problem, s, sort))

        def of_pass(name: str, device: int, sort: UnitSort) -> tuple[int, int]:
            return pass_changes(self.problem, name, device, sort)

        changes: Ints = self._by_kind(of_unit, of_pass, np.int64)
        return changes

    def _check_host(self) -> int:
        """Host memory within its budget; a host buffer is held from the start of O to the end of R, both included.

        A budget of nothing allows no copy at all, even where both take no time.
        """
        copies, _ = self._copies
        if not len(copies):
            return 0

        def moved(s: int, kind: str, mode: str, sort: UnitSort) -> int:
            offload = offload_of(self.problem.stages[s], mode)
            return unit_sizes(self.problem, s, sort).size(offload.bytes) if offload and kind in ("O", "R") else 0

        held = self._by_kind(moved, lambda *_: 0, np.int64)[copies]
        offloads = self.ops.kind[copies] == KINDS.index("O")
        changes = np.stack([held * offloads, -held * ~offloads], axis=1)
        ops, start_us, end_us = self.ops[copies], self.start_us[copies], self.end_us[copies]
        offload = self._find(self._keys(np.full(len(copies), KINDS.index("O")), ops.stage, ops.microbatch))
        at_once = ~offloads & (offload >= 0) & (end_us == self.start_us[offload])
        peak, time_us = _peak(start_us, np.where(at_once, np.nextafter(end_us, np.inf), end_us), changes)
        limit = self.problem.host_memory_bytes
        if limit is not None and peak > limit:
            self._broken("host-budget", "host", time_us, f"holds {budget_text(peak, limit)}.")
        return peak

    def _check_claims(self, value_us: float, facts: Sequence[DeviceFacts]) -> None:
        """Every figure of the document equals the recomputed one."""
        claimed = self.schedule
        if claimed.objective != self.problem.objective:
            self._broken("claim", "objective", None, f"is {claimed.objective}, the problem's {self.problem.objective}.")
        tolerance = max(RELATIVE_TOLERANCE * value_us, self.resolution_us)
        self._claim("value_us", claimed.value_us, value_us, tolerance)
        if claimed.bound_us > value_us + tolerance:
            self._broken("claim", "bound_us", None, f"is {claimed.bound_us:g}, above the value {value_us:g}.")
        gap = (claimed.value_us - claimed.bound_us) / claimed.value_us if claimed.value_us else 0.0
        self._claim("gap", claimed.gap, gap, RELATIVE_TOLERANCE)
        if claimed.status == "optimal" and value_us - claimed.bound_us > tolerance:
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
            self._claim(f"{where}.busy_us", device.busy_us, fact.busy_us, RELATIVE_TOLERANCE * fact.busy_us)
            self._claim(f"{where}.bubble", device.bubble, fact.bubble, RELATIVE_TOLERANCE)

    def _claim(self, where: str, claimed: float, computed: float, tolerance: float) -> None:
        if abs(claimed - computed) > tolerance:
            self._broken("claim", where, None, f"is {claimed!r}, but {computed!r} is found.")


def _bits(*kinds: str) -> int:
    """Bit set of kinds."""
    return sum(1 << KINDS.index(kind) for kind in kinds)


def _recomputes(stage: Stage, mode: str) -> bool:
    kept = [entry.kept_bytes for entry in stage.modes if entry.name == mode]
    return any(size is not None and size < stage.activation_bytes for size in kept)


def _by_segments(stage: Stage, mode: str) -> bool:
    return any(entry.name == mode and entry.segment_bytes is not None for entry in stage.modes)


def _peak(start_us: Floats, end_us: Floats, changes: Ints) -> tuple[int, float]:
    """Highest level and when it is first reached; all changes at one instant count together.

    `changes` has the shape (ops, 2): what each op adds at its start and at its end.
    """
    times = np.concatenate([start_us, end_us])
    instants, at = np.unique(times, return_inverse=True)
    steps = np.zeros(len(instants), np.int64)
    np.add.at(steps, at, changes.T.ravel())
    levels = np.concatenate([[0], np.cumsum(steps)])
    highest = int(np.argmax(levels))
    return int(levels[highest]), float(instants[highest - 1]) if highest else 0.0
