"""The command line: one file per command. The only place that knows all three packages.

Exit codes: 0 done; 1 it ran and the answer is no; 2 bad usage or bad input; 3 proved infeasible; 4 time ran out with
nothing found; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from optpipe.cli.streams import make_ready


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code of its outcome; errors become one message, never a traceback."""
    make_ready()
    try:
        from optpipe.cli.app import run  # which takes a moment, in which the user may change their mind

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
