"""Linear programs of bounds: numbers of microbatches and times, stated row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optpipe.ops import Floats

ROUNDING = 1e-9
"""Share by which the solution of a linear program may exceed its optimum."""

SMALLEST = 1e-6
"""Least factor of a linear program that surely counts: HiGHS leaves out those up to 1e-9."""

INFEASIBLE = 2
"""The status of a program that nothing fulfils, as SciPy numbers it."""


@dataclass
class LinearProgram:
    """A linear program in columns that are not negative, of which it minimises the first."""

    columns: int = 1
    limits: list[tuple[Mapping[int, float], float]] = field(default_factory=list)
    values: list[tuple[Mapping[int, float], float]] = field(default_factory=list)

    def column(self) -> int:
        """A new column."""
        self.columns += 1
        return self.columns - 1

    def at_most(self, terms: Mapping[int, float], limit: float) -> None:
        """The sum of coefficient times column is at most the limit."""
        self.limits.append((terms, limit))

    def at_least(self, terms: Mapping[int, float], limit: float) -> None:
        """The sum of coefficient times column is at least the limit."""
        self.limits.append(({column: -factor for column, factor in terms.items()}, -limit))

    def equal(self, terms: Mapping[int, float], value: float) -> None:
        """The sum of coefficient times column is the value."""
        self.values.append((terms, value))

    def least(self) -> float:
        """The least value of the first column, infinity where nothing fulfils the rows.

        0 where the solver would take a factor for nothing and the bound would so become too large: a negative one.
        """
        from scipy.optimize import linprog  # slow to load, and only for problems with modes or blocks

        (limited, limits), (equal, values) = self._rows(self.limits), self._rows(self.values)
        if np.any((limited < 0) & (limited > -SMALLEST)):
            return 0.0
        goal = np.eye(self.columns)[0]
        solved = linprog(goal, A_ub=limited, b_ub=limits, A_eq=equal, b_eq=values, method="highs")
        if solved.status == INFEASIBLE:
            return float("inf")
        return float(solved.fun) * (1 - ROUNDING) if solved.status == 0 else 0.0

    def _rows(self, rows: Sequence[tuple[Mapping[int, float], float]]) -> tuple[Floats, Floats]:
        matrix = np.zeros((len(rows), self.columns))
        for row, (terms, _) in zip(matrix, rows, strict=True):
            row[list(terms)] = list(terms.values())
        return matrix, np.array([limit for _, limit in rows])
