"""Searches for better schedules that prove nothing: local search, windows, patterns.

local.py        simulated annealing, in as many threads as there are workers
  anneal.py     one annealing: propose, keep the budgets, time, accept or take back
  sequence.py   what it works on: one merged sequence of ops for each group of devices; from orders and back
  table.py      the problem as numbers, which does not change
  kernel.py     times of sequences, from where they changed to where they are as before
  proposals.py  random changes that know the problem, made of moves.py
  budgets.py    memory along sequences, and repairs
  random.py, loops.py    for compiled code
windows.py      parts of a schedule solved anew by CP-SAT
  windows_choice.py, windows_surroundings.py, windows_frame.py    which part, and all around it as times and paths
  windows_model.py, windows_tasks.py, windows_memory.py           the part as a model
pattern/        one block repeated every period
"""
