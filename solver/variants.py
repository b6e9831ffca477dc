"""Variants: how the activation of one microbatch on one stage may be held, by mode and by form of recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from optpipe.kinds import INSIDE
from optpipe.problem import Problem
from optpipe.stage import Mode, Stage
from optpipe.task_graph import lower


class Variant(NamedTuple):
    """A mode of a stage, `stage.choices[choice]`. `inside`: the backward recomputes within itself (CB, CBW)."""

    choice: int
    mode: Mode
    inside: bool = False

    @property
    def ahead(self) -> bool:
        """True if an op C makes the activation anew before the backward."""
        return self.mode.recomputes and not self.inside

    @property
    def moved_bytes(self) -> int:
        """Bytes that are on the host between O and R."""
        return self.mode.offload.bytes if self.mode.offload else 0

    @property
    def waiting_bytes(self) -> int:
        """Least bytes on the device between F and the backward."""
        return self.mode.kept_bytes - self.moved_bytes

    @property
    def backward_bytes(self) -> int:
        """Bytes of the activation on the device while the backward runs, without the op's own workspace."""
        segment = self.mode.segment_bytes or 0 if self.inside else self.mode.recomputed_bytes
        return self.mode.kept_bytes + segment


def variants(stage: Stage) -> Sequence[Variant]:
    """The variants of a stage, `kept` first. A copy of no bytes is left out: it frees nothing and takes time."""
    result = []
    for choice, mode in enumerate(stage.choices):
        if not mode.recomputes and choice and not (mode.offload and mode.offload.bytes):
            continue  # no other than to keep
        result.append(Variant(choice, mode))
        if mode.recomputes and mode.segment_bytes is not None:
            result.append(Variant(choice, mode, inside=True))
    return result


def fitting_variants(problem: Problem, stage: int) -> Sequence[Variant]:
    """The variants of a stage with which a microbatch keeps all budgets if it is alone; all if none is so.

    No schedule that keeps the budgets has another one, but where microbatches have costs of their own.
    """
    own, host = problem.stages[stage], problem.host_memory_bytes
    budget = problem.devices[own.device].memory_bytes
    every = variants(own)
    return [
        variant
        for variant in every
        if (host is None or variant.moved_bytes <= host)
        and (budget is None or _alone_bytes(problem, stage, variant) <= budget)
    ] or every


def _alone_bytes(problem: Problem, stage: int, variant: Variant) -> int:
    """The peak of a microbatch alone, with a split or a fused backward, whichever needs less."""
    graph = lower(problem)
    peaks = []
    for kinds in graph.chains(stage, variant.choice):
        if variant.inside == any(kind in INSIDE for kind in kinds):
            changes = graph.device_bytes[[graph.type_of(kind, stage, variant.choice, 0) for kind in kinds]]
            peaks.append(int(changes.cumsum().max()))
    return min(peaks)


def unit_variants(problem: Problem, stage: int, unit: int) -> Sequence[Variant]:
    """The variants of a stage for one of its units: those of the stage, whatever the unit's factors leave of them."""
    choices = problem.stage_of(stage, unit).choices
    return [variant._replace(mode=choices[variant.choice]) for variant in variants(problem.stages[stage])]


def without_unusable_offloads(problem: Problem) -> Problem:
    """The problem without offloads for which the host has no room, whatever else it holds; itself where there are none.

    The same schedules keep the budgets of both.
    """
    return problem.derived(_without_unusable_offloads)


def _without_unusable_offloads(problem: Problem) -> Problem:
    host = inf if problem.host_memory_bytes is None else problem.host_memory_bytes
    unusable = [
        stage.offload is not None and all(own.offload.bytes > host for own in of_classes if own.offload)
        for stage, of_classes in zip(problem.stages, problem.unit_stages, strict=True)
    ]
    if not any(unusable):
        return problem
    stages = [
        stage.replaced(offload=None) if left_out else stage
        for stage, left_out in zip(problem.stages, unusable, strict=True)
    ]
    return problem.replaced(stages=stages)
