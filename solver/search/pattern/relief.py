"""Patterns of problems that may offload: memory is counted as if all that may leave had left, and copies are played.

An activation that may leave counts while its F runs and again from the start of its B, not in between. Copies take
time, so some room of each device is set aside for what is on its way. The transfers themselves follow from the compute
orders (`solver.published.transfers`), which keep the real budgets and channels, at the price of waiting where the
room set aside was too small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from solver.published.transfers import TransferPlanner, Wish
from solver.search.pattern.passes import Ints, Passes

LEADS = (1.0, 3.0)
"""Reload times before its B at which an activation may come back."""


@dataclass(frozen=True)
class Relief:
    """Everything that may leave does; room for the largest activation of a device is set aside `margin` times."""

    margin: int

    def passes(self, problem: Problem, passes: Passes) -> Passes:
        """The passes with the memory that is left to them."""
        moved = np.tile(_moved_bytes(problem), passes.lanes)
        nothing = np.zeros_like(moved)
        return replace(
            passes,
            stage_bytes=passes.stage_bytes - moved,
            at_start=passes.at_start + np.concatenate([nothing, moved, nothing]),
            at_end=passes.at_end - np.concatenate([moved, nothing, nothing]),
        )

    def budgets_bytes(self, problem: Problem, budgets: Ints) -> Ints:
        """The budgets without the room set aside."""
        moved = _moved_bytes(problem)
        largest = [max((int(moved[s]) for s in here), default=0) for here in problem.stages_of]
        return budgets - self.margin * np.array(largest, np.int64)

    def orders(self, problem: Problem, compute: Sequence[Sequence[Op]]) -> Iterator[Orders]:
        """The compute orders with transfers, in as many ways as can be played, each made when it is asked for."""
        leaving = {
            (s, i)
            for (s, stage), i in product(enumerate(problem.stages), range(problem.microbatches))
            if stage.offload and stage.offload.bytes
        }
        budgets = [device.memory_bytes for device in problem.devices]
        planner = TransferPlanner(problem, compute)
        for lead in LEADS:
            orders = planner.plan(Wish(leaving, lead), budgets)
            if orders is not None:
                yield orders


def _moved_bytes(problem: Problem) -> Ints:
    return np.array([stage.offload.bytes if stage.offload else 0 for stage in problem.stages], np.int64)
