"""Ops of a schedule in columns, with what its problem says of each: mode, duration, block; and the violations found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.kinds import KINDS, STREAM_OF_KIND, STREAMS
from optpipe.ops import Op, OpArray
from optpipe.schedule import Schedule
from optpipe.spread import MAX_PASSES, SpreadPass
from optpipe.stage import Offload, Stage
from optpipe.units import time_text
from optpipe.worst_case_memory import (
    UnitSort,
    mode_names,
    slice_factor,
    unit_sorts,
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
        at = "" if self.time_us is None else f" at {time_text(self.time_us)}"
        return f"{self.where}{at}: {self.detail} [{self.rule}]"


class ScheduledOps:
    """Ops of one schedule in one set of columns, by device and stream, in the order of the document."""

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
        whole = np.array([leaves(stage, "offload") for stage in self.problem.stages])
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
        whole = np.array([leaves(stage, "offload") for stage in self.problem.stages])
        copies = among(self.ops.kind, "O", "R")
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
        offload = offload_of(stage, mode)
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

    @cached_property
    def _stream_of_kind(self) -> Ints:
        """Stream of each kind; spread passes run on that of compute."""
        return np.array([*STREAM_OF_KIND, *(STREAMS.index("compute") for _ in self._passes)])

    @cached_property
    def _copies(self) -> tuple[Ints, Ints]:
        """Indices of all O and R, and the channel number of each."""
        copies = np.flatnonzero(among(self.ops.kind, "O", "R"))
        group_of = np.zeros(len(self.problem.devices), np.int64)
        for g, group in enumerate(self.problem.channel_groups):
            group_of[list(group)] = g
        channel = 2 * group_of[self.home[copies]]
        if self.problem.copy_channels.duplex:
            channel += self.ops.kind[copies] == KINDS.index("R")
        return copies, channel

    def _broken(self, rule: str, where: str, time_us: float | None, detail: str) -> None:
        self.violations.append(Violation(rule, where, time_us, detail))

    def _broken_where(self, rule: str, wrong: Bools, detail: Callable[[int], str]) -> None:
        """Add a violation for each op with a true entry in `wrong`; `detail` maps an op's index to the sentence."""
        for k in np.flatnonzero(wrong).tolist():
            self._broken(rule, str(self.ops[k]), float(self.start_us[k]), detail(k))


def codes_of(*kinds: str) -> list[int]:
    """Indices of kinds into KINDS."""
    return [KINDS.index(kind) for kind in kinds]


def among(kind: Ints, *kinds: str) -> Bools:
    """True for each op of one of these kinds."""
    chosen = np.zeros(len(KINDS) + MAX_PASSES, bool)
    chosen[codes_of(*kinds)] = True
    among: Bools = chosen[kind]
    return among


def offload_of(stage: Stage, mode: str) -> Offload | None:
    """The part of an activation that leaves in this mode; None if nothing does."""
    if stage.backward == "none":
        return None
    return {"offload": stage.offload, **{entry.name: entry.offload for entry in stage.modes}}.get(mode)


def leaves(stage: Stage, mode: str) -> bool:
    """True if a part of the activation leaves in this mode."""
    return offload_of(stage, mode) is not None


def span(start_us: Floats, end_us: Floats) -> float:
    """From the first start to the last end; 0 without ops."""
    return float(end_us.max() - start_us.min()) if len(start_us) else 0.0
