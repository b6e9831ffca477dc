"""Schedules of problems: published ones from their rules, and better ones by optimisation.

>>> from solver import Limits, solve
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe import lazy

if TYPE_CHECKING:
    from solver.limits import Limits
    from solver.methods import register
    from solver.solve import solve

__all__ = ["Limits", "register", "solve"]

lazy.offer(__name__, {"Limits": "solver.limits", "register": "solver.methods", "solve": "solver.solve"})
