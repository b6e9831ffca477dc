"""Compilation of a schedule into one program of actions per device, checked before anything runs. No torch here."""

from optpipe.compile.check import check_program
from optpipe.compile.lower import compile_forward, compile_schedule, fuse_adjacent
from optpipe.compile.program import Action, Program, Slab

__all__ = ["Action", "Program", "Slab", "check_program", "compile_forward", "compile_schedule", "fuse_adjacent"]
