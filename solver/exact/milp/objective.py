"""What is minimised."""

from __future__ import annotations

import numpy as np

from optpipe.orders import Op
from solver.exact.milp.options import Options
from solver.exact.milp.rows import Rows
from solver.exact.milp.variables import Variables


def add_objective(variables: Variables, rows: Rows, options: Options) -> None:
    """The objective column is the makespan or the largest device span.

    An op ends no later than the objective less all work ordered after it (0 of it where `workloads` is off, and then
    only each stage's last W says something).
    """
    length, spans = variables.windows.length, variables.problem.objective == "device_span"
    for device, stages in enumerate(variables.problem.stages_of):
        if not stages:
            continue
        first, compute = variables.first_of(device), variables.of("FBW", device)
        last = variables.problem.microbatches - 1
        ends = compute if options.workloads else np.array([variables.index[Op("W", s, last)] for s in stages])
        block = rows.block(length[ends]).term(variables.objective, 1.0).term(ends, -1.0)
        if spans:
            block.term(first, 1.0)
        if options.workloads:
            for k in compute:
                block.choice(variables.order, ends, np.full(len(ends), k), -length[k])
