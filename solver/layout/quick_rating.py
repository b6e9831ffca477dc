"""Ratings of a problem in milliseconds: a bound, list schedules, and published schedules often at the bound."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from typing import Self

from optpipe.errors import DeadlockError, MethodError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import within_budgets
from solver.limits import Cancel, Limits
from solver.lists.priority import RULES, list_orders
from solver.methods import ADA_OFFLOAD, METHODS, published_orders
from solver.search.in_flight import QUICK, QuickLists

NEAR_BOUND = ("zb-h2", "zb-auto")
"""Published schedules that are made in a few milliseconds and often reach the bound."""

WITH_BLOCKS = ("interleaved-1f1b", "dualpipe-v")
"""Published schedules with blocks of a forward and a backward, which lists know nothing of."""

WITH_PASSES = "vocab-2"
"""The published schedule with spread passes. These have list schedules of their own, a tenth of a second each."""


@dataclass
class QuickRating:
    """A problem with the value of its quick schedules, infinite where none fits, and a bound on all schedules."""

    problem: Problem
    lists: QuickLists | None
    """None where there are spread passes."""
    bound_us: float
    value_us: float
    published: tuple[str, Orders] | None = None

    @classmethod
    def of(cls, problem: Problem, cancel: Cancel, bound_us: float = 0.0, most: int = len(QUICK)) -> Self:
        """Rate a problem by up to `most` lists of each kind; `bound_us` is a bound that is known."""
        if problem.spread:
            rating = cls(problem, None, bound_us, inf)
            rating._try(WITH_PASSES)
            if most > 1 or rating.published is None:
                rating.complete()
            return rating
        lists = QuickLists(problem, cancel, most)
        rating = cls(problem, lists, bound_us, lists.value_us)
        for method in WITH_BLOCKS if problem.overlaps else ():
            rating._try(method)
        return rating

    @property
    def achieved(self) -> bool:
        """True if the value is that of a schedule of the problem."""
        return self.lists is None or self.lists.achieved

    def complete(self) -> None:
        """Rate the problem by all its quick lists, of those with spread passes by the first."""
        if self.lists is None:
            self._offer("priority-lists", lambda: list_orders(self.problem, RULES[0]))
            return
        self.lists.most = len(QUICK)
        self._take_lists(self.lists)

    @cached_property
    def _full_bound_us(self) -> float:
        return lower_bound_us(self.problem)

    def bound_in_full(self) -> None:
        """Compute the best bound that needs no search: 5 to 20 ms, more for large problems."""
        self.bound_us = max(self.bound_us, self._full_bound_us)

    @property
    def estimate_us(self) -> float:
        """Value to be expected of a search: halfway, since neither the lists nor the bound are always close."""
        return (self.value_us + self.bound_us) / 2

    def improve(self, limits: Limits) -> None:
        """Search for the numbers of the lists, and try the published schedules, as long as there is time."""
        if self.lists is None:
            for rule in RULES[1:]:
                if limits.cancel.requested or limits.seconds >= limits.time_limit_s:
                    return
                self._offer("priority-lists", partial(list_orders, self.problem, rule))
            return
        self.lists.improve(limits)
        self._take_lists(self.lists)
        for method in NEAR_BOUND if self.achieved else ():
            if limits.cancel.requested or limits.seconds >= limits.time_limit_s:
                return
            self._try(method)

    def _take_lists(self, lists: QuickLists) -> None:
        if lists.value_us < self.value_us:
            self.value_us, self.published = lists.value_us, None

    def _try(self, method: str) -> None:
        """Take a published schedule if it is better, and keeps the budgets."""
        self._offer(method, lambda: published_orders(METHODS[method], self.problem))

    def _offer(self, method: str, make: Callable[[], Orders]) -> None:
        """Take orders if they are better, and keep the budgets."""
        with suppress(MethodError, DeadlockError):
            orders = make()
            found = simulate(self.problem, orders)
            if found.value_us < self.value_us and within_budgets(self.problem, orders, found):
                self.value_us, self.published = found.value_us, (method, orders)

    def best(self) -> tuple[str, Orders] | None:
        """Method and orders with the value; None where it is not that of a schedule of the problem."""
        if self.published is not None or self.lists is None:
            return self.published
        orders = self.lists.orders()
        return None if orders is None else (ADA_OFFLOAD, orders)
