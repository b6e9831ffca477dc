"""The searches by name, each loaded when it begins.

OR-Tools and HiGHS take longer to load than a published schedule takes to be made, and who only names methods, as the
service does, needs neither. So what chooses a search takes it from here, and a process that waits for its problem
loads them all meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from optpipe.problem import Problem
from solver.limits import Limits
from solver.solution import OnSolution, Solution

Search = Callable[[Problem, Limits, Solution, OnSolution], Solution]


@dataclass(frozen=True)
class LazySearch:
    """A search by its module and function; `kernels`: the stage of `solver.kernels` that compiles what it needs."""

    module: str
    function: str
    kernels: str = ""

    def load(self) -> Search:
        """The function itself."""
        return cast(Search, getattr(import_module(f"solver.{self.module}"), self.function))

    def __call__(self, problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
        """Run the search."""
        return self.load()(problem, limits, start, on_solution)


SEARCHES = {
    "lists": LazySearch("search.in_flight", "in_flight_search", "lists"),
    "states": LazySearch("exact.state_bound", "state_bound", "states"),
    "pattern": LazySearch("search.modulo", "pattern_search", "pattern"),
    "windows": LazySearch("search.lns.search", "lns_search", "windows"),
    "search": LazySearch("search.annealing.search", "local_search", "search"),
    "cp-sat": LazySearch("exact.cp_sat.model", "solve_cp_sat"),
    "milp": LazySearch("exact.milp.model", "solve_milp"),
    "relaxation": LazySearch("exact.relaxation", "relaxation_bound"),
    "parts": LazySearch("exact.relaxation", "proof_by_parts"),
}
"""By the names that `Solution.method` and `Solution.proved_by` have. Kernels are compiled in this order."""


def is_ready(search: Search) -> bool:
    """True if a search can begin; False while another process compiles its kernels."""
    from solver.kernels import are_ready

    return not (isinstance(search, LazySearch) and search.kernels) or are_ready(search.kernels)


def load_searches() -> None:
    """Load them all."""
    for search in SEARCHES.values():
        search.load()
