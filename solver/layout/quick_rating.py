"""Ratings of a problem in milliseconds: a bound, list schedules, and published schedules often at the bound."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from optpipe.errors import DeadlockError, MethodError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import within_budgets
from solver.limits import Cancel, Limits
from solver.methods import METHODS, published_orders
from solver.search.in_flight import QUICK, QuickLists

LISTS = "ada-offload"
"""Method of list schedules in memory."""

NEAR_BOUND = ("zb-h2", "zb-auto")
"""Published schedules that are made in a few milliseconds and often reach the bound."""

WITH_BLOCKS = ("interleaved-1f1b", "dualpipe-v")
"""Published schedules with blocks of a forward and a backward, which lists know nothing of."""


@dataclass
class QuickRating:
    """A problem with the value of its quick schedules, infinite where none fits, and a bound on all schedules."""

    problem: Problem
    lists: QuickLists
    bound_us: float
    value_us: float
    published: tuple[str, Orders] | None = None

    @classmethod
    def of(cls, problem: Problem, cancel: Cancel, bound_us: float = 0.0, most: int = len(QUICK)) -> Self:
        """Rate a problem by up to `most` lists of each kind; `bound_us` is a bound that is known."""
        lists = QuickLists(problem, cancel, most)
        rating = cls(problem, lists, bound_us, lists.value_us)
        for method in WITH_BLOCKS if problem.overlaps else ():
            rating._try(method)
        return rating

    def complete(self) -> None:
        """Rate the problem by all its lists."""
        self.lists.most = len(QUICK)
        self._take_lists()

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
        self.lists.improve(limits)
        self._take_lists()
        for method in NEAR_BOUND if self.lists.achieved else ():
            if limits.cancel.requested or limits.seconds >= limits.time_limit_s:
                return
            self._try(method)

    def _take_lists(self) -> None:
        if self.lists.value_us < self.value_us:
            self.value_us, self.published = self.lists.value_us, None

    def _try(self, method: str) -> None:
        """Take a published schedule if it is better, and keeps the budgets."""
        with suppress(MethodError, DeadlockError):
            orders = published_orders(METHODS[method], self.problem)
            found = simulate(self.problem, orders)
            if found.value_us < self.value_us and within_budgets(self.problem, orders, found):
                self.value_us, self.published = found.value_us, (method, orders)

    def best(self) -> tuple[str, Orders] | None:
        """Method and orders with the value; None where it is not that of a schedule of the problem."""
        if self.published is not None:
            return self.published
        orders = self.lists.orders()
        return None if orders is None else (LISTS, orders)
