"""A solve in a child process: its time, its memory and its end are in the parent's hands, whatever a solver does.

The child has no shell, a session and a temporary folder of its own, and dies with its parent. It streams incumbents,
so that the best one outlives it. What both say to each other is JSON. Nothing that a child says is believed unseen:
orders are timed and verified in the parent.

    watch.py        solve_in_child: holds the child to its limits, and its result
    handle.py       the process from outside
    child.py        what runs inside
    loading.py      the verifier, loaded before anybody waits for it
    spare.py        published schedules of the parent, where the child brings nothing
    messages.py     what both say
    memory_use.py   memory of a process and of the machine
"""

from solver.process.handle import Child, import_path
from solver.process.memory_use import available_bytes
from solver.process.messages import Heartbeat, Incumbent, Limit
from solver.process.watch import ChildResult, SolverDiedError, solve_in_child

__all__ = [
    "Child",
    "ChildResult",
    "Heartbeat",
    "Incumbent",
    "Limit",
    "SolverDiedError",
    "available_bytes",
    "import_path",
    "solve_in_child",
]
