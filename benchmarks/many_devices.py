"""Bubble, bound and gap of pipelines of 32 to 256 devices in half the memory of 1F1B, within half a minute.

`python -m benchmarks.many_devices many-devices --size quick` prints a table of a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

from benchmarks.markdown import Row, conditions, seconds_text, table
from benchmarks.runs import solve_by_command, warm_up
from benchmarks.seconds_by_size import offloading
from benchmarks.section import Section, Size, main, say
from instances import uniform
from optpipe.problem import Problem
from optpipe.units import share_text
from solver.scale import count_ops

NAME = "many-devices"
COMMAND = f"python -m benchmarks.many_devices {NAME}"
TIME_LIMIT_S: dict[Size, float] = {"quick": 3, "full": 30}
DEVICES: dict[Size, tuple[int, ...]] = {"quick": (8,), "full": (32, 64, 128, 256)}
MICROBATCHES: dict[Size, tuple[int, ...]] = {"quick": (32,), "full": (64, 256, 1024, 4096)}
MOST_OPS = 1_700_000
"""Ops, copies and recomputations included, whose schedule `optpipe` reads back: 256 MiB of at most 150 bytes an op."""


def offloading_or_recomputing(p: int, m: int) -> Problem:
    """The problem of `offloading`, where all but a twentieth of an activation may also be recomputed, as fast as F."""
    offload = {"bytes": 10, "offload_us": 10, "reload_us": 10}
    mode = {"name": "full", "kept_bytes": 1, "recompute_us": 10, "segment_bytes": 19}
    problem = uniform(p, m, activation_bytes=20, backward_weight_bytes=10, budget=10 * p, offload=offload).to_data()
    return Problem.from_data(problem | {"stages": [stage | {"modes": [mode]} for stage in problem["stages"]]})


KINDS: dict[str, Callable[[int, int], Problem]] = {
    "offload": offloading,
    "offload or recomputation": offloading_or_recomputing,
}
HEAD = ("kind", "p", "m", "ops", "bubble", "bound", "gap", "seconds")


def measure(size: Size, _: Path) -> str:
    """Solve every problem by the command; returns the table."""
    warm_up(["auto"])
    rows: list[Row] = []
    for (kind, build), p, m in product(KINDS.items(), DEVICES[size], MICROBATCHES[size]):
        problem = build(p, m)
        figures = ["-"] * 4
        if count_ops(problem) <= MOST_OPS:
            seconds, found = solve_by_command(problem, TIME_LIMIT_S[size])
            shares = [1 - max(problem.work_us) / found[name] for name in ("value_us", "bound_us")]
            figures = [*map(share_text, [*shares, found["gap"]]), seconds_text(seconds)]
        rows.append((kind, str(p), str(m), f"{count_ops(problem):,}", *figures))
        say("  ".join(rows[-1]))
    return f"{table(HEAD, rows, 1)}\n\n{conditions(f'{COMMAND} --size {size}', TIME_LIMIT_S[size])}"


SECTIONS = (
    Section(
        NAME,
        "Many devices with half the memory of 1F1B",
        "One stage a device, F, B and W of 10 us, transfers of 1 us. Half of each activation may leave for the host, "
        "as fast as a forward; with recomputation all but a twentieth may instead be made anew, in the time of a "
        "forward. `bubble` is the share of the value, and `bound` that of the proved bound, in which the busiest "
        "device has no work of the model to do; recomputing counts as bubble. `seconds` are those of the whole "
        "command, loading, verifying and writing included. A dash: more ops than a schedule that can be read back may "
        "have.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
