"""Patterns with a mode for each position: rounds of several microbatches, some of them recomputed on each stage.

Which stages recompute how many positions is part of the search: the least that a device needs to be full on average,
and ever more. Rounds are tried in the order of the least period that their work allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from optpipe.ops import Bools, Floats, Op, Orders
from optpipe.problem import Problem
from solver.by_stage import ByStage, keep_what_fits
from solver.limits import Limits
from solver.plan_player import pass_costs
from solver.search.annealing.table import budgets_bytes
from solver.search.modulo.pattern import Passes
from solver.search.modulo.search import PatternSearch, WorkBudget
from solver.solution import OnSolution, Solution
from solver.variants import Variant, variants


@dataclass(frozen=True)
class ModeRound:
    """A round in which position l of stage s is recomputed, by the stage's variant, where ``recomputed[s, l]``.

    `kept`: the choice of keeping every microbatch, which the other positions take.
    """

    by_stage: ByStage
    kept: ByStage
    recomputed: Bools

    def passes(self) -> Passes:
        """The passes of the round: lanes with the costs of their modes.

        A backward that recomputes ahead is one pass with its C, which begins as long before the gradient comes as C
        takes, but not before the end of its F, however quickly the microbatch gets through the stages behind.
        """
        problem, kept, again = self.by_stage.problem, self.kept.plain.stages, self.by_stage.plain.stages
        single, count = Passes.of(self.kept.plain), len(kept)
        start = single.alone_us()
        slack = start[count : 2 * count] - start[:count] - single.duration_us[:count]
        before = np.array([variant.mode.recompute_us if variant.ahead else 0.0 for variant in self.by_stage.chosen])
        lanes, costs = [], []
        for position in self.recomputed.T:
            stages = [again[s] if of_stage else kept[s] for s, of_stage in enumerate(position.tolist())]
            own = pass_costs(problem.replaced(stages=stages))
            delay = own.delay_us.copy()
            delay[count : 2 * count] -= np.where(position, np.minimum(before, slack), 0.0)
            lanes.append(stages)
            costs.append(replace(own, delay_us=delay))
        return Passes.of_lanes(costs, lanes, range(len(lanes)))

    def orders(self, compute: Sequence[Sequence[Op]]) -> Iterator[Orders]:
        """Orders with the modes; microbatches of the warm-up and cool-down are kept where there is room."""
        problem = self.by_stage.problem
        positions = np.arange(problem.units) % self.recomputed.shape[1]
        orders = self.by_stage.with_modes(Orders.of_compute(compute), self.recomputed[:, positions])
        if orders is not None:
            yield keep_what_fits(problem, orders)


LANES = (1, 2, 3, 4)
"""Microbatches in a round."""

FULLNESS = tuple(1 - 0.05 * k for k in range(14))
"""Shares of a budget, on average over a period, for which positions are recomputed."""

GO_ON = 3
"""Number of rounds that are searched further: those with the best values so far."""


def can_alternate(chosen: Sequence[Variant]) -> bool:
    """True if some variant recomputes and none moves bytes, so that others may be kept in its place."""
    return any(variant.mode.recomputes for variant in chosen) and not any(variant.moved_bytes for variant in chosen)


def begin_rounds(
    plan: ByStage, limits: Limits, best: Solution, on_solution: OnSolution
) -> tuple[Sequence[PatternSearch], Solution]:
    """Begin searches of rounds whose positions are kept or take the plan's variant (`can_alternate`).

    Returns the searches that are worth going on with, best first, and the best answer so far.
    """
    problem, budgets, kept = plan.problem, budgets_bytes(plan.problem), keeping(plan.problem)
    shares = [planned_shares(plan, kept, fullness) for fullness in FULLNESS]
    rounds = [spread_positions(share, lanes) for lanes, share in product(LANES, shares)]
    searches = []
    for recomputed in {of_round.tobytes(): of_round for of_round in rounds}.values():
        mode_round = ModeRound(plan, kept, recomputed)
        passes = [mode_round.passes()]
        searches.append(PatternSearch(problem, limits, on_solution, passes, budgets, mode_round.orders))
    searches.sort(key=lambda search: search.least_us)
    shared = WorkBudget(limits)
    for search in searches:
        period_us = min(search.period_us for search in searches)
        if search.least_us < period_us:
            own, search.effort = search.effort, shared
            best = search.begin(limits, best, period_us)
            search.effort = own
    begun = [search for search in searches if search.value_us < np.inf]
    return sorted(begun, key=lambda search: search.value_us)[:GO_ON], best


def planned_shares(plan: ByStage, kept: ByStage, fullness: float) -> Floats:
    """For each stage the share of microbatches to recompute, so that devices are at most that full on average.

    A microbatch holds its activation at least as long as it takes alone through the stages behind. In a period T a
    device offers T times its budget (bytes times us); a recomputed microbatch takes less of it, and lengthens T. Of the
    stages of a device the one that frees most for its time is recomputed first.
    """
    single, count = Passes.of(kept.plain), len(plan.chosen)
    device, budgets = single.device[:count], budgets_bytes(plan.problem)
    start, us = single.alone_us(), single.duration_us.reshape(3, count)
    life = start[count : 2 * count] + us[1] - start[:count]
    held = life * single.stage_bytes + us[2] * single.weight_bytes
    again_us = np.array([float(variant.mode.recompute_us) for variant in plan.chosen])
    waiting = np.array([variant.waiting_bytes for variant in plan.chosen])
    segments = np.array([variant.backward_bytes for variant in plan.chosen]) - waiting
    freed = np.maximum(life * (single.stage_bytes - waiting) - segments * (us[1] + again_us), 0)
    recomputes = np.array([variant.mode.recomputes for variant in plan.chosen])
    order = np.argsort(-freed / np.maximum(again_us, 1e-9), kind="stable")
    work, shares = single.work_us(), np.zeros(count)
    for _ in range(PERIODS):
        period_us = (work + np.bincount(device, shares * again_us, single.devices)).max()
        over = np.bincount(device, held, single.devices) - fullness * period_us * budgets
        shares = np.zeros(count)
        for s in order[recomputes[order] & (freed[order] > 0)]:
            shares[s] = min(max(over[device[s]] / freed[s], 0.0), 1.0)
            over[device[s]] -= shares[s] * freed[s]
    return shares


PERIODS = 20
"""Iterations in which shares and the period that follows from them are made to agree: a few are enough."""


def keeping(problem: Problem) -> ByStage:
    """The choice of keeping every microbatch on all stages."""
    return ByStage(problem, [variants(stage)[0] for stage in problem.stages])


def spread_positions(shares: Floats, lanes: int) -> Bools:
    """Positions of a round, evenly spread, for the share of each stage, rounded up; of shape (stages, lanes)."""
    counts = np.ceil(shares * lanes - 1e-6)[:, None]
    position = np.arange(lanes)
    spread: Bools = np.floor((position + 1) * counts / lanes) > np.floor(position * counts / lanes)
    return spread
