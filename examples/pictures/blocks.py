"""DualPipeV with its blocks (docs/concepts/blocks.md)."""

from __future__ import annotations

from examples.pictures.pipelines import MS, V_SHAPED, pipeline
from optpipe.plot.gantt import schedule_panel
from optpipe.plot.panel import Panel
from optpipe.problem import Problem
from solver.solve import solve

MICROBATCHES, BLOCK_MS = 10, 2.4


def along_a_v() -> Problem:
    """Build two stages a device of 1 ms each op; a block of F and BW takes 2.4 ms."""
    data = pipeline(MICROBATCHES, None, V_SHAPED).to_data()
    last = len(data["stages"]) - 1
    for stage in data["stages"]:
        stage |= {f"{kind}_us": MS for kind in ("forward", "backward_input", "backward_weight")}
    pairs = [(s, last - s) for s in range(last + 1)]
    data["overlaps"] = [{"forward_stage": f, "backward_stage": b, "us": BLOCK_MS * MS} for f, b in pairs]
    return Problem.from_data(data)


def blocks() -> Panel:
    """Draw DualPipeV with each forward of a block above its backward."""
    return schedule_panel(solve(along_a_v(), "dualpipe-v"))


PICTURES = {"blocks": blocks}
