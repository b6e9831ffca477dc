"""What is minimised."""

from __future__ import annotations

from solver.exact.cp_sat.variables import Moment, Variables


def add_objective(variables: Variables, bound_ticks: int) -> None:
    """Minimise the makespan or the largest device span; `bound_ticks` is a bound known from outside the model."""
    problem, model = variables.problem, variables.model
    last = problem.microbatches - 1
    model.add(variables.objective >= bound_ticks)
    for stages in problem.stages_of:
        for s in stages:
            # A device's first op is the first F of its lowest stage. Each stage's last W is its last op, or any W if
            # some may be part of fused backwards and so overtake others.
            first = variables.task("F", stages[0] if problem.objective == "device_span" else 0, 0)
            for i in range(problem.microbatches) if s in variables.fusing_stages else (last,):
                weight = Moment(variables.task("W", s, i), is_end=True)
                variables.measured.append((Moment(first, is_end=False), weight))
    for begin, end in variables.measured:
        model.add(variables.objective >= end.expression - begin.expression)
    model.add(variables.task("F", 0, 0).start == 0)  # every op follows it
    model.minimize(variables.objective)
