"""Costs of ops: the duration, and the effect on device and host memory, of each kind on each stage in each mode.

An op changes memory twice: it takes bytes at its start, and changes the level (by either sign) at its end. Which mode
the activation of a microbatch is in decides what its F leaves, whether O and R move it, and whether C, or a CB or CBW
that recomputes inside the backward, makes it anew. Where units (microbatches, or slices of them) have costs of their
own, a function of this module is given the stage with those of the unit, `Problem.stage_of`.

`Costs` gives columns for columns of ops. `verify` and `worst_case_memory` read the rules for themselves and use nothing
of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.kinds import COPIES, KIND, KINDS, SizeName, TimeName
from optpipe.ops import OpArray
from optpipe.problem import Problem
from optpipe.stage import OFFLOAD, Mode, Stage, UnitStage

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Effect(NamedTuple):
    """Bytes that an op takes at its start (at least 0), and the signed change at its end."""

    at_start: int
    at_end: int

    @property
    def releases(self) -> bool:
        """True if the op frees memory at its end."""
        return self.at_end < 0

    @property
    def acquires(self) -> bool:
        """True if memory can rise while the op runs or at its end."""
        return self.at_start > 0 or self.at_start + self.at_end > 0


def implied_mode(stage: Stage, kind: str) -> Mode:
    """The mode of a microbatch whose op this is where no mode is named: a copy is of one offloaded whole."""
    return stage.choices[stage.choice_numbers.get(OFFLOAD, 0) if kind in COPIES else 0]


def times_us(stage: Stage, mode: Mode) -> dict[TimeName, float]:
    """Times of a microbatch in a mode, of which durations of ops consist; NaN for what it does not do."""
    copy, again = mode.offload, mode.recompute_us if mode.recomputes else nan
    return {
        "forward": stage.forward_us,
        "backward_input": stage.backward_input_us,
        "backward_weight": stage.backward_weight_us,
        "offload": copy.offload_us if copy else nan,
        "reload": copy.reload_us if copy else nan,
        "recompute": again,
        "recompute_inside": nan if mode.segment_bytes is None else again,
    }


def sizes_bytes(stage: Stage, mode: Mode) -> dict[SizeName, int]:
    """Sizes of a microbatch in a mode, which its ops take and free."""
    work = stage.workspace_bytes
    taken, freed = (
        (stage.gradients_taken_bytes, stage.gradients_freed_bytes) if isinstance(stage, UnitStage) else (0, 0)
    )
    return {
        "kept": mode.kept_bytes,
        "activation": stage.activation_bytes,
        "backward_weight": stage.backward_weight_bytes,
        "recomputed": mode.recomputed_bytes,
        "segment": mode.segment_bytes or 0,
        "copied": mode.offload.bytes if mode.offload else 0,
        "gradients_taken": taken,
        "gradients_freed": freed,
        "forward_workspace": mode.forward_workspace_bytes,
        "recompute_workspace": mode.workspace_bytes,
        "workspace_F": work.F,
        "workspace_B": work.B,
        "workspace_W": work.W,
        "workspace_BW": work.BW,
    }


def duration_us(stage: Stage, kind: str, mode: Mode | None = None) -> float:
    """Duration of an op of `kind` for a microbatch in `mode` (default: `implied_mode`); NaN if it has no such op."""
    times = times_us(stage, mode or implied_mode(stage, kind))
    return sum(times[name] for name in KIND[kind].times)


def device_effect(stage: Stage, kind: str, mode: Mode | None = None) -> Effect:
    """Effect on its device's memory of an op of `kind` for a microbatch in `mode` (default: `implied_mode`)."""
    sizes, row = sizes_bytes(stage, mode or implied_mode(stage, kind)), KIND[kind]
    taken, during, freed, left = (
        sum(sizes[name] for name in names) for names in (row.takes, row.during, row.frees, row.leaves)
    )
    return Effect(taken + during, left - freed - during)


def host_effect(stage: Stage, kind: str, mode: Mode | None = None) -> Effect:
    """Effect of an op on host memory: the buffer is held from the start of O to the end of R."""
    sizes, row = sizes_bytes(stage, mode or implied_mode(stage, kind)), KIND[kind]
    return Effect(sum(sizes[name] for name in row.host_takes), -sum(sizes[name] for name in row.host_frees))


def effect_table(problem: Problem, effect: Callable[[Stage, str], Effect]) -> Ints:
    """Effects of every kind of op on every stage where no mode is named: bytes at start and end, (kinds, stages, 2)."""
    return np.array([[effect(stage, kind) for stage in problem.stages] for kind in KINDS], np.int64)


class Costs:
    """Costs of the ops of a problem.

    `modes`: the mode of each unit on each stage, of shape (stages, units), as in `Orders`; None where each
    is kept, or offloaded whole.
    """

    def __init__(self, problem: Problem, modes: Ints | None = None) -> None:
        self.problem = problem
        self.modes = modes

    def duration_us(self, ops: OpArray) -> Floats:
        """Duration of each op; NaN for one that its microbatch's mode does not have."""
        return self._durations[self._rows(ops)]

    def device_effects(self, ops: OpArray) -> Ints:
        """Changes of device memory at the start and end of each op: bytes, of shape (ops, 2)."""
        return self._device_effects[self._rows(ops)]

    def host_effects(self, ops: OpArray) -> Ints:
        """Changes of host memory at the start and end of each op: bytes, of shape (ops, 2)."""
        return self._host_effects[self._rows(ops)]

    def _rows(self, ops: OpArray) -> tuple[Ints, ...]:
        rows = [ops.kind, ops.stage]
        if self.modes is not None:
            rows.append(self.modes[ops.stage, ops.microbatch])
        if self.problem.has_factors:
            rows.append(self.problem.unit_class[ops.microbatch])
        return tuple(rows)

    @cached_property
    def _durations(self) -> Floats:
        return self._table(duration_us).astype(np.float64)

    @cached_property
    def _device_effects(self) -> Ints:
        return self._table(device_effect).astype(np.int64)

    @cached_property
    def _host_effects(self) -> Ints:
        return self._table(host_effect).astype(np.int64)

    def _table(self, cost: Callable[[Stage, str, Mode | None], float | Effect]) -> NDArray[Any]:
        """Cost of each kind on each stage, by mode if there are modes, and by class of units if there are factors.

        Those of modes that a stage does not have are never read.
        """
        if self.modes is None and not self.problem.has_factors:
            return np.array([[cost(stage, kind, None) for stage in self.problem.stages] for kind in KINDS])
        of_classes = self.problem.unit_stages
        most = max(len(stage.choices) for stage in self.problem.stages)

        def modes(stage: Stage) -> Sequence[Mode | None]:
            return [None] if self.modes is None else stage.choices + stage.choices[:1] * (most - len(stage.choices))

        def of_stage(kind: str, classes: Sequence[Stage]) -> list[list[float | Effect]]:
            costs = [[cost(stage, kind, mode) for mode in modes(stage)] for stage in classes]
            return [list(column) for column in zip(*costs, strict=True)]

        table = np.array([[of_stage(kind, classes) for classes in of_classes] for kind in KINDS])
        if not self.problem.has_factors:
            table = table[:, :, :, 0]
        return table if self.modes is not None else table[:, :, 0]
