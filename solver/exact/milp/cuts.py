"""Rows that follow from the rules, or that some optimum keeps, one function a family (see `Options`)."""

from __future__ import annotations

from math import inf

import numpy as np

from optpipe.orders import Op
from solver.exact.milp.options import Options
from solver.exact.milp.rows import Rows
from solver.exact.milp.variables import Variables
from solver.exact.progress import least_work_around
from solver.exact.weight_order import like_pairs


def add_cuts(variables: Variables, rows: Rows, options: Options) -> None:
    """Those that the options ask for."""
    if options.work:
        add_work_that_memory_holds_back(variables, rows)
    if options.weight_order:
        add_weight_order(variables, rows)


def add_work_that_memory_holds_back(variables: Variables, rows: Rows) -> None:
    """An op begins no sooner than its device can have done what it must, and leaves time for what is left."""

    def length(kind: str, s: int) -> float:
        return float(variables.windows.length[variables.index[Op(kind, s, 0)]])

    around = list(least_work_around(variables.problem, length))
    ops = np.array([variables.index[one.op] for one in around], np.int64)
    device = variables.windows.device[ops]
    first = np.array([variables.first_of(d) if stages else -1 for d, stages in enumerate(variables.problem.stages_of)])
    before, after = (np.array([one[place] for one in around]) for place in (1, 2))
    told = (before < inf) & (first[device] != ops)
    rows.block(before[told]).term(ops[told], 1.0).term(first[device[told]], -1.0)
    block = rows.block(after).term(variables.objective, 1.0).term(ops, -1.0)
    if variables.problem.objective == "device_span":
        block.term(first[device], 1.0)


def add_weight_order(variables: Variables, rows: Rows) -> None:
    """W of like stages run in the order of their B."""
    pairs = [
        [variables.index[op] for op in (*backwards, *weights)] for backwards, weights in like_pairs(variables.problem)
    ]
    order = variables.order
    for places in ((0, 1, 2, 3), (1, 0, 3, 2)):
        b, c, v, w = np.array(pairs, np.int64).reshape(-1, 4).T[list(places)]
        said = order.may_be(v, w, 0) & order.may_be(b, c, 1) & (order.is_open(b, c) | order.is_open(v, w))
        b, c, v, w = b[said], c[said], v[said], w[said]
        rows.block(np.zeros(len(b))).choice(order, v, w, 1.0).choice(order, b, c, -1.0)
