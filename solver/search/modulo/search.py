"""Modulo search: the smallest feasible period, then short blocks, then good ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from optpipe.errors import DeadlockError
from optpipe.ops import Ints, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.limits import Limits
from solver.search.annealing.sequence import budgets_bytes
from solver.search.modulo.ends import FIRST_PLAYS, Ends, Filler, few_microbatches, first_ends, tuned_ends
from solver.search.modulo.pattern import OffloadRelaxation, Passes, Pattern, orders_from_pattern, pattern_at
from solver.search.modulo.reservation_table import MOST_PERMUTATIONS, find_places
from solver.solution import OnSolution, Solution

LEANS = (0.15, 0.0, 0.4, 0.8)
"""Weighings of late stages' waiting, tried in turn."""

SHARES = (0.0, 0.3, 0.6, 0.9)
"""Parts of the period's excess over the least that are tried next."""

LANES = (1, 2)
"""Microbatches a round: two only where one does not reach the least period."""

FIRST_WIDTH, MOST_WIDTH = 24, 1000
"""First and largest width of the beams, which double."""

MARGINS = (2, 1, 4)
"""Activations for which room is set aside where copies run beside the compute ops, tried in turn."""

BEGIN_SHARE = 0.5
"""Most of the time for the first patterns of all searches, where there are several: then the most promising goes on."""

TRIED_ENDS = 12
"""Patterns of one period whose ends are compared: so many, or up to twice as many, of those found."""

STRETCHED_AT_ONCE = 4
"""Blocks stretched before their ends are tuned and other blocks are looked for."""

IDLE_LEVELS = 2
"""Steps without better ends after which a block is not stretched further."""

LATE_ROUNDS = (0, 1, 3, 8, 20)
"""Rounds by which W may come later where memory allows, tried with each block."""

TUNING_STEPS = 400
"""Changes of the ends of one pattern before the next pattern has its turn."""

WORTH_A_LOOK = 1.02
"""Orders are written down where their promise is at most this much above the best value: a promise of the largest
span begins every device as early as it can, so that the orders may be a little better."""


def modulo_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Orders that repeat one block in the middle, better than the start's where such are found.

    Answers with the start where no pattern fits the budgets, which does not prove that none exists.
    """
    best = start
    reliefs = (
        [OffloadRelaxation(margin) for margin in MARGINS] if any(stage.offload for stage in problem.stages) else []
    )
    searches = [PatternSearch(problem, limits, on_solution, relief) for relief in (None, *reliefs)]
    for part, search in _shared(limits.part(BEGIN_SHARE) if reliefs else limits, searches):
        best = search.begin(part, best)
    for part, search in _shared(limits, sorted(searches, key=lambda search: search.period_us)):
        best = search.go_on(part, best)
    return best


def _shared(limits: Limits, searches: list[PatternSearch]) -> Iterator[tuple[Limits, PatternSearch]]:
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
    """Patterns found that repeat within the budgets, one microbatch every `period_us`; the shortest block first."""
    round_us = period_us * passes.lanes
    found = [
        pattern_at(passes, places, round_us) for places in find_places(passes, round_us, width, lean, rng, stopped)
    ]
    fitting = [pattern for pattern in found if pattern.keeps_order and (pattern.peak_bytes <= budgets).all()]
    return sorted(fitting, key=lambda pattern: pattern.block_us)


class PatternSearch:
    """One run: first `begin`, then `go_on`, each with its part of the limits and the best answer known by then.

    `best` is the best answer so far, `pattern` the one with the smallest period. Without `relief` nothing is offloaded.
    """

    best: Solution

    def __init__(
        self, problem: Problem, limits: Limits, on_solution: OnSolution, relief: OffloadRelaxation | None
    ) -> None:
        self.problem = problem
        self.limits = limits
        self.on_solution = on_solution
        self.effort = WorkBudget(limits)
        self.rng = np.random.default_rng(limits.seed)
        self.relief = relief
        self.passes = {lanes: Passes.of(problem, lanes) for lanes in LANES}
        self.budgets = budgets_bytes(problem)
        if relief:
            self.passes = {lanes: relief.passes(problem, passes) for lanes, passes in self.passes.items()}
            self.budgets = relief.budgets_bytes(problem, self.budgets)
        self.by_span = problem.objective == "device_span"
        self.least_us = float(self.passes[1].work_us().max())
        self.pattern: Pattern | None = None
        self.choice: PooledPattern | None = None
        self.pool = PatternPool()
        self.ops = 3 * len(problem.stages) * problem.microbatches
        self.offer_s = self.ops / WRITTEN_PER_SECOND  # what the last offer took: the next must have as much time

    @property
    def period_us(self) -> float:
        """The smallest period found so far, infinity before there is one."""
        return self.pattern.period_us if self.pattern else np.inf

    def begin(self, limits: Limits, best: Solution) -> Solution:
        """Quickly to some pattern, from the best that is known. Returns the best after it."""
        self._resume(limits, best)
        for period_us in self._ladder() if self.least_us else ():
            if self._done() or self._try(1, period_us, FIRST_WIDTH, LEANS[0]):
                break
        return self.best

    def go_on(self, limits: Limits, best: Solution) -> Solution:
        """To better patterns as long as there is time, from the best that is known. Returns the best after it."""
        self._resume(limits, best)
        width = FIRST_WIDTH
        while self.pattern is not None and width <= MOST_WIDTH and not self._done():
            self._stretch()
            self._tune()
            width *= 2
            self._widen(width)
        while self.choice is not None and not self._done():
            self._stretch()
            self._tune()
        return self.best

    def _resume(self, limits: Limits, best: Solution) -> None:
        self.limits = self.effort.limits = limits
        self.best = best

    def _done(self) -> bool:
        return self.effort.spent() or self.limits.reached(self.best.value_us, self.best.bound_us)

    def _ladder(self) -> Iterator[float]:
        """Periods from the least to the one at which microbatches follow one another."""
        period, step = self.least_us, 1.02
        alone = float(self.passes[1].lag_us.sum() + self.passes[1].duration_us.sum())
        while period < alone:
            yield period
            period *= step
            step = min(step + 0.01, 1.1)
        yield alone

    def _widen(self, width: int) -> None:
        """Look with this width at the periods that would be better than the best, and for shorter blocks."""
        assert self.pattern is not None
        for lanes, lean, share in product(LANES, LEANS, SHARES):
            excess = self.pattern.period_us - self.least_us
            if self._done():
                break
            if excess or (lanes == 1 and share == 0):
                self._try(lanes, self.least_us + share * excess, width, lean)

    def _try(self, lanes: int, period_us: float, width: int, lean: float) -> bool:
        """Look for patterns of this period; whether one has a smaller period than the best that is known."""
        passes = self.passes[lanes]
        self.effort.place(2 * MOST_PERMUTATIONS * width * passes.size)  # each is tried twice
        found = fitting_patterns(passes, self.budgets, period_us, width, lean, self.rng, self.effort.spent)
        if not found:
            return False
        known = self.pattern
        better = known is None or period_us < known.period_us
        if better or (known and (period_us, found[0].block_us) < (known.period_us, known.block_us)):
            self.pattern = found[0]
        for pattern in found[:: max(1, len(found) // TRIED_ENDS)]:
            if self._done():
                break
            self._compare(pattern, pattern)
        return better

    def _compare(self, pattern: Pattern, base: Pattern) -> bool:
        """Simple ends for a pattern; whether they are the best so far of all that its base was stretched to."""
        if not self.pool.is_new(pattern):
            return False
        few = self._filler(pattern, few_microbatches(pattern, self.problem.microbatches))
        value, ends = first_ends(few)
        self.effort.play(FIRST_PLAYS * len(few.planned))
        return self._keep(PooledPattern(base, pattern, ends, self._promise(few, pattern, value)))

    def _stretch(self) -> None:
        """Longer blocks of some of the blocks found."""
        for _ in range(STRETCHED_AT_ONCE):
            base = None if self._done() else self.pool.next_to_stretch()
            if base is None:
                return
            self._stretch_one(base)

    def _stretch_one(self, base: Pattern) -> None:
        """Ever longer blocks of the same rounds, as long as the memory is there and the ends get better."""
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
        """The pattern stretched at once, at the turn or before it, or evenly on the way out, back or both.

        By a round for each device, evenly, the first one gets through the warm-up without waiting; less takes less
        memory.
        """
        count, devices = self.passes[1].stages, self.passes[1].devices
        last = 2 * count - 1
        rounds = sorted({1, 2, max(1, devices // 4), max(1, devices // 2), devices})
        ways = ((count, 1), (count // 2, 1), (count, count), (last, last), (last, count))
        longer = [pattern.stretched(at, more, over) for (at, over), more in product(ways, rounds)]
        return [pattern for pattern in longer if (pattern.peak_bytes <= self.budgets).all()]

    def _tune(self) -> None:
        """Better ends for one of the best patterns."""
        choice = self.pool.next_to_tune(self.rng)
        if choice is None:
            return
        pattern = choice.pattern
        few = self._filler(pattern, few_microbatches(pattern, self.problem.microbatches))

        def stopped() -> bool:
            self.effort.play(len(few.planned))
            return self._done()

        value, ends = tuned_ends(few, choice.ends, TUNING_STEPS, self.rng, stopped)
        self._keep(PooledPattern(choice.base, pattern, ends, self._promise(few, pattern, value)))

    def _filler(self, pattern: Pattern, microbatches: int) -> Filler:
        return Filler(pattern, self.passes[1], microbatches, self.budgets, self.by_span)

    def _promise(self, few: Filler, pattern: Pattern, value_us: float) -> float:
        """The value for all microbatches, from that for few."""
        return value_us + (self.problem.microbatches - few.microbatches) * pattern.period_us

    def _keep(self, choice: PooledPattern) -> bool:
        """Report what promises to be better than the best; whether it is better than what its base had.

        What copies make of a promise shows only when they are played: so with these the best of every base is tried.
        """
        if choice.value_us == np.inf:
            return False
        better = self.pool.keep(choice)
        best = self.choice is None or choice.value_us < self.choice.value_us
        if best:
            self.choice = choice
        if best or (better and self.relief and choice.value_us < self.best.value_us):
            self._offer(choice)
        return better

    def _offer(self, choice: PooledPattern) -> None:
        """Report the orders for all microbatches if they are better than the best."""
        began = self.effort.seconds
        if choice.value_us > WORTH_A_LOOK * self.best.value_us or began + self.offer_s > self.effort.allowed:
            return
        filler = self._filler(choice.pattern, self.problem.microbatches)
        orders = orders_from_pattern(self.problem, filler.orders(choice.ends))
        try:
            if self.relief:
                compute = [device.compute for device in orders.devices]
                for moving in self.relief.orders(self.problem, compute):
                    self._report(moving)
            else:
                self._report(orders)
        except DeadlockError:
            pass  # passes without length at one instant may come in a circle
        self.effort.write(self.ops)
        self.offer_s = self.effort.seconds - began

    def _report(self, orders: Orders) -> None:
        simulation = simulate(self.problem, orders)
        value = simulation.value_us
        if value < self.best.value_us and within_budgets(self.problem, orders, simulation):
            self.best = Solution(orders, value, self.best.bound_us)
            self.on_solution(self.best)


TUNED = 0.8
"""Probability that the best choice is the one to be tuned, and if it is not, the next best, and so on."""

KEPT = 200
"""Blocks that are remembered with their ends: those with the best."""


@dataclass(frozen=True)
class PooledPattern:
    """A pattern with its ends, the value that they promise, and the block that it was stretched from."""

    base: Pattern
    pattern: Pattern
    ends: Ends
    value_us: float


class PatternPool:
    """Choices, one of each block: which ends a block will have shows only when it has been stretched and tuned.

    So the block with the best ends before that is not stretched alone, but others too, in turns the one with the best
    ends and the shortest one.
    """

    def __init__(self) -> None:
        self._choices: dict[bytes, PooledPattern] = {}
        self._seen: set[bytes] = set()
        self._stretched: set[bytes] = set()

    def is_new(self, pattern: Pattern) -> bool:
        """True if no pattern with the same period and the same orders was asked for before."""
        before = len(self._seen)
        self._seen.add(pattern.key)
        return len(self._seen) > before

    def keep(self, choice: PooledPattern) -> bool:
        """Remember a choice if it is the best of its block; whether it is."""
        key = choice.base.key
        known = self._choices.get(key)
        if known is not None and known.value_us <= choice.value_us:
            return False
        self._choices[key] = choice
        if len(self._choices) > KEPT:
            del self._choices[max(self._choices, key=lambda key: self._choices[key].value_us)]
        return True

    def next_to_stretch(self) -> Pattern | None:
        """A block that has not been asked for before; none where all have."""
        waiting = [(key, choice) for key, choice in self._choices.items() if key not in self._stretched]
        if not waiting:
            return None
        by_value = len(self._stretched) % 2 == 0
        key, choice = min(waiting, key=lambda pair: pair[1].value_us if by_value else pair[1].base.block_us)
        self._stretched.add(key)
        return choice.base

    def next_to_tune(self, rng: np.random.Generator) -> PooledPattern | None:
        """A choice at random, the better the likelier."""
        if not self._choices:
            return None
        ranked = sorted(self._choices.values(), key=lambda choice: choice.value_us)
        return ranked[min(int(rng.geometric(TUNED)) - 1, len(ranked) - 1)]


PLACED_PER_SECOND = 400_000
"""Passes that the beam places in about a second."""

PLAYED_PER_SECOND = 2_000_000
"""Ops that are played in about a second."""

WRITTEN_PER_SECOND = 200_000
"""Ops of orders that are written down and simulated in about a second."""


@dataclass
class WorkBudget:
    """Counts work where the limits are deterministic, else asks the clock. `work` is in units of about a second."""

    limits: Limits
    work: float = 0.0

    def place(self, passes: int) -> None:
        """Count passes that are placed on their circles."""
        self.work += passes / PLACED_PER_SECOND

    def play(self, ops: int) -> None:
        """Count ops that are played."""
        self.work += ops / PLAYED_PER_SECOND

    def write(self, ops: int) -> None:
        """Count ops of orders that are written down and simulated."""
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
