"""Modulo search: the smallest feasible period, then short blocks, then good ends (docs/math/pattern.md).

As in modulo scheduling (Rau 1994) the period, its initiation interval, is raised from the least that the devices' work
allows until a block fits. The value also has the two ends, whose time depends on the block, so many blocks are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import factorial

import numpy as np

from optpipe.errors import DeadlockError
from optpipe.ops import Ints, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.limits import Limits
from solver.search.annealing.table import budgets_bytes
from solver.search.modulo.beam import MOST_PERMUTATIONS, find_places
from solver.search.modulo.ends import FIRST_PLAYS, Ends, Filler, few_units, first_ends, tuned_ends
from solver.search.modulo.pattern import OffloadRelaxation, Passes, Pattern, orders_from_pattern, pattern_at
from solver.solution import OnSolution, Solution

LEANS = (0.15, 0.0, 0.4, 0.8)
"""Weights of late stages' waiting, tried in turn."""

SHARES = (0.0, 0.3, 0.6, 0.9)
"""Shares of the period's excess over the least that are tried next."""

LANES = (1, 2)
"""Microbatches per round, where all are alike: two only where one does not reach the least period."""

FIRST_WIDTH, MOST_WIDTH = 24, 1000
"""First and largest width of the beams, which double."""

MARGINS = (2, 1, 4)
"""Activations for which room is reserved where copies run while compute ops do, tried in turn."""

BEGIN_SHARE = 0.5
"""Largest share of the time for the first patterns of all searches, where there are several."""

TRIED_ENDS = 12
"""Patterns of one period whose ends are compared: this many, or up to twice as many, of those that fit."""

STRETCHED_AT_ONCE = 4
"""Blocks stretched before their ends are tuned and other blocks are looked for."""

IDLE_LEVELS = 2
"""Steps without better ends after which a block is not stretched further."""

LATE_ROUNDS = (0, 1, 3, 8, 20)
"""Rounds by which W may come later where memory allows, tried with each block."""

TUNING_STEPS = 400
"""Steps in which the ends of one pattern are tuned before another pattern is."""

WORTH_WRITING = 1.02
"""Largest ratio of a pattern's expected value to the best value with which its orders are built and simulated.

It is above 1 since the expected span begins every device as early as it can, so that the orders may be a little better.
"""


def modulo_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Orders that repeat one block in the middle, if they are better than the start's.

    Returns the start where no pattern fits the budgets, which does not prove that none exists.
    """
    passes, budgets = [Passes.of(problem, lanes) for lanes in LANES], budgets_bytes(problem)
    searches = [PatternSearch(problem, limits, on_solution, passes, budgets)]
    if any(stage.offload for stage in problem.stages):
        for relaxation in map(OffloadRelaxation, MARGINS):
            with_room = [relaxation.passes(problem, one) for one in passes]
            room = relaxation.budgets_bytes(problem, budgets)
            finish = partial(relaxation.orders, problem)
            searches.append(PatternSearch(problem, limits, on_solution, with_room, room, finish))
    return run_searches(searches, limits, start)


def run_searches(searches: Sequence[PatternSearch], limits: Limits, start: Solution) -> Solution:
    """Let all searches begin, then go on from the one with the smallest period, with equal parts of the limits."""
    best = start
    for part, search in _shared(limits.part(BEGIN_SHARE) if len(searches) > 1 else limits, searches):
        best = search.begin(part, best)
    return go_on(sorted(searches, key=lambda search: search.period_us), limits, best)


def go_on(searches: Sequence[PatternSearch], limits: Limits, best: Solution) -> Solution:
    """Let searches that have begun go on, with equal parts of the limits."""
    for part, search in _shared(limits, searches):
        best = search.go_on(part, best)
    return best


def _shared(limits: Limits, searches: Sequence[PatternSearch]) -> Iterator[tuple[Limits, PatternSearch]]:
    """Each search with its part: of all the work, or of the time that is left when its turn comes."""
    counted = limits.deterministic_limit is not None
    for k, search in enumerate(searches):
        yield limits.part(1 / len(searches) if counted else 1 / (len(searches) - k)), search


def fitting_patterns(
    passes: Passes,
    budgets: Ints,
    period_us: float,
    width: int,
    lean: float,
    rng: np.random.Generator,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Pattern]:
    """Patterns that repeat within the budgets, one microbatch every `period_us` (above 0); the shortest block first."""
    round_us = period_us * passes.lanes
    all_places = find_places(passes, round_us, width, lean, rng, stopped, budgets)
    patterns = [pattern_at(passes, places, round_us) for places in all_places]
    fitting = [pattern for pattern in patterns if pattern.keeps_order and (pattern.peak_bytes <= budgets).all()]
    return sorted(fitting, key=lambda pattern: pattern.block_us)


class PatternSearch:
    """One run: first `begin`, then `go_on`, each with its part of the limits and the best answer known by then.

    `best` is the best answer so far, `pattern` the one with the smallest period. Rounds are of `passes`, one for each
    number of lanes, the first of them at once, within `budgets` (bytes a device). `finish` makes orders of the problem
    of compute ops; without it these are the orders.
    """

    best: Solution

    def __init__(
        self,
        problem: Problem,
        limits: Limits,
        on_solution: OnSolution,
        passes: Sequence[Passes],
        budgets: Ints,
        finish: Callable[[Sequence[Sequence[Op]]], Iterable[Orders]] | None = None,
    ) -> None:
        self.problem = problem
        self.limits = limits
        self.on_solution = on_solution
        self.effort = WorkBudget(limits)
        self.rng = np.random.default_rng(limits.seed)
        self.passes = {one.lanes: one for one in passes}
        self.budgets = budgets
        self.finish = finish
        self.by_span = problem.objective == "device_span"
        self.first = passes[0]
        self.least_us = float(self.first.work_us().max()) / self.first.lanes
        self.pattern: Pattern | None = None
        self.choice: PooledPattern | None = None
        self.pool = PatternPool()
        self.ops = 3 * len(problem.stages) * problem.units
        self.offer_s = self.ops / WRITTEN_PER_SECOND  # what the last offer took: the next must have as much time

    @property
    def period_us(self) -> float:
        """The smallest period found so far, of a unit; infinity before there is one."""
        return self.pattern.period_us if self.pattern else np.inf

    @property
    def value_us(self) -> float:
        """The best value expected so far, of compute ops alone; infinity before there is one."""
        return self.choice.value_us if self.choice else np.inf

    def begin(self, limits: Limits, best: Solution, below_us: float = np.inf) -> Solution:
        """Find a first pattern quickly: from the least period up, in growing steps. Returns the best answer after it.

        At the last period microbatches follow one another, which always fits if anything does. Only periods `below_us`
        are tried.
        """
        self._resume(limits, best)
        period_us, step = self.least_us, 1.02
        alone_us = float(self.first.lag_us.sum() + self.first.duration_us.sum()) / self.first.lanes
        while self.least_us and period_us < below_us and not self._done():
            if self._try(self.first.lanes, min(period_us, alone_us), FIRST_WIDTH, LEANS[0]) or period_us >= alone_us:
                break
            period_us *= step
            step = min(step + 0.01, 1.1)
        return self.best

    def go_on(self, limits: Limits, best: Solution) -> Solution:
        """Find better patterns as long as there is time. Returns the best answer after it."""
        self._resume(limits, best)
        width = FIRST_WIDTH
        while self.pattern is not None and width <= MOST_WIDTH and not self._done():
            self._stretch()
            self._tune()
            width *= 2
            # With this width: periods that would be better than the best, and shorter blocks at the best.
            for lanes, lean, share in product(self.passes, LEANS, SHARES):
                excess_us = self.pattern.period_us - self.least_us
                if self._done():
                    break
                if excess_us or (lanes == self.first.lanes and share == 0):
                    self._try(lanes, self.least_us + share * excess_us, width, lean)
        while self.choice is not None and not self._done():
            self._stretch()
            self._tune()
        return self.best

    def _resume(self, limits: Limits, best: Solution) -> None:
        self.limits = self.effort.limits = limits
        self.best = best

    def _done(self) -> bool:
        return self.effort.spent() or self.limits.reached(self.best.value_us, self.best.bound_us)

    def _try(self, lanes: int, period_us: float, width: int, lean: float) -> bool:
        """Look for patterns of this period. True if one has a smaller period than the best so far."""
        passes = self.passes[lanes]
        orders = MOST_PERMUTATIONS
        if passes.ordered:  # mostly of one stage a device, so that there are few
            stages = int(np.bincount(passes.device).max()) // (3 * passes.lanes)
            orders = min(factorial(2 * stages), MOST_PERMUTATIONS) + 2
        self.effort.place(2 * orders * width * passes.size)  # each is tried twice
        fitting = fitting_patterns(passes, self.budgets, period_us, width, lean, self.rng, self.effort.spent)
        if not fitting:
            return False
        best = self.pattern
        better = best is None or period_us < best.period_us
        if better or (best and (period_us, fitting[0].block_us) < (best.period_us, best.block_us)):
            self.pattern = fitting[0]
        for pattern in fitting[:: max(1, len(fitting) // TRIED_ENDS)]:
            if self._done():
                break
            self._compare(pattern, pattern)
        return better

    def _compare(self, pattern: Pattern, base: Pattern) -> bool:
        """Try simple ends of a pattern. True if they are the best so far of all that its base was stretched to."""
        if not self.pool.is_new(pattern):
            return False
        few = self._filler(pattern, few_units(pattern, self.problem.units))
        value, ends = first_ends(few)
        self.effort.play(FIRST_PLAYS * len(few.planned))
        return self._keep(PooledPattern(base, pattern, ends, self._expected_us(few, pattern, value)))

    def _stretch(self) -> None:
        """Stretch some of the blocks of the pool: ever longer ones, while memory allows and the ends get better."""
        for _ in range(STRETCHED_AT_ONCE):
            base = None if self._done() else self.pool.next_to_stretch()
            if base is None:
                return
            candidates, idle_levels = [base], 0
            while candidates and idle_levels < IDLE_LEVELS:
                best = None
                for candidate, most in product(candidates, LATE_ROUNDS):
                    if self._done():
                        return
                    if self._compare(candidate.with_late_weights(self.budgets, most), base):
                        best = candidate
                idle_levels = 0 if best else idle_levels + 1
                candidates = self._longer(best or candidates[0])

    def _longer(self, pattern: Pattern) -> list[Pattern]:
        """The pattern stretched at the turn or before it, or evenly over the forwards, the backwards or both.

        Stretched evenly by a round for each device, the first device gets through the warm-up without waiting; fewer
        rounds take less memory.
        """
        count, devices = self.first.model_stages, self.first.devices
        last = 2 * count - 1
        rounds = sorted({1, 2, max(1, devices // 4), max(1, devices // 2), devices})
        spreads = ((count, 1), (count // 2, 1), (count, count), (last, last), (last, count))
        longer = [pattern.stretched(at, more, over) for (at, over), more in product(spreads, rounds)]
        return [pattern for pattern in longer if (pattern.peak_bytes <= self.budgets).all()]

    def _tune(self) -> None:
        """Tune the ends of one of the best patterns."""
        choice = self.pool.next_to_tune(self.rng)
        if choice is None:
            return
        pattern = choice.pattern
        few = self._filler(pattern, few_units(pattern, self.problem.units))

        def stopped() -> bool:
            self.effort.play(len(few.planned))
            return self._done()

        value, ends = tuned_ends(few, choice.ends, TUNING_STEPS, self.rng, stopped)
        self._keep(PooledPattern(choice.base, pattern, ends, self._expected_us(few, pattern, value)))

    def _filler(self, pattern: Pattern, units: int) -> Filler:
        return Filler(pattern, self.first, units, self.budgets, self.by_span)

    def _expected_us(self, few: Filler, pattern: Pattern, value_us: float) -> float:
        """The value for all units, from that for few: each further one takes a period."""
        return value_us + (self.problem.units - few.units) * pattern.period_us

    def _keep(self, choice: PooledPattern) -> bool:
        """Offer the orders if they may be better than the best. True if the pattern is the best of its base.

        Where orders are finished the value is known only after that, so the best pattern of every base is tried.
        """
        if choice.value_us == np.inf:
            return False
        better = self.pool.keep(choice)
        best = self.choice is None or choice.value_us < self.choice.value_us
        if best:
            self.choice = choice
        if best or (better and self.finish and choice.value_us < self.best.value_us):
            self._offer(choice)
        return better

    def _offer(self, choice: PooledPattern) -> None:
        """Report the orders for all microbatches if they are better than the best."""
        began = self.effort.seconds
        if choice.value_us > WORTH_WRITING * self.best.value_us or began + self.offer_s > self.effort.allowed:
            return
        filler = self._filler(choice.pattern, self.problem.units)
        orders = orders_from_pattern(self.problem, filler.orders(choice.ends))
        try:
            for whole in self.finish([device.compute for device in orders.devices]) if self.finish else [orders]:
                self._report(whole)
        except DeadlockError:
            pass  # passes without length at one instant may wait for one another in a cycle
        self.effort.write(self.ops)
        self.offer_s = self.effort.seconds - began

    def _report(self, orders: Orders) -> None:
        simulation = simulate(self.problem, orders)
        value = simulation.value_us
        if value < self.best.value_us and within_budgets(self.problem, orders, simulation):
            self.best = Solution(orders, value, self.best.bound_us)
            self.on_solution(self.best)


TUNED = 0.8
"""Probability that the best pattern is tuned; of the others the next best with the same probability, and so on."""

KEPT = 200
"""Largest number of blocks in the pool: those with the best ends."""


@dataclass(frozen=True)
class PooledPattern:
    """A pattern with its ends, its expected value with them, and the block that it was stretched from."""

    base: Pattern
    pattern: Pattern
    ends: Ends
    value_us: float


class PatternPool:
    """The best pattern of each block. The ends of a block are known only once it has been stretched and tuned.

    So not only the block with the best ends before that is stretched: in turns the one with the best ends and the
    shortest one.
    """

    def __init__(self) -> None:
        self._choices: dict[bytes, PooledPattern] = {}
        self._seen: set[bytes] = set()
        self._stretched: set[bytes] = set()

    def is_new(self, pattern: Pattern) -> bool:
        """True on the first call with a pattern of this period and these orders."""
        before = len(self._seen)
        self._seen.add(pattern.key)
        return len(self._seen) > before

    def keep(self, choice: PooledPattern) -> bool:
        """Keep a pattern if it is the best of its block. True if it is."""
        key = choice.base.key
        best = self._choices.get(key)
        if best is not None and best.value_us <= choice.value_us:
            return False
        self._choices[key] = choice
        if len(self._choices) > KEPT:
            del self._choices[max(self._choices, key=lambda key: self._choices[key].value_us)]
        return True

    def next_to_stretch(self) -> Pattern | None:
        """A block that was not returned before; None after the last."""
        waiting = [(key, choice) for key, choice in self._choices.items() if key not in self._stretched]
        if not waiting:
            return None
        by_value = len(self._stretched) % 2 == 0
        key, choice = min(waiting, key=lambda pair: pair[1].value_us if by_value else pair[1].base.block_us)
        self._stretched.add(key)
        return choice.base

    def next_to_tune(self, rng: np.random.Generator) -> PooledPattern | None:
        """A random pattern, better ones with a higher probability (geometric in the rank)."""
        if not self._choices:
            return None
        ranked = sorted(self._choices.values(), key=lambda choice: choice.value_us)
        return ranked[min(int(rng.geometric(TUNED)) - 1, len(ranked) - 1)]


PLACED_PER_SECOND = 400_000
"""Passes that the beam places in about a second."""

PLAYED_PER_SECOND = 2_000_000
"""Ops that are played in about a second."""

WRITTEN_PER_SECOND = 200_000
"""Ops of orders that are built and simulated in about a second."""


@dataclass
class WorkBudget:
    """Counts work where the limits are deterministic, else reads the clock. `work` is in units of about a second."""

    limits: Limits
    work: float = 0.0

    def place(self, passes: int) -> None:
        """Count passes that are placed."""
        self.work += passes / PLACED_PER_SECOND

    def play(self, ops: int) -> None:
        """Count ops that are played."""
        self.work += ops / PLAYED_PER_SECOND

    def write(self, ops: int) -> None:
        """Count ops of orders that are built and simulated."""
        self.work += ops / WRITTEN_PER_SECOND

    def spent(self) -> bool:
        """True if the search must end."""
        return self.limits.cancel.requested or self.seconds >= self.allowed

    @property
    def allowed(self) -> float:
        """Seconds or units of work in all."""
        allowed = self.limits.deterministic_limit
        return self.limits.time_limit_s if allowed is None else allowed

    @property
    def seconds(self) -> float:
        """Seconds or units of work so far."""
        return self.limits.seconds if self.limits.deterministic_limit is None else self.work
