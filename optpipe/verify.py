"""Independent verifier: checks every rule of the model from the schedule document alone.

It shares no code with the simulator's kernel or any solver, so a bug there cannot hide here. Times are compared with a
tolerance of one part in a billion of the schedule's length, as sums of decimal fractions require; to keep many such
errors from adding up, the value is also compared with that of exact times. Bytes are compared exactly.

Cycles need a check of their own. An op of positive length ends after it starts, so times that keep every rule exclude a
cycle through it. But zero-length ops at one instant can wait for one another: the times keep every rule, and still no
executor could start any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import DeadlockError, cycle_text
from optpipe.kinds import KINDS, STREAM_OF_KIND, STREAMS
from optpipe.ops import Op, OpArray, WaitArray
from optpipe.schedule import Schedule
from optpipe.spread import MAX_PASSES, AfterOp, AfterPass, SpreadPass
from optpipe.stage import Offload, Stage
from optpipe.worst_case_memory import (
    UnitSort,
    memory_changes,
    mode_names,
    pass_changes,
    slice_factor,
    unit_sizes,
    unit_sorts,
    worst_case_peak_bytes,
)

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Violation:
    """A broken rule: its short name, where (op, device or field), when, and a sentence."""

    rule: str
    where: str
    time_us: float | None
    detail: str

    def __str__(self) -> str:
        at = "" if self.time_us is None else f" at {self.time_us:g} us"
        return f"{self.where}{at}: {self.detail} [{self.rule}]"


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


@dataclass(frozen=True)
class Causes:
    """Causes of the starts of ops; these are numbered as the document lists them: by device, then by stream.

    Op `needs[0][k]` needs the end of op `needs[1][k]`, by a rule or a wait. Of all that an op has to follow, also on
    its stream and its channel, `starts_after` was met last, `delay_us` before its start; -1 where it starts later.
    """

    ops: OpArray
    needs: tuple[Ints, Ints]
    starts_after: Ints
    delay_us: Floats
    critical_path: Sequence[int]
    """Chain of ops that each start after the one before, up to the one whose end sets the objective's value."""


def find_causes(schedule: Schedule) -> Causes:
    """Why each op starts when it does, at the times of the schedule, be it valid or not."""
    return _Verifier(schedule).causes()


class _Verifier:
    """Checks of one schedule. All ops are in one set of columns, by device and stream, in the order of the document."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.problem = schedule.problem
        self.violations: list[Violation] = []
        streams = [ops for device in schedule.devices for _, ops in device.streams()]
        self.streams = streams
        self.ops = OpArray.joined([stream.ops for stream in streams])
        self.start_us: Floats = np.concatenate([stream.start_us for stream in streams])
        self.end_us: Floats = np.concatenate([stream.end_us for stream in streams])
        lengths = [len(stream) for stream in streams]
        self.list_of = np.repeat(np.arange(len(streams)), lengths)
        self.begins = np.cumsum([0, *lengths])
        self.home = self.list_of // len(STREAMS)
        self.spread = self.ops.kind >= len(KINDS)
        self.stage = np.where(self.spread, 0, self.ops.stage)  # that of a pass is a device
        self.key = self._keys(self.ops.kind, self.ops.stage, self.ops.microbatch)
        self.by_key = np.argsort(self.key, kind="stable")
        self.sorted_key = self.key[self.by_key]
        times = np.concatenate([self.start_us, self.end_us])
        self.length_us = float(np.ptp(times)) if len(times) else 0.0
        self.resolution_us = 4 * float(np.spacing(np.abs(times).max(initial=0.0)))
        self.tolerance = max(RELATIVE_TOLERANCE * self.length_us, self.resolution_us)
        self.modes = self._modes()
        self.mode = self._mode_of_ops()
        self.unit_sort, self.sorts = unit_sorts(self.problem)
        self.slices = self.problem.slices.count if self.problem.slices else 1
        self.duration_us: Floats = self._by_kind(self._unit_duration_us, self._pass_duration_us, np.float64)
        self.partner = self._partners()
        self.joined = self._joined()

    def _modes(self) -> Ints | None:
        """Number of the mode of each unit on each stage, as `mode_names` counts them; None if no F names one."""
        if not any(stream.modes for stream in self.streams):
            return None
        modes = np.zeros((len(self.problem.stages), self.problem.units), np.int64)
        whole = np.array([_leaves(stage, "offload") for stage in self.problem.stages])
        offloads = self.ops[np.flatnonzero(self.ops.kind == KINDS.index("O"))]
        modes[offloads.stage, offloads.microbatch] = whole[offloads.stage]
        for stream in self.streams:
            for index, name in stream.modes.items():
                op = stream.ops[index]
                if name is not None:
                    modes[op.stage, op.microbatch] = mode_names(self.problem.stages[op.stage]).index(name)
        return modes

    def _mode_of_ops(self) -> Ints:
        """Number of the mode of each op's microbatch; copies are of one offloaded whole where no F names a mode."""
        if self.modes is not None:
            return np.where(self.spread, 0, self.modes[self.stage, self.ops.microbatch])
        whole = np.array([_leaves(stage, "offload") for stage in self.problem.stages])
        copies = _among(self.ops.kind, "O", "R")
        return np.where(copies, whole[self.stage], 0)

    def _by_kind(
        self,
        rule: Callable[[int, str, str, UnitSort], Any],
        pass_rule: Callable[[str, int, UnitSort], Any],
        dtype: type,
    ) -> Any:
        """Value of `rule` for each op, by its stage, kind, mode and sort of unit; `pass_rule` for that of a pass."""
        kind = np.where(self.spread, KINDS.index("F"), self.ops.kind)
        counts = np.bincount(kind, minlength=1)
        counts[0] += 1  # at least one kind, for a schedule without ops
        codes = np.flatnonzero(counts)
        values = [
            [
                self._filled([[rule(s, KINDS[code], mode, sort) for sort in self.sorts] for mode in modes])
                for s, (_, modes) in enumerate(self._stage_modes)
            ]
            for code in codes.tolist()
        ]
        row = np.zeros(len(KINDS), np.int64)
        row[codes] = np.arange(len(codes))
        sort = self.unit_sort[self.ops.microbatch]
        result: Any = np.array(values, dtype)[row[kind], self.stage, self.mode, sort]
        passes = np.flatnonzero(self.spread)
        known: dict[tuple[str, int, int], Any] = {}
        for k, op, u in zip(passes.tolist(), self.ops[passes], sort[passes].tolist(), strict=True):
            if (*op[:2], u) not in known:
                known[*op[:2], u] = pass_rule(*op[:2], self.sorts[u])
            result[k] = known[*op[:2], u]
        return result

    def _by_mode(self, rule: Callable[[Stage, str], Any]) -> Any:
        """Value of `rule` for each op: by its stage and mode."""
        values = [self._filled([rule(stage, name) for name in names]) for stage, names in self._stage_modes]
        return np.array(values)[self.stage, self.mode]

    def _filled(self, of_modes: list[Any]) -> list[Any]:
        """Values for the modes of a stage, filled up where it has fewer than another."""
        return of_modes + of_modes[:1] * (self._most_modes - len(of_modes))

    @cached_property
    def _most_modes(self) -> int:
        return max(len(names) for _, names in self._stage_modes)

    def _unit_duration_us(self, s: int, kind: str, mode: str, sort: UnitSort) -> float | None:
        """Duration of an op of a unit by the problem; None for one that a unit in this mode does not have."""
        stage = self.problem.stages[s]
        offload = _offload(stage, mode)
        again = next((entry.recompute_us for entry in stage.modes if entry.name == mode), None)

        backward: tuple[float | None, str] = (stage.backward_input_us, "backward_input")
        weight: tuple[float | None, str] = (stage.backward_weight_us, "backward_weight")
        recomputation: tuple[float | None, str] = (again, "recompute")
        parts: dict[str, list[tuple[float | None, str]]] = {
            "F": [(stage.forward_us, "forward")],
            "B": [backward],
            "W": [weight],
            "BW": [backward, weight],
            "O": [(offload.offload_us if offload else None, "bytes")],
            "R": [(offload.reload_us if offload else None, "bytes")],
            "C": [recomputation],
            "CB": [backward, recomputation],
            "CBW": [backward, weight, recomputation],
        }
        total_us = 0.0
        for part_us, name in parts[kind]:
            if part_us is None:
                return None
            total_us += part_us * getattr(sort, name) * slice_factor(self.problem, s, name, sort.slice)
        return total_us

    def _pass_duration_us(self, name: str, device: int, sort: UnitSort) -> float | None:
        """Duration of an op of a spread pass by the problem; None where the device takes no part."""
        time_us = self._passes[name].us[device]
        return time_us * sort.time if time_us else None

    @cached_property
    def _passes(self) -> dict[str, SpreadPass]:
        """The spread passes of the problem by name, in their order."""
        return {one.name: one for one in self.problem.spread or ()}

    @cached_property
    def _stage_modes(self) -> list[tuple[Stage, Sequence[str]]]:
        """Every stage with the names of the modes that its microbatches may be in."""
        some = None if self.modes is not None else 2  # where no F names a mode there are at most `kept` and `offload`
        return [(stage, mode_names(stage)[:some]) for stage in self.problem.stages]

    def _partners(self) -> Ints:
        """Index of the other op of each op's block; -1 without one."""
        partner = np.full(len(self.key), -1, np.int64)
        for first, stream in zip(self.begins.tolist(), self.streams, strict=False):
            for index, name in stream.partners.items():
                if name is None:
                    continue
                other = Op.parse(name)
                inside = other.stage < len(self.problem.stages) and other.microbatch < self.problem.units
                found = -1
                if inside and other.kind in KINDS:
                    numbers = KINDS.index(other.kind), other.stage, other.microbatch
                    found = int(self._find(self._keys(*(np.array([n]) for n in numbers)))[0])
                if found < 0:
                    detail = f"runs as one block with {name}, which is not in the schedule."
                    self._broken("block", str(self.ops[first + index]), float(self.start_us[first + index]), detail)
                partner[first + index] = found
        return partner

    def _joined(self) -> Ints:
        """Indices of the forwards of all valid blocks; each takes the time of its block, and so does its backward.

        That time is the stages', times the larger of the factors of the two units.
        """
        times = {(one.forward_stage, one.backward_stage): one.us for one in self.problem.overlaps or ()}
        joined: list[int] = []
        for k in np.flatnonzero(self.partner >= 0).tolist():
            other = int(self.partner[k])
            first, last = (k, other) if self.ops[k].kind == "F" else (other, k)
            forward, backward = self.ops[first], self.ops[last]
            time_us = times.get((forward.stage, backward.stage))
            if self.partner[other] != k:
                detail = f"runs as one block with {self.ops[other]}, which names another op or none."
            elif (forward.kind, backward.kind) != ("F", "BW"):
                detail = f"runs as one block with {self.ops[other]}, but a block is of an F and a BW."
            elif forward.microbatch == backward.microbatch:
                detail = f"runs as one block with {self.ops[other]}, of the same microbatch."
            elif time_us is None:
                detail = f"runs as one block with {self.ops[other]}, of which overlaps has none."
            elif last != first + 1 or self.list_of[first] != self.list_of[last]:
                detail = f"runs as one block with {self.ops[other]}, but the F is not right before the BW."
            else:
                if k == first:
                    joined.append(first)
                    self.duration_us[[first, last]] = time_us * self._block_factor(forward, backward)
                continue
            self._broken("block", str(self.ops[k]), float(self.start_us[k]), detail)
        return np.array(joined, np.int64)

    def _block_factor(self, forward: Op, backward: Op) -> float:
        factors: list[float] = []
        for op, names in ((forward, ("forward",)), (backward, ("backward_input", "backward_weight"))):
            sort = self.sorts[self.unit_sort[op.microbatch]]
            own = (getattr(sort, name) * slice_factor(self.problem, op.stage, name, sort.slice) for name in names)
            factors.append(max(own))
        return max(factors)

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
        spans = [_span(self.start_us[s], self.end_us[s]) for s in slices]
        value = self.length_us if self.problem.objective == "makespan" else max(spans)
        facts = [self._device_facts(d, value, spans[d]) for d in range(len(spans))]
        host = self._check_host()
        if not self.violations:  # exact times exist only for orders that are complete and free of cycles
            self._check_sums()
        self._check_claims(value, facts)
        return Verdict(self.violations, value, self.length_us, max(spans), host, facts)

    def _device_slice(self, d: int) -> slice:
        first = d * len(STREAMS)
        return slice(int(self.begins[first]), int(self.begins[first + len(STREAMS)]))

    def _keys(self, kind: Ints, stage: Ints, microbatch: Ints) -> Ints:
        """Unique integer for each (kind, stage, unit) of the problem; the stage of a spread pass is its device."""
        places = len(self.problem.stages) if not self.problem.spread else self._places_of_kind
        return (kind * places + stage) * self.problem.units + microbatch

    @property
    def _places_of_kind(self) -> int:
        return max(len(self.problem.stages), len(self.problem.devices))

    def _find(self, keys: Ints) -> Ints:
        """Index of each of these ops, -1 if it is not in the schedule."""
        if not len(self.key):
            return np.full(len(keys), -1, np.int64)
        slot = np.minimum(np.searchsorted(self.sorted_key, keys), len(self.key) - 1)
        return np.where(self.sorted_key[slot] == keys, self.by_key[slot], -1)

    def _broken(self, rule: str, where: str, time_us: float | None, detail: str) -> None:
        self.violations.append(Violation(rule, where, time_us, detail))

    def _broken_where(self, rule: str, wrong: Bools, detail: Callable[[int], str]) -> None:
        """Add a violation for each op with a true entry in `wrong`; `detail` maps an op's index to the sentence."""
        for k in np.flatnonzero(wrong).tolist():
            self._broken(rule, str(self.ops[k]), float(self.start_us[k]), detail(k))

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
        apart = _among(self.ops.kind, "B", "W", "CB") & whole[self.stage]
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
        if self.modes is None and not _among(ops.kind, "O", "R", "C", "CB", "CBW").any():
            return  # everything is kept

        def has(kinds: Sequence[str]) -> Bools:
            """True for each op whose microbatch has an op of these kinds on its stage."""
            keys = [self._keys(np.full(len(ops), code), ops.stage, ops.microbatch) for code in _codes(*kinds)]
            present: Bools = np.any([self._find(key) >= 0 for key in keys], axis=0)
            return present

        forward = ops.kind == KINDS.index("F")
        again, inside, leaves = (self._by_mode(rule) for rule in (_recomputes, _by_segments, _leaves))
        recomputation = _among(ops.kind, "C", "CB", "CBW")
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
                "mode", (ops.kind == KINDS.index("C")) & within, lambda _: "comes beside a CB or CBW, which recomputes."
            )
            self._broken_where(
                "segments",
                recomputation & again & ~inside & (ops.kind != KINDS.index("C")),
                lambda k: f"recomputes inside, but its mode {mode_of(k)} has no segment_bytes.",
            )
        copies = _among(ops.kind, "O", "R")
        stays = [
            "its mode {} does not offload" if stage.modes else "this stage never offloads"
            for stage in self.problem.stages
        ]
        self._broken_where(
            "offload", copies & ~leaves, lambda k: f"moves although {stays[ops.stage[k]].format(mode_of(k))}."
        )
        if self.modes is not None:
            self._broken_where(
                "offload",
                forward & leaves & ~has(("O",)),
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
            lambda k: f"takes {took[k]:g} us instead of {expected[k]:g} us.",
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
        self._broken_where("begin", early, lambda k: f"starts at {self.start_us[k]:g} us, but times count from 0.")

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
            lambda k: f"starts before {self.ops[k - 1]} on its stream ends ({self.end_us[k - 1]:g} us).",
        )
        backward = _among(self.ops.kind, "BW", "CB", "CBW")  # all count as B, BW and CBW not as W
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
        ascending = _among(self.ops.kind, "F", "O") | self.spread
        return microbatch * self.slices + np.where(ascending, number, self.slices - 1 - number)

    def _check_stated_order(self) -> None:
        """Microbatches are in another order than ascending only where the problem leaves it free."""
        stated = self.schedule.microbatch_order
        if stated is not None and self.problem.microbatch_order == "given" and stated != sorted(stated):
            self._broken("free-order", "microbatch_order", None, "is not ascending, but the problem's order is given.")

    def _check_dependencies(self) -> None:
        start_us, end_us = (np.concatenate([column, self._barrier_us]) for column in (self.start_us, self.end_us))
        for op, before, delay_us in self._dependencies:
            ready = end_us[before] + delay_us
            for k in np.flatnonzero(start_us[op] < ready - self.tolerance).tolist():
                detail = f"starts before {self._name(int(before[k]))} lets it ({ready[k]:g} us)."
                self._broken("dependency", str(self.ops[int(op[k])]), float(self.start_us[op[k]]), detail)

    @cached_property
    def _barrier_us(self) -> Floats:
        """Latest end of each spread pass for each microbatch: the time of a node behind those of the ops."""
        latest_us = np.full((len(self._passes), self.problem.units), self.start_us.min(initial=0.0))
        passes = np.flatnonzero(self.spread)
        number, microbatch = self.ops.kind[passes] - len(KINDS), self.ops.microbatch[passes]
        np.maximum.at(latest_us, (number, microbatch), self.end_us[passes])
        return latest_us.ravel()

    def _name(self, node: int) -> str:
        """Name of an op, or of a barrier."""
        if node < len(self.key):
            return str(self.ops[node])
        number, unit = divmod(node - len(self.key), self.problem.units)
        return f"the last {[*self._passes][number]} of microbatch {unit}"

    @cached_property
    def _dependencies(self) -> Sequence[tuple[Ints, Ints, Floats]]:
        """Precedences by the rules of the model: indices of ops and of their predecessors, and the delays."""
        edges = []
        for op, before, delay_us in (*self._rules(), *self._spread_rules()):
            present = before >= 0
            edges.append((op[present], before[present], np.broadcast_to(delay_us, present.shape)[present]))
        return edges

    def _rules(self) -> Iterator[tuple[Ints, Ints, Floats | float]]:
        """The precedences of each rule, with -1 for a predecessor that is not in the schedule."""
        stage, last = self.ops.stage, len(self.problem.stages) - 1
        f, b, w, bw, o, r, c, cb, cbw = (self.ops.kind == code for code in range(len(KINDS)))  # no spread pass
        backward = b | bw | cb | cbw
        op = np.flatnonzero(f & (stage > 0))
        yield op, self._relative(op, "F", -1), self._delays_us(op, -1)
        op = np.flatnonzero(backward & (stage < last))
        gradient = self._relative(op, "B", 1)
        for kind in [kind for kind, there in (("BW", bw), ("CB", cb), ("CBW", cbw)) if there.any()]:
            gradient = np.where(gradient >= 0, gradient, self._relative(op, kind, 1))
        yield op, gradient, self._delays_us(op, 1)
        rules = [(backward, "F"), (backward, "R"), (w, "B"), (o, "F"), (r, "O")]
        if c.any() or cb.any():
            rules += [(backward, "C"), (c, "F"), (c, "R"), (w, "CB")]
        for mask, earlier in rules:
            op = np.flatnonzero(mask)
            yield op, self._relative(op, earlier, 0), 0.0

    def _spread_rules(self) -> Iterator[tuple[Ints, Ints, Floats | float]]:
        """Each barrier after every op of its pass, and what passes and gated ops come after."""
        for n, one in enumerate(self._passes.values()):
            op = np.flatnonzero(self.ops.kind == len(KINDS) + n)
            yield self._barrier(n, self.ops.microbatch[op]), op, 0.0
            yield from (self._after(op, after) for after in one.after)
        for gate in self.problem.gates or ():
            op = np.flatnonzero(_among(self.ops.kind, *_GATED[gate.op]) & (self.ops.stage == gate.stage))
            yield from (self._after(op, after) for after in gate.after)

    def _barrier(self, number: int | Ints, microbatch: Ints) -> Ints:
        """Node of a pass for each of these microbatches."""
        return len(self.key) + number * self.problem.units + microbatch

    def _after(self, op: Ints, after: AfterOp | AfterPass) -> tuple[Ints, Ints, Floats]:
        """Ops, the node that each comes after, and the time between them: none for an op on the same device."""
        microbatch = self.ops.microbatch[op]
        us = after.us * np.array([sort.transfer for sort in self.sorts])[self.unit_sort[microbatch]]
        if isinstance(after, AfterPass):
            return op, self._barrier([*self._passes].index(after.pass_name), microbatch), us
        before = np.full(len(op), -1)
        for code in _codes(*_GATED[after.op]):
            found = self._find(self._keys(np.full(len(op), code), np.full(len(op), after.stage), microbatch))
            before = np.where(found >= 0, found, before)
        return op, before, us * (self.home[op] != self.problem.stages[after.stage].device)

    def _delays_us(self, op: Ints, step: int) -> Floats:
        """Time of the transfer of what each op needs from the stage `step` further, by the factors of that stage."""
        stage, unit_sort = self.ops.stage[op], self.unit_sort[self.ops.microbatch[op]]
        if step < 0:
            delay_us = np.array([0.0, *self.problem.forward_delay_us])
        else:
            delay_us = np.array([*self.problem.backward_delay_us, 0.0])
        if self.problem.slices is None and self.problem.microbatch_factors is None:
            return delay_us[stage]
        factors = [
            [sort.transfer * slice_factor(self.problem, s, "transfer", sort.slice) for sort in self.sorts]
            for s in range(len(self.problem.stages))
        ]
        return np.asarray(delay_us[stage] * np.array(factors)[stage + step, unit_sort])

    def _relative(self, op: Ints, kind: str, step: int) -> Ints:
        """Indices of the ops of `kind` for the same microbatches, `step` stages after the stages of `op`."""
        code = np.full(len(op), KINDS.index(kind))
        return self._find(self._keys(code, self.ops.stage[op] + step, self.ops.microbatch[op]))

    def _check_waits(self) -> None:
        """Each wait names an op on another stream of the same device, and that op ends first."""
        op, before, names = self._waits
        absent = before < 0
        stream = self._stream_of_kind[self.ops.kind]
        elsewhere = (self.home[before] != self.home[op]) | (stream[before] == stream[op])
        early = self.start_us[op] < self.end_us[before] - self.tolerance
        for wait in np.flatnonzero(absent | elsewhere | early).tolist():
            k, name = int(op[wait]), names[wait]
            if absent[wait]:
                self._wait_broken(k, f"waits for {name}, which is not in the schedule.")
            elif elsewhere[wait]:
                self._wait_broken(k, f"waits for {name}, not on another stream of its device.")
            else:
                end = self.end_us[before[wait]]
                self._wait_broken(k, f"starts before {name}, which it waits for, ends ({end:g} us).")

    @cached_property
    def _stream_of_kind(self) -> Ints:
        """Stream of each kind; spread passes run on that of compute."""
        return np.array([*STREAM_OF_KIND, *(STREAMS.index("compute") for _ in self._passes)])

    @cached_property
    def _waits(self) -> tuple[Ints, Ints, Sequence[str]]:
        """Waits as columns: index of the op, index of the op it waits for or -1, and the name of that."""
        waiting: list[int] = []
        names: list[str] = []
        for first, stream in zip(self.begins.tolist(), self.streams, strict=False):
            for index, others_of_op in stream.waits.items():
                waiting += [first + index] * len(others_of_op)
                names += others_of_op
        others = OpArray.parse(" ".join(names)).numbered([*self._passes])
        places = np.where(others.kind < len(KINDS), len(self.problem.stages), len(self.problem.devices))
        known = (others.stage < places) & (others.microbatch < self.problem.units)
        # Outside the problem a key would be that of another op.
        indices = np.where(known, self._find(self._keys(others.kind, others.stage, others.microbatch)), -1)
        return np.array(waiting, np.int64), indices, names

    def _check_cycles(self) -> None:
        """No cycle of ops by rules, streams and waits."""
        op, before, _ = self._edges
        start_us = np.concatenate([self.start_us, self._barrier_us])
        cycle = find_cycle(op, before, start_us)
        if cycle:
            names = [self._name(k) for k in cycle]
            detail = f"waits for itself: {cycle_text(names)}, each for the one before it."
            self._broken("deadlock", names[0], float(start_us[cycle[0]]), detail)

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, Floats]:
        """Precedences by streams, waits and rules: indices of ops and of their predecessors, and the delays."""
        follows = 1 + np.flatnonzero(self.list_of[1:] == self.list_of[:-1])
        waiting, awaited, _ = self._waits
        present = awaited >= 0
        edges = [
            (follows, follows - 1, np.zeros(len(follows))),
            (waiting[present], awaited[present], np.zeros(present.sum())),
            *self._dependencies,
        ]
        op, before, delay_us = (np.concatenate(column) for column in zip(*edges, strict=True))
        if len(self.joined):  # what one op of a block waits for, both do, and not for each other
            whole = np.arange(len(self.key) + len(self._barrier_us))
            whole[self.joined + 1] = self.joined
            apart = whole[op] != whole[before]
            op, before, delay_us = op[apart], before[apart], delay_us[apart]
            in_block = np.isin(whole[op], self.joined)
            other = self.partner[op[in_block]]
            op = np.concatenate([op, other])
            before, delay_us = (np.concatenate([column, column[in_block]]) for column in (before, delay_us))
        return op, before, delay_us

    def _wait_broken(self, k: int, detail: str) -> None:
        self._broken("wait", str(self.ops[k]), float(self.start_us[k]), detail)

    def _check_channels(self) -> None:
        """One transfer at a time on a channel, including channels that devices or directions share."""
        copies, channel = self._copies
        order = np.lexsort((self.end_us[copies], self.start_us[copies], channel))
        copies, channel = copies[order], channel[order]
        overlap = self.start_us[copies[1:]] < self.end_us[copies[:-1]] - self.tolerance
        for k in np.flatnonzero(overlap & (channel[1:] == channel[:-1])).tolist():
            op, before = int(copies[k + 1]), self.ops[int(copies[k])]
            detail = f"overlaps {before} on a shared channel."
            self._broken("channel", str(self.ops[op]), float(self.start_us[op]), detail)

    @cached_property
    def _copies(self) -> tuple[Ints, Ints]:
        """Indices of all O and R, and the channel number of each."""
        copies = np.flatnonzero(_among(self.ops.kind, "O", "R"))
        group_of = np.zeros(len(self.problem.devices), np.int64)
        for g, group in enumerate(self.problem.channel_groups):
            group_of[list(group)] = g
        channel = 2 * group_of[self.home[copies]]
        if self.problem.copy_channels.duplex:
            channel += self.ops.kind[copies] == KINDS.index("R")
        return copies, channel

    def _check_sums(self) -> None:
        """The stated value is not below the value with exact times by more than one tolerance.

        Each op may start one tolerance too early, and these errors add up along a path. A path is at most as long as by
        the stated times plus the sum of all such errors. If that stays within the tolerance, as in any schedule whose
        times are float sums, the exact value need not be computed.
        """
        claimed = self.schedule.value_us
        limit_us = claimed + max(RELATIVE_TOLERANCE * claimed, self.resolution_us)
        op, before, delay_us = self._edges
        copy, earlier = self._channel_pairs(self.start_us + self.end_us)
        op, before = np.concatenate([op, copy]), np.concatenate([before, earlier])
        delay_us = np.concatenate([delay_us, np.zeros(len(copy))])
        start_us, duration_us = self._with_barriers(self.start_us, self._barrier_us)
        missing_us = np.zeros(len(start_us))
        np.maximum.at(missing_us, op, start_us[before] + duration_us[before] + delay_us - start_us[op])
        if self._value_us(self.start_us) + missing_us.sum() > limit_us:
            least_us = self._exact_value_us(limit_us)
            if least_us > limit_us:
                detail = f"is {claimed!r}, but with exact durations and delays these orders take {least_us!r}."
                self._broken("claim", "value_us", None, detail)

    def _with_barriers(self, start_us: Floats, barrier_us: Floats) -> tuple[Floats, Floats]:
        """Starts and durations of ops, and behind them of barriers, which take no time."""
        return np.concatenate([start_us, barrier_us]), np.append(self.duration_us, np.zeros(len(barrier_us)))

    def _channel_pairs(self, rank: Floats | Ints) -> tuple[Ints, Ints]:
        """Copies and their predecessors on the same channel, when each channel runs its copies by `rank`."""
        copies, channel = self._copies
        order = np.lexsort((rank[copies], channel))
        copies, channel = copies[order], channel[order]
        same = channel[1:] == channel[:-1]
        return copies[1:][same], copies[:-1][same]

    def causes(self) -> Causes:
        waiting, awaited, _ = self._waits
        there = awaited >= 0
        needs = [*map(self._between_ops, self._dependencies), (waiting[there], awaited[there], np.zeros(there.sum()))]
        copy, earlier = self._channel_pairs(self.start_us + self.end_us)
        # Of causes that are met at once, rules and waits come before the order of a stream or channel.
        causes = [*needs, self._between_ops(self._edges), (copy, earlier, np.zeros(len(copy)))]
        op, before, delay_us = (np.concatenate(column) for column in zip(*causes, strict=True))
        met = self.end_us[before] + delay_us >= self.start_us[op] - self.tolerance
        found, first = np.unique(op[met], return_index=True)
        starts_after, gap_us = np.full(len(self.key), -1, np.int64), np.zeros(len(self.key))
        starts_after[found], gap_us[found] = before[met][first], delay_us[met][first]
        needed = sum(len(column) for column, _, _ in needs)
        return Causes(self.ops, (op[:needed], before[:needed]), starts_after, gap_us, self._chain(starts_after))

    def _between_ops(self, edges: tuple[Ints, Ints, Floats]) -> tuple[Ints, Ints, Floats]:
        """Edges between ops alone: for a barrier stands the op of its pass that ended last."""
        op, before, delay_us = edges
        last = np.full(len(self.key) + len(self._barrier_us), -1)
        last[: len(self.key)] = np.arange(len(self.key))
        passes = np.flatnonzero(self.spread)
        passes = passes[np.argsort(self.end_us[passes], kind="stable")]
        last[self._barrier(self.ops.kind[passes] - len(KINDS), self.ops.microbatch[passes])] = passes
        there = (op < len(self.key)) & (last[before] >= 0)
        return op[there], last[before[there]], delay_us[there]

    def _chain(self, starts_after: Ints) -> Sequence[int]:
        """Chain of causes up to the last op of the device that sets the value, in order of time."""
        by_span = self.problem.objective == "device_span"
        slices = [s for s in map(self._device_slice, range(len(self.schedule.devices))) if s.start < s.stop]
        if not slices:
            return []
        ends = [self.end_us[s].max() - by_span * self.start_us[s].min() for s in slices]
        last = slices[int(np.argmax(ends))]
        k = last.start + int(np.argmax(self.end_us[last]))
        chain: dict[int, None] = {}
        while k >= 0 and k not in chain:  # in a schedule with faults causes may go round
            chain[k] = None
            k = int(starts_after[k])
        return [*chain][::-1]

    def _value_us(self, start_us: Floats) -> float:
        """Value of the objective at these starts with exact durations."""
        end_us = start_us + self.duration_us
        if self.problem.objective == "makespan":
            return _span(start_us, end_us)
        slices = [self._device_slice(d) for d in range(len(self.schedule.devices))]
        return max(_span(start_us[s], end_us[s]) for s in slices)

    def _exact_value_us(self, limit_us: float) -> float:
        """Smallest value of the orders with exact times; for spans, a value within the limit if there is one.

        For spans, a device's first op is delayed until its last op ends within the limit of it. A delay of one device
        may delay others, and a longest path passes each device once: if some span exceeds the limit after as many
        rounds as there are devices, no timing keeps all of them within it.
        """
        ops, middle = slice(len(self.key)), np.append(self.start_us + self.end_us, 2 * self._barrier_us)
        _, duration_us = self._with_barriers(self.start_us, self._barrier_us)
        timing = _ExactTiming(duration_us, *self._edges, middle)
        timing.add(*self._channel_pairs(timing.rank))
        start_us = timing.earliest_us(np.zeros(len(middle)))
        if self.problem.objective == "makespan":
            return self._value_us(start_us[ops])
        slices = [s for s in map(self._device_slice, range(len(self.schedule.devices))) if s.start < s.stop]
        for _ in slices:
            if self._value_us(start_us[ops]) <= limit_us:
                break
            for s in slices:
                begin_us = (start_us[s] + self.duration_us[s]).max() - (limit_us - self.resolution_us)
                start_us[s] = np.maximum(start_us[s], begin_us)
            start_us = timing.earliest_us(start_us)
        return self._value_us(start_us[ops])

    def _device_facts(self, d: int, value_us: float, span_us: float) -> DeviceFacts:
        budget = self.problem.devices[d].memory_bytes
        ops = self._device_slice(d)
        changes = self._memory_changes[ops]
        peak, time_us = _peak(self.start_us[ops], self.end_us[ops], changes)
        if budget is not None and peak > budget:
            self._broken("budget", f"device {d}", time_us, f"holds {peak} bytes of {budget}.")
        worst_case = self._worst_case_peak_bytes(d)
        if budget is not None and worst_case is not None and worst_case > budget:
            self._broken("budget-any-timing", f"device {d}", None, f"can reach {worst_case} bytes of {budget}.")
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
            offload = _offload(self.problem.stages[s], mode)
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
            self._broken("host-budget", "host", time_us, f"holds {peak} bytes of {limit}.")
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


class _ExactTiming:
    """Earliest starts of ops without a cycle; `rank` is the position of each op in a topological order.

    Of the ops that can come next, the one with the smallest `middle` does, so the order follows the stated times where
    these differ.
    """

    def __init__(self, duration_us: Floats, op: Ints, before: Ints, delay_us: Floats, middle: Floats) -> None:
        self.duration_us = duration_us
        size = len(duration_us)
        self.needs: list[list[tuple[int, float]]] = [[] for _ in range(size)]
        after: list[list[int]] = [[] for _ in range(size)]
        for k, earlier, gap_us in zip(op.tolist(), before.tolist(), delay_us.tolist(), strict=True):
            self.needs[k].append((earlier, gap_us))
            after[earlier].append(k)
        left = [len(needs) for needs in self.needs]
        ready = [(at, k) for k, at in enumerate(middle.tolist()) if not left[k]]
        heapify(ready)
        self.sequence: list[int] = []
        while ready:
            _, k = heappop(ready)
            self.sequence.append(k)
            for later in after[k]:
                left[later] -= 1
                if not left[later]:
                    heappush(ready, (float(middle[later]), later))
        self.rank = np.empty(size, np.int64)
        self.rank[self.sequence] = np.arange(size)

    def add(self, op: Ints, before: Ints) -> None:
        """Add precedences; each predecessor must have a lower rank."""
        for k, earlier in zip(op.tolist(), before.tolist(), strict=True):
            self.needs[k].append((earlier, 0.0))

    def earliest_us(self, release_us: Floats) -> Floats:
        """Earliest starts, none before its release."""
        start_us, duration_us = release_us.tolist(), self.duration_us.tolist()
        for k in self.sequence:
            for earlier, gap_us in self.needs[k]:
                ready_us = start_us[earlier] + duration_us[earlier] + gap_us
                if ready_us > start_us[k]:
                    start_us[k] = ready_us
        return np.array(start_us)


def _bits(*kinds: str) -> int:
    """Bit set of kinds."""
    return sum(1 << KINDS.index(kind) for kind in kinds)


def _codes(*kinds: str) -> list[int]:
    return [KINDS.index(kind) for kind in kinds]


def _among(kind: Ints, *kinds: str) -> Bools:
    """True for each op of one of these kinds."""
    chosen = np.zeros(len(KINDS) + MAX_PASSES, bool)
    chosen[_codes(*kinds)] = True
    among: Bools = chosen[kind]
    return among


_GATED = {"F": ("F",), "B": ("B", "BW", "CB", "CBW"), "W": ("W", "BW", "CBW")}
"""Kinds that do what passes come after, and what gates delay."""


def _recomputes(stage: Stage, mode: str) -> bool:
    kept = [entry.kept_bytes for entry in stage.modes if entry.name == mode]
    return any(size is not None and size < stage.activation_bytes for size in kept)


def _by_segments(stage: Stage, mode: str) -> bool:
    return any(entry.name == mode and entry.segment_bytes is not None for entry in stage.modes)


def _offload(stage: Stage, mode: str) -> Offload | None:
    """The part of an activation that leaves in this mode; None if nothing does."""
    if stage.backward == "none":
        return None
    return {"offload": stage.offload, **{entry.name: entry.offload for entry in stage.modes}}.get(mode)


def _leaves(stage: Stage, mode: str) -> bool:
    return _offload(stage, mode) is not None


def _span(start_us: Floats, end_us: Floats) -> float:
    return float(end_us.max() - start_us.min()) if len(start_us) else 0.0


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


def find_cycle(op: Ints, before: Ints, start_us: Floats) -> list[int] | None:
    """Indices of ops on some cycle, each of which waits for the one before it and the first for the last, or None.

    Op `op[k]` waits for op `before[k]`; `start_us` holds the starts of all ops, valid or not.
    """
    # Along a cycle starts advance as far as they go back, so no edge of a cycle advances further than all edges
    # together go back (up to rounding). This discards nearly all edges of most schedules.
    forward_us = start_us[op] - start_us[before]
    chosen = np.flatnonzero(forward_us <= -1.001 * forward_us.clip(max=0).sum())
    needs: dict[int, list[int]] = {}
    for k, earlier in zip(op[chosen].tolist(), before[chosen].tolist(), strict=True):
        needs.setdefault(k, []).append(earlier)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1][:-1])
    return None
