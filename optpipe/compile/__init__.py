"""Schedule -> one program of actions a device, checked before anything runs. No torch here.

The way of a schedule (`passes`): host buffers (`slabs`), one global sequence (`lower`), memory of copies (`copies`),
gradient reduction (`reduce`), events between streams (`events`), and the check (`check`, `memory`).
"""

from optpipe.compile.actions import Action, Program, Slab
from optpipe.compile.check import check_program
from optpipe.compile.fuse import fuse_adjacent
from optpipe.compile.passes import compile_forward, compile_schedule

__all__ = ["Action", "Program", "Slab", "check_program", "compile_forward", "compile_schedule", "fuse_adjacent"]
