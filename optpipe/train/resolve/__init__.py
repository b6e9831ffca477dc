"""Solve, then train, then solve again: what ops cost is measured before and in training, and schedules follow it.

config.py    OnlineConfig
first.py     the schedule to begin with
start.py     before the first step: measure, and where a schedule has to fit
costs.py     op times of training steps, and their drift
solver.py    what is asked of a solver
search.py    rank 0's searches
choice.py    which of two schedules is better: predicted, then in fact
online.py    the boundary that ties them together
events.py    what happened, for the log and the end
"""
