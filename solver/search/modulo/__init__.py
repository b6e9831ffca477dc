"""Modulo scheduling: one microbatch's block of passes, repeated every period, fitted to the costs and the budgets.

Its time does not depend on the number of microbatches, but for writing the orders down.
"""

from solver.search.modulo.pattern import Pattern
from solver.search.modulo.search import modulo_search

__all__ = ["Pattern", "modulo_search"]
