"""DualPipeV with its blocks (docs/concepts/blocks.md)."""

from __future__ import annotations

from dataclasses import replace

from examples.pictures.pipelines import MS, V_SHAPED, pipeline
from examples.pictures.sheet import Strip, sheet
from optpipe.plot.panel import Panel
from optpipe.problem import Problem
from optpipe.simulate import simulate
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
    """Draw DualPipeV one op after the other, and with each forward of a block above its backward."""
    problem = along_a_v()
    orders = solve(problem, "dualpipe-v").orders
    joined, apart = simulate(problem, orders), simulate(problem, replace(orders, blocks={}))
    strips = (("One after the other", apart), ("In blocks", joined))
    return sheet([Strip(f"{words}: {timed.value_us / MS:g} ms", timed, memory=(0,)) for words, timed in strips])[0]


PICTURES = {"blocks": blocks}
