"""Modulo scheduling: one microbatch's block of passes, repeated every period, fitted to the costs and the budgets.

The time that this takes does not depend on the number of microbatches, but for writing the orders down.

search.py   the search: the smallest period that the budgets allow, then short blocks, then good ends
passes.py   the passes of a round as arrays
beam.py     a block for a given period, device by device; circle.py: where a pass may go on a device's circle
block.py    a pattern: its order, its memory, its orders for any number of microbatches
ends.py     warm-up and cool-down: what they leave idle is filled; tuning.py: good ways to do so
pool.py     the blocks found, and which to work on next;  effort.py: what may still be spent
relief.py   patterns of problems that may offload
floor.py    the least period possible
"""

from solver.search.pattern.block import Pattern
from solver.search.pattern.search import pattern_search

__all__ = ["Pattern", "pattern_search"]
