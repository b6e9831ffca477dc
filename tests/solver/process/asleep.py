"""A child process that gets no further than its start, as on a machine that has no time for it.

Run as ``python -m tests.solver.process.asleep PARENT_PID`` in place of `solver.process.child`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stdin.buffer.readline()  # the request
    sys.stdin.buffer.read()  # the end of the parent
