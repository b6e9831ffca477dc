"""What one microbatch of one stage holds on its device, and from when to when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ortools.sat.python import cp_model

from solver.exact.cp_sat.variables import Moment, Task, Variables


class Held(NamedTuple):
    """A number of bytes held from one moment to another, if `presence` (None: always); for `least` ticks at least."""

    size: int
    first: Moment
    last: Moment
    presence: cp_model.BoolVarT | None = None
    least: int = 0


def held(variables: Variables, s: int, i: int) -> Iterator[Held]:
    """All pieces of microbatch i on stage s.

    A part is freed at B's end, the rest at W's end. If B holds more after its end than before, the difference
    counts from B's start: no wait could keep B from ending before another op has freed memory. A fused backward frees
    all at its end, and has a workspace of its own.
    """
    return (piece for piece in _pieces(variables, s, i) if piece.size > 0)


def _pieces(variables: Variables, s: int, i: int) -> Iterator[Held]:
    stage, leaves = variables.problem.stages[s], variables.leaves.get((s, i))
    forward, backward, weight = (variables.task(kind, s, i) for kind in "FBW")
    kept = min(stage.backward_weight_bytes, stage.activation_bytes)
    freed_by_backward = stage.activation_bytes - kept
    moved = stage.offload.bytes if leaves is not None and stage.offload else 0
    moved_early = min(moved, freed_by_backward)
    yield from _activation(variables, s, i, "B", freed_by_backward, moved_early)
    yield from _activation(variables, s, i, "BW", kept, moved - moved_early)
    grown = stage.backward_weight_bytes - kept
    fused, work, both = variables.fused.get((s, i)), stage.workspace_bytes, backward.ticks + weight.ticks
    split = None if fused is None else ~fused
    yield Held(grown, start(backward), end(weight), split, both)
    yield Held(work.F, start(forward), end(forward))
    yield Held(max(work.B - grown, 0), start(backward), end(backward), split)
    yield Held(work.W, start(weight), end(weight), split)
    if fused is not None:
        yield Held(freed_by_backward, start(weight), end(weight), fused)
        yield Held(work.BW, start(backward), end(weight), fused, both)


def _activation(variables: Variables, s: int, i: int, until: str, size: int, moved: int) -> Iterator[Held]:
    """Bytes held from F's start to the end of `until`'s last op, of which `moved` may be away between O and R."""
    forward, last = variables.task("F", s, i), variables.task(until[-1], s, i)
    back = _ticks(variables, until, s)
    life = variables.round_trips[s] + back
    yield Held(size - moved, start(forward), end(last), None, life)
    if moved:
        leaves = variables.leaves[s, i]
        offload, reload = variables.task("O", s, i), variables.task("R", s, i)
        yield Held(moved, start(forward), end(last), ~leaves, life)
        yield Held(moved, start(forward), end(offload), leaves, forward.ticks + offload.ticks)
        yield Held(moved, start(reload), end(last), leaves, reload.ticks + back)


def _ticks(variables: Variables, kinds: str, s: int) -> int:
    return sum(variables.length(kind, s) for kind in kinds)


def start(task: Task) -> Moment:
    """The moment at which a task starts."""
    return Moment(task, is_end=False)


def end(task: Task) -> Moment:
    """The moment at which a task ends."""
    return Moment(task, is_end=True)
