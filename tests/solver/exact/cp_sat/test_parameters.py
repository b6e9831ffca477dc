"""A search by CP-SAT that is cancelled before it has begun does not begin."""

from __future__ import annotations

from ortools.sat.python import cp_model

from solver.exact.cp_sat.parameters import configured_solver, solve_unless_cancelled
from solver.limits import Cancel, Limits


def test_a_cancel_that_comes_while_the_model_is_built() -> None:
    model, cancel = cp_model.CpModel(), Cancel()
    model.maximize(model.new_int_var(0, 7, "x"))
    status, _ = solve_unless_cancelled(configured_solver(Limits(workers=1)), model, cancel)
    assert status == cp_model.OPTIMAL
    cancel.request()
    status, work = solve_unless_cancelled(configured_solver(Limits(workers=1)), model, cancel)
    assert (status, work) == (cp_model.UNKNOWN, 0.0)
