"""The figures of a measured step beside its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from optpipe.orders import Op
from optpipe.trace.precedence import Span

Basis = Literal["measured", "re-timed"]

LEAST_LIKE, MOST_LIKE = 0.5, 2.0
"""Work beyond these times the planned is hardly of the model and machine that the plan was made for."""


@dataclass(frozen=True)
class DeviceFigures:
    """One device. Bubbles are shares of the step.

    `hidden` is the share of its copies' time during which its process computed, always as it happened; None without
    copies. `schedule_peak_bytes` is the schedule's figure, the other two are the trace's.
    """

    planned_bubble: float
    bubble: float
    planned_busy_us: float
    busy_us: float
    planned_hidden: float | None
    hidden: float | None
    schedule_peak_bytes: int
    planned_peak_bytes: int | None
    peak_bytes: int

    @property
    def expected_peak_bytes(self) -> int:
        """What `peak_bytes` is to be held against: the plan with the model's own sizes, where they were measured."""
        return self.schedule_peak_bytes if self.planned_peak_bytes is None else self.planned_peak_bytes


@dataclass(frozen=True)
class KindFigures:
    """The ops of one kind on one stage: planned duration and the median of the measured ones."""

    kind: str
    stage: int
    ops: int
    planned_us: float
    median_us: float


@dataclass(frozen=True)
class TransferFigures:
    """Messages over a boundary (F: from stage b to b+1, B: back).

    Only a message that its receiver was already waiting for shows how long it took: `timed` of `messages`, and from
    the begin of its send to the begin of the op that used it `median_us`, None where no message was waited for.
    """

    direction: str
    boundary: int
    messages: int
    timed: int
    planned_us: float
    median_us: float | None


@dataclass(frozen=True)
class Difference:
    """An op that took longer (above 0) or shorter than planned; `on_path`: whether it is among those of PathFigures."""

    op: str
    device: int
    planned_us: float
    measured_us: float
    difference_us: float
    on_path: bool


@dataclass(frozen=True)
class PathFigures:
    """The chain of ops that decided when the step ended, each begun when the one before it let it.

    Along it, ops took `op_difference_us` longer than planned and the gaps between them (transfers, the host's work)
    `gap_difference_us`. The rest of the difference between the steps, `slack_us`, is what the plan had to spare along
    this chain, since another one decided its end.
    """

    ops: int
    op_difference_us: float
    gap_difference_us: float
    slack_us: float


@dataclass(frozen=True)
class Comparison:
    """All figures of a trace. A step is from the first start of an op to the last end, whatever the objective.

    `step_us` is by `basis`, `measured_step_us` always as it happened. `work_ratio` is the measured time of all compute
    ops over the planned one.
    """

    basis: Basis
    planned_step_us: float
    step_us: float
    measured_step_us: float
    work_ratio: float
    devices: tuple[DeviceFigures, ...]
    path: PathFigures
    differences: tuple[Difference, ...]
    kinds: tuple[KindFigures, ...]
    transfers: tuple[TransferFigures, ...]
    planned_spans: Mapping[Op, Span]
    """when each op was to run"""
    spans: Mapping[Op, Span]
    """when each op ran, by `basis`"""
    path_ops: frozenset[Op]
    """the ops of `path`"""

    @property
    def plan_fits(self) -> bool:
        """Whether the plan's durations are about those of what ran, so that times can be compared one to one."""
        return LEAST_LIKE <= self.work_ratio <= MOST_LIKE
