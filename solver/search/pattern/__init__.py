"""Modulo scheduling: one microbatch's block of passes, repeated every period, fitted to the costs and the budgets.

The time that this takes does not depend on the number of microbatches, but for writing the orders down.
"""

from solver.search.pattern.block import Pattern
from solver.search.pattern.search import pattern_search

__all__ = ["Pattern", "pattern_search"]
