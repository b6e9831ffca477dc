"""Schedule -> one program of actions a device, checked before anything runs. No torch here."""

from optpipe.compile.actions import Action, Program
from optpipe.compile.check import check_program
from optpipe.compile.lower import compile_schedule

__all__ = ["Action", "Program", "check_program", "compile_schedule"]
