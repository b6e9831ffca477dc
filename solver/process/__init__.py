"""A solve in a child process: its time, its memory and its end are in the parent's hands, whatever a solver does.

The child has no shell, a session and a temporary folder of its own, and dies with its parent. It streams incumbents,
so that the best one outlives it. Both sides exchange JSON. The parent trusts nothing: it times and verifies every
answer itself.
"""

from solver.process.cached import cpu_seconds_given, solve_cached
from solver.process.channel import Child, Heartbeat, Limit, available_bytes
from solver.process.parent import ChildResult, SolverDiedError, refuse_beyond_verification, solve_in_child
from solver.process.start import child_environment, claim_stdout, end_with_parent, module_command

__all__ = [
    "Child",
    "ChildResult",
    "Heartbeat",
    "Limit",
    "SolverDiedError",
    "available_bytes",
    "child_environment",
    "claim_stdout",
    "cpu_seconds_given",
    "end_with_parent",
    "module_command",
    "refuse_beyond_verification",
    "solve_cached",
    "solve_in_child",
]
