"""BW in place of B and W side by side, for stages whose backward cannot be split (compiled modules)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from optpipe.compile.actions import Action, Program
from optpipe.compile.events import with_events
from optpipe.compile.memory import action_effect
from optpipe.orders import Op
from optpipe.problem import Problem


def fuse_adjacent(program: Program, problem: Problem, stages: Collection[int] | None = None) -> Program:
    """Turn B and W of one stage and microbatch into BW where nothing else is on the compute stream between them.

    In `stages` alone, where given. The order of everything else stays; the gradient that B sends on leaves after BW.
    A pair stays as it is if an offload begins between B and W because B is over, or if the workspace of BW does not
    fit into the budget of its device.
    """
    pairs = {
        pair
        for d, actions in enumerate(program.devices)
        for pair in _pairs(actions, problem, problem.devices[d].memory_bytes)
        if stages is None or pair[0] in stages
    }
    return with_events(replace(program, devices=tuple(tuple(_fused(actions, pairs)) for actions in program.devices)))


def _pairs(actions: Sequence[Action], problem: Problem, budget: int | None) -> Iterator[tuple[int, int]]:
    """Stage and microbatch of what can be fused. A pair holds before and after what BW holds there."""
    for level, (before, *between, after) in _on_compute_stream(actions, problem):
        stage, b = problem.stages[after.stage], Op("B", *after[1:3])
        side_by_side = after.kind == "W" and before.key == b
        fits = budget is None or level + action_effect(stage, "BW").at_start <= budget
        if side_by_side and fits and not any(a.kind == "O" and b in a.waits for a in between):
            yield after.stage, after.microbatch


def _on_compute_stream(actions: Sequence[Action], problem: Problem) -> Iterator[tuple[int, Sequence[Action]]]:
    """Neighbours on the compute stream with what is issued between them, and the bytes held before the first."""
    places = [k for k, action in enumerate(actions) if action.stream == "compute"]
    level = 0
    for first, last in pairwise(places):
        yield level, actions[first : last + 1]
        level += sum(action_effect(problem.stages[actions[first].stage], actions[first].kind))


def _fused(actions: Sequence[Action], pairs: Collection[tuple[int, int]]) -> Iterator[Action]:
    for action in actions:
        key = _renamed(action.key, pairs)
        if action.kind != "W" or key == action.key:
            yield action._replace(kind=key.kind, waits=tuple(_renamed(wait, pairs) for wait in action.waits))


def _renamed(op: Op, pairs: Collection[tuple[int, int]]) -> Op:
    return Op("BW", *op[1:]) if op.kind in ("B", "W") and op[1:] in pairs else op
