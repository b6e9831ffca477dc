"""The search: the smallest period that the budgets allow, then short blocks, then good ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from optpipe.errors import DeadlockError
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.finish import within_budgets
from solver.limits import Answer, Limits, Start
from solver.search.pattern.beam import MOST_PERMUTATIONS, find_places
from solver.search.pattern.block import Pattern, orders_of, pattern_at
from solver.search.pattern.effort import WRITTEN_PER_SECOND, Effort
from solver.search.pattern.ends import Filler
from solver.search.pattern.passes import Ints, Passes
from solver.search.pattern.pool import Choice, Pool
from solver.search.pattern.relief import Relief
from solver.search.pattern.tuning import FIRST_PLAYS, few_microbatches, first_ends, tuned_ends
from solver.search.table import budgets_bytes

LEANS = (0.15, 0.0, 0.4, 0.8)
"""Weighings of late stages' waiting, tried in turn."""

SHARES = (0.0, 0.3, 0.6, 0.9)
"""Parts of the period's excess over the least that are tried next."""

LANES = (1, 2)
"""Microbatches a round: two only where one does not reach the least period."""

FIRST_WIDTH, MOST_WIDTH = 24, 1000
"""Of the beams, which double."""

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


def pattern_search(problem: Problem, limits: Limits, start: Start, on_answer: Callable[[Answer], None]) -> Answer:
    """Orders that repeat one block in the middle, better than the start's where such are found.

    Answers with the start where no pattern fits the budgets, which does not prove that none exists.
    """
    best = Answer(start.orders, start.value_us, start.bound_us)
    reliefs = [Relief(margin) for margin in MARGINS] if any(stage.offload for stage in problem.stages) else []
    searches = [PatternSearch(problem, limits, on_answer, relief) for relief in (None, *reliefs)]
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

    best: Answer

    def __init__(
        self, problem: Problem, limits: Limits, on_answer: Callable[[Answer], None], relief: Relief | None
    ) -> None:
        self.problem = problem
        self.limits = limits
        self.on_answer = on_answer
        self.effort = Effort(limits)
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
        self.choice: Choice | None = None
        self.pool = Pool()
        self.ops = 3 * len(problem.stages) * problem.microbatches
        self.offer_s = self.ops / WRITTEN_PER_SECOND  # what the last offer took: the next must have as much time

    @property
    def period_us(self) -> float:
        """The smallest period found so far, infinity before there is one."""
        return self.pattern.period_us if self.pattern else np.inf

    def begin(self, limits: Limits, best: Answer) -> Answer:
        """Quickly to some pattern, from the best that is known. Returns the best after it."""
        self._resume(limits, best)
        for period_us in self._ladder() if self.least_us else ():
            if self._done() or self._try(1, period_us, FIRST_WIDTH, LEANS[0]):
                break
        return self.best

    def go_on(self, limits: Limits, best: Answer) -> Answer:
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

    def _resume(self, limits: Limits, best: Answer) -> None:
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
        return self._keep(Choice(base, pattern, ends, self._promise(few, pattern, value)))

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
        self._keep(Choice(choice.base, pattern, ends, self._promise(few, pattern, value)))

    def _filler(self, pattern: Pattern, microbatches: int) -> Filler:
        return Filler(pattern, self.passes[1], microbatches, self.budgets, self.by_span)

    def _promise(self, few: Filler, pattern: Pattern, value_us: float) -> float:
        """The value for all microbatches, from that for few."""
        return value_us + (self.problem.microbatches - few.microbatches) * pattern.period_us

    def _keep(self, choice: Choice) -> bool:
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

    def _offer(self, choice: Choice) -> None:
        """Report the orders for all microbatches if they are better than the best."""
        began = self.effort.seconds
        if choice.value_us > WORTH_A_LOOK * self.best.value_us or began + self.offer_s > self.effort.allowed:
            return
        filler = self._filler(choice.pattern, self.problem.microbatches)
        orders = orders_of(self.problem, filler.orders(choice.ends))
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
            self.best = Answer(orders, value, self.best.bound_us)
            self.on_answer(self.best)
