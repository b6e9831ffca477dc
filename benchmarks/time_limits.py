"""Time to an answer of the largest problems on busy cores: from the command's start to its end, against its limit.

`python -m benchmarks.time_limits time-limits` prints a table. Cores are busy where a process spins for each of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.markdown import Row, machine, seconds_text, table
from benchmarks.runs import solve_by_command, warm_up
from benchmarks.seconds_by_size import linear, offloading, v_shape
from benchmarks.section import Section, Size, main, say
from instances import uniform
from optpipe.problem import Problem
from optpipe.units import share_text
from solver.limits import available_cores
from solver.scale import count_ops

COMMAND = "python -m benchmarks.time_limits time-limits"
TIME_LIMIT_S = {"quick": 3, "full": 20}
MODES = [{"name": "full", "kept_bytes": 1, "recompute_us": 10}]


def problems(size: Size) -> dict[str, Problem]:
    """Problems of about 400,000 ops each, copies and recomputations included; `quick`: a tenth."""
    share = 10 if size == "quick" else 1
    modes = uniform(64, 1560 // share, activation_bytes=4, backward_weight_bytes=2, budget=128)
    stages = [stage | {"modes": MODES} for stage in modes.to_data()["stages"]]
    return {
        "linear, p = 64": linear(64, 2080 // share),
        "V, p = 32": v_shape(32, 2080 // share),
        "linear, offload, p = 64": offloading(64, 1250 // share),
        "linear, recomputation, p = 64": Problem.from_data(modes.to_data() | {"stages": stages}),
    }


def measure(size: Size, pictures: Path) -> str:
    """Solve each problem on quiet cores and on busy ones; returns the table."""
    del pictures  # nothing is drawn
    warm_up(["auto"])
    limit_s, rows = TIME_LIMIT_S[size], list[Row]()
    for name, problem in problems(size).items():
        quiet_s, quiet = solve_by_command(problem, limit_s)
        with _spinning(available_cores()):
            busy_s, busy = solve_by_command(problem, limit_s)
        times = seconds_text(quiet_s), share_text(quiet["gap"]), seconds_text(busy_s), share_text(busy["gap"])
        rows.append((name, f"{count_ops(problem):,}", *times))
        say(" ".join(rows[-1]))
    columns = ("problem", "ops", "seconds", "gap", "seconds, busy", "gap, busy")
    return (
        f"{table(columns, rows, 1)}\n\nSeconds of the whole command `optpipe solve`, with a `--time-limit` of "
        f"{limit_s}: loading, reading, searching, verifying and writing. Busy: while a process spins for each "
        "core.\n\n"
        f"`{COMMAND} --size {size}`: {machine()}."
    )


@contextmanager
def _spinning(count: int) -> Iterator[None]:
    """Context in which so many processes use all the time that they are given."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


SECTIONS = (
    Section(
        "time-limits",
        "The largest problems within their time limit",
        "How long after its limit the command of a problem of 400,000 ops ends, on quiet cores and on busy ones.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
