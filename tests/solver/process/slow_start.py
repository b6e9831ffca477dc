"""A child process that loads for long, as on a machine that has no time for it, and then does what it should.

Run as ``python -m tests.solver.process.slow_start PARENT_PID`` in place of `solver.process.child`.
"""

from __future__ import annotations

import time

from solver.process.child import main

LOADS_S = 4.0

if __name__ == "__main__":
    time.sleep(LOADS_S)
    main()
