"""REDUCE: when the gradients of a stage are complete, so that summing them over replicas can begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from optpipe.compile.actions import Action, Program


def insert_reduces(program: Program) -> Program:
    """REDUCE of every stage as soon as its last W or BW is issued, while the device goes on with its other stages.

    Replicas of a pipeline run equal lists, so all of them reduce a device's stages in the same order.
    """
    return replace(program, devices=tuple(tuple(_with_reduces(actions)) for actions in program.devices))


def _with_reduces(actions: Sequence[Action]) -> Iterator[Action]:
    last = {action.stage: k for k, action in enumerate(actions) if action.kind in ("W", "BW")}
    for k, action in enumerate(actions):
        yield action
        if last.get(action.stage) == k:
            yield Action("REDUCE", action.stage, 0)
