"""Task graph of a problem: what every op takes, needs and frees, as arrays without the limits of a document's fields.

`lower` alone reads stages, activation modes, factors and slices, each by the row of its kind (`optpipe.kinds`). Whoever
times or places ops reads the graph. After PyJobShop's ProblemData: tasks of types, with durations, a machine (the
stream of the stage's device) and what they do to memory; precedences with delays; options of which a unit takes one.
`verify` and `worst_case_memory` read the rules for themselves and use nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from optpipe.costs import sizes_bytes, times_us
from optpipe.kinds import (
    CODE,
    COPIES,
    DOERS,
    HALVES,
    KIND,
    KINDS,
    PASSAGE,
    ROWS,
    TRAINING,
    Kind,
    SizeName,
    TimeName,
    codes,
)
from optpipe.mode_names import OFFLOAD
from optpipe.ops import OpArray
from optpipe.problem import Problem
from optpipe.spread import AfterOp, AfterPass, SpreadPass
from optpipe.stage import Mode, Stage, scaled_bytes, scaled_us

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Lag:
    """A wait for something of the same microbatch: `us` of each unit after its end.

    `spread`: number of the pass whose latest end over all devices is meant; None: the end of whichever op covers `duty`
    on `stage`. Its own device does not wait for the message of an op.
    """

    us: Floats
    spread: int | None = None
    duty: str = ""
    stage: int = 0


@dataclass(frozen=True, eq=False)
class SpreadTask:
    """A spread pass: durations (devices, classes), NaN where a device has no op of it, and bytes of the same shape.

    What it keeps, the pass of number `freed_by` frees; None: it keeps nothing. An op starts after all of `after`.
    """

    name: str
    duration_us: Floats
    kept_bytes: Ints
    workspace_bytes: Ints
    freed_by: int | None
    after: Sequence[Lag]

    @property
    def devices(self) -> list[int]:
        """Devices that have ops of it."""
        there: list[int] = np.flatnonzero(~np.isnan(self.duration_us[:, 0])).tolist()
        return there


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks of a problem by type: kind of op, stage, activation option of the unit there, and class of the unit.

    Options are numbered as a stage's `choices`, of which it has `options`; `whole_option` is that of a unit that is
    offloaded whole, 0 where there is none. `splits`: stages whose backward may be two ops. `unit_class`: of each unit.
    `stages` and their modes, of shape (stages, options, classes), have the costs that ops are made of. `delays_us`:
    transfers of each unit by direction, of shape (boundaries, units). `channels`: devices and kinds of copy of each.

    `passes`: the spread passes, whose types come behind those of stages, numbered by pass, device and class. `gates`:
    for a duty on a stage, what its ops of the kinds that are `GATED` wait for besides.
    """

    device: Ints
    options: Ints
    whole_option: Ints
    splits: Bools
    unit_class: Ints
    stages: Sequence[Sequence[Sequence[tuple[Stage, Mode]]]]
    delays_us: Mapping[str, Floats]
    channels: Sequence[tuple[Sequence[int], Sequence[str]]]
    passes: Sequence[SpreadTask] = ()
    gates: Mapping[tuple[str, int], Sequence[Lag]] = field(default_factory=dict)

    @cached_property
    def times_us(self) -> Mapping[TimeName, Floats]:
        """Times that durations consist of, each of shape (stages, options, classes)."""
        return self._columns(times_us, np.float64)

    @cached_property
    def sizes_bytes(self) -> Mapping[SizeName, Ints]:
        """Sizes that ops take and free, each of shape (stages, options, classes)."""
        return self._columns(sizes_bytes, np.int64)

    def _columns(self, cost: Callable[[Stage, Mode], Mapping[Any, float]], kind: type[Any]) -> dict[Any, NDArray[Any]]:
        values = [[[[*cost(*pair).values()] for pair in classes] for classes in options] for options in self.stages]
        return dict(zip(cost(*self.stages[0][0][0]), np.moveaxis(np.array(values, kind), 3, 0), strict=True))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Numbers of kinds, stages, options and classes: types are numbered as an array of this shape is laid out."""
        return len(KINDS), len(self.stages), len(self.stages[0]), len(self.stages[0][0])

    def of_stages(self, of_types: NDArray[Any]) -> NDArray[Any]:
        """The part of an array over types that is of stages, with the axes of `shape`."""
        return of_types[: prod(self.shape)].reshape(*self.shape, *of_types.shape[1:])

    @property
    def lags(self) -> Sequence[Lag]:
        """All waits of passes and gates."""
        return [lag for after in (*(one.after for one in self.passes), *self.gates.values()) for lag in after]

    def device_of(self, ops: OpArray) -> Ints:
        """Device of each op."""
        if not self.passes:
            return self.device[ops.stage]
        spread = ops.spread
        return np.where(spread, ops.stage, self.device[np.where(spread, 0, ops.stage)])

    def types(self, ops: OpArray, modes: Ints | None = None) -> Ints:
        """Type of each op, an index into the arrays over types.

        `modes`: the option of each unit on each stage, as in `Orders`; None where each is kept, or offloaded whole.
        """
        if ops.passes and (spread := ops.spread).any():
            at = np.flatnonzero(spread)
            types = np.empty(len(ops), np.int64)
            own, classes = ops[at], self.shape[3]
            number = (own.kind - len(KINDS)) * len(self.passes[0].duration_us) + own.stage
            types[at] = prod(self.shape) + number * classes + self.unit_class[own.microbatch]
            others = np.flatnonzero(~spread)
            types[others] = self._types_of_stages(ops[others], modes)
            return types
        return self._types_of_stages(ops, modes)

    def _types_of_stages(self, ops: OpArray, modes: Ints | None) -> Ints:
        if modes is None:
            types: Ints = self.plain_types[ops.kind, ops.stage]
        else:
            _, stages, options, classes = self.shape
            types = ((ops.kind * stages + ops.stage) * options + modes[ops.stage, ops.microbatch]) * classes
        return types + self.unit_class[ops.microbatch] if self.shape[3] > 1 else types

    def types_of_stage(self, kinds: Sequence[int], stage: int, option: int | None, unit_class: int) -> Ints:
        """Type of an op of each kind on a stage in an option (None: kept, or offloaded whole), for a class of units."""
        if option is None:
            return self.plain_types[[*kinds], stage] + unit_class
        _, stages, options, classes = self.shape
        return ((np.array(kinds) * stages + stage) * options + option) * classes + unit_class

    @cached_property
    def plain_types(self) -> Ints:
        """Type of each kind on each stage where no option is named, in the first class: an array (kinds, stages)."""
        kinds, stages, options, classes = self.shape
        rows = np.arange(kinds * stages).reshape(kinds, stages) * options
        rows[[*codes(COPIES)]] += self.whole_option
        return _frozen(rows * classes)

    @cached_property
    def duration_us(self) -> Floats:
        """Duration of an op of each type; NaN where the option has no such op."""
        of_stages = np.array([row.duration(self.times_us) for row in ROWS]).ravel()
        return _frozen(np.concatenate([of_stages, *(one.duration_us.ravel() for one in self.passes)]))

    def type_of(self, kind: str, stage: int, option: int, unit: int) -> int:
        """Type of the op of a unit in an option; of a spread pass on the device `stage`."""
        if kind not in CODE:
            number = [one.name for one in self.passes].index(kind) * len(self.passes[0].duration_us) + stage
            return prod(self.shape) + number * self.shape[3] + int(self.unit_class[unit])
        _, stages, options, classes = self.shape
        return ((CODE[kind] * stages + stage) * options + option) * classes + int(self.unit_class[unit])

    def kind_with(self, duty: str, stage: int) -> Kind:
        """The first kind of op that may do a duty on a stage: where backwards are in one piece, that which is whole."""
        return next(row for row in ROWS if duty in row.duties and (self.splits[stage] or row.name not in HALVES))

    def has(self, kind: str, stage: int, option: int) -> bool:
        """True if a unit in an option may have an op of a kind there."""
        if kind in HALVES and not self.splits[stage]:
            return False
        return not np.isnan(self.of_stages(self.duration_us)[CODE[kind], stage, option, 0])

    def chains(self, stage: int, option: int) -> Sequence[tuple[str, ...]]:
        """All sets of kinds with which a unit in an option can do each of its duties there once, in their order."""
        kinds = [kind for kind in KINDS if self.has(kind, stage, option)]

        def covers(left: Sequence[str]) -> Iterator[tuple[str, ...]]:
            if not left:
                yield ()
            for kind in kinds:
                own = KIND[kind].duties
                if left and left[0] in own and {*own} <= {*left}:
                    yield from ((kind, *others) for others in covers([duty for duty in left if duty not in own]))

        found = covers([duty for duty in PASSAGE if self.duties[duty][stage, option]])
        return [tuple(sorted(chain, key=lambda kind: PASSAGE.index(KIND[kind].duties[0]))) for chain in found]

    @cached_property
    def has_modes(self) -> Bools:
        """True for each stage whose units may be held in other options than kept, or offloaded whole."""
        return self.options > 1 + (self.whole_option > 0)

    @cached_property
    def trained(self) -> Bools:
        """True for each stage on which every unit does F, B and W, for which closed-form bounds and cuts are proved."""
        trained: Bools = np.all([self.duties[duty].all(axis=1) for duty in TRAINING], axis=0)
        return trained

    @cached_property
    def duties(self) -> Mapping[str, Bools]:
        """For each duty a mask (stages, options), True where a unit has to do it."""
        there = ~np.isnan(self.of_stages(self.duration_us))[..., 0]
        return {duty: np.any(there[[*doers]], axis=0) for duty, doers in DOERS.items()}

    @cached_property
    def device_bytes(self) -> Ints:
        """Changes of device memory at the start and at the end of an op of each type, of shape (types, 2)."""
        of_passes = []
        for n, one in enumerate(self.passes):
            freed = sum(other.kept_bytes for other in self.passes if other.freed_by == n)
            changes = one.kept_bytes + one.workspace_bytes, -one.workspace_bytes - freed
            of_passes.append(np.stack(changes, axis=-1).reshape(-1, 2))
        return self._by_type([row.device_change(self.sizes_bytes) for row in ROWS], of_passes)

    @cached_property
    def change_bytes(self) -> Ints:
        """Changes of device memory by a whole op of each type."""
        return _frozen(self.device_bytes.sum(axis=1))

    @cached_property
    def needed_bytes(self) -> Ints:
        """Device memory that must be free when an op of each type starts."""
        return _frozen(np.maximum(self.device_bytes[:, 0], self.change_bytes))

    @cached_property
    def host_bytes(self) -> Ints:
        """Changes of host memory, as `device_bytes`."""
        of_passes = [np.zeros((one.duration_us.size, 2), np.int64) for one in self.passes]
        return self._by_type([row.host_change(self.sizes_bytes) for row in ROWS], of_passes)

    def _by_type(self, changes: Sequence[tuple[Ints, Ints]], of_passes: Sequence[Ints]) -> Ints:
        table = np.zeros((*self.shape, 2), np.int64)
        for code, pair in enumerate(changes):
            table[code, ..., 0], table[code, ..., 1] = pair
        return _frozen(np.concatenate([table.reshape(-1, 2), *of_passes]))


A = TypeVar("A", Floats, Ints)


def _frozen(array: A) -> A:
    array.setflags(write=False)
    return array


def lower(problem: Problem) -> TaskGraph:
    """The task graph of a problem, made once for each object."""
    return problem.derived(_lowered)


def _lowered(problem: Problem) -> TaskGraph:
    stages, of_classes = problem.stages, problem.unit_stages
    options = np.array([len(stage.choices) for stage in stages])
    served = [(kind,) for kind in COPIES] if problem.copy_channels.duplex else [COPIES]
    return TaskGraph(
        device=np.array([stage.device for stage in stages]),
        options=options,
        whole_option=np.array([stage.choice_numbers.get(OFFLOAD, 0) for stage in stages]),
        splits=np.array([stage.split_backward for stage in stages]),
        unit_class=problem.unit_class,
        stages=[  # those of options that a stage does not have are never read
            [[(own, own.choices[min(n, len(own.choices) - 1)]) for own in classes] for n in range(options.max())]
            for classes in of_classes
        ],
        delays_us=problem.unit_delays_us,
        channels=[(group, kinds) for group in problem.channel_groups for kinds in served],
        passes=[_spread_task(problem, one) for one in problem.spread or ()],
        gates=_gates(problem),
    )


def _spread_task(problem: Problem, one: SpreadPass) -> SpreadTask:
    devices, passes = range(len(problem.devices)), problem.spread or ()
    factors = [problem.pass_factors(unit) for unit in problem.class_units]
    durations_us = [[scaled_us(one.us[d], own.time) if one.us[d] else np.nan for own in factors] for d in devices]
    kept, workspace = (
        np.array([[scaled_bytes(size(d), own.bytes) for own in factors] for d in devices], np.int64)
        for size in (one.kept, one.workspace)
    )
    freed_by = next((n for n, other in enumerate(passes) if other.frees == one.name), None)
    after = _lags(problem, one.after)
    return SpreadTask(one.name, np.array(durations_us, np.float64), kept, workspace, freed_by, after)


def _gates(problem: Problem) -> dict[tuple[str, int], list[Lag]]:
    gates: dict[tuple[str, int], list[Lag]] = {}
    for gate in problem.gates or ():
        gates.setdefault((gate.duty(problem.stages), gate.stage), []).extend(_lags(problem, gate.after))
    return gates


def _lags(problem: Problem, after: Sequence[AfterOp | AfterPass]) -> list[Lag]:
    factors = [problem.pass_factors(unit).transfer for unit in problem.class_units]
    lags = []
    for one in after:
        us = np.array([scaled_us(one.us, factor) for factor in factors], np.float64)[problem.unit_class]
        if isinstance(one, AfterPass):
            lags.append(Lag(us, problem.pass_names.index(one.pass_name)))
        else:
            lags.append(Lag(us, None, one.op, one.stage))
    return lags
