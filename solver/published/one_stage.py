"""Published schedules with one stage per device: GPipe, 1F1B, ZB-H1 and ZB-H2.

ZB-H1 and ZB-H2 start with some forwards and go on with one B, one late W and one forward a round, as long as there are
any. Nothing is taken from the costs: B and W of every stage are assumed to take about as long as F.
"""

from __future__ import annotations

import numpy as np

from optpipe.kinds import KINDS
from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem
from solver.published.passes import in_turn, require_one_stage_a_device


def zb_h1(problem: Problem) -> Orders:
    """ZB-H1: 1F1B's warm-up, and W delayed by as many microbatches as stages precede, at the memory of 1F1B.

    Every stage then has p microbatches in flight: p - s before their B and s before their W.
    Raises MethodError on placement.
    """
    require_one_stage_a_device(problem, "zb-h1")
    p = len(problem.stages)
    return Orders.of_compute(_rounds(problem, s, forwards=p - s, late=s) for (s,) in problem.stages_of)


def zb_h2(problem: Problem) -> Orders:
    """ZB-H2: forwards fill the wait for the first B and W the time after the last, at 2p - 1 microbatches of memory.

    Stage s has 2(p - s) - 1 microbatches before their B and 2s before their W. Where B and W take as long as F and
    transfers no time, no stage ever idles; otherwise the bubble is (p - 1)(tF + tB + 2tC - 2tW).
    Raises MethodError on placement.
    """
    require_one_stage_a_device(problem, "zb-h2")
    p = len(problem.stages)
    return Orders.of_compute(_rounds(problem, s, forwards=2 * (p - s) - 1, late=2 * s) for (s,) in problem.stages_of)


def _rounds(problem: Problem, stage: int, *, forwards: int, late: int) -> OpArray:
    """The order of a stage that starts with `forwards` and keeps `late` microbatches between their B and their W."""
    return in_turn(stage, problem.units, [("B", 0), ("W", late), ("F", -forwards)])


def one_f_one_b(problem: Problem) -> Orders:
    """1F1B with B and W fused: stage s of p begins with p - s forwards. Raises MethodError on placement."""
    require_one_stage_a_device(problem, "1f1b")
    return Orders.of_compute(_stage_order(problem, stage) for (stage,) in problem.stages_of)


def _stage_order(problem: Problem, stage: int) -> OpArray:
    warm_up = len(problem.stages) - stage
    return in_turn(stage, problem.units, [("BW", 0), ("F", -warm_up)])


def gpipe(problem: Problem) -> Orders:
    """All forwards of all microbatches, then all backwards with B and W fused. Raises MethodError on placement.

    Of a microbatch in slices the last one is the first to go back.
    """
    require_one_stage_a_device(problem, "gpipe")
    forwards, backwards = (problem.units_in_order(kind) for kind in ("F", "BW"))
    kinds = np.repeat([KINDS.index("F"), KINDS.index("BW")], problem.units)
    units = np.concatenate([forwards, backwards])
    return Orders.of_compute(OpArray(kinds, np.full(len(units), stage), units) for (stage,) in problem.stages_of)
