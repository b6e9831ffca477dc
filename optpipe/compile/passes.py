"""The passes put together: a schedule, or a placement alone, in; a checked program out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optpipe.compile.actions import Program
from optpipe.compile.check import check_program
from optpipe.compile.copies import insert_releases, reload_begins_us
from optpipe.compile.events import with_events
from optpipe.compile.forward import forward_lists
from optpipe.compile.lower import Plan, lower
from optpipe.compile.reduce import insert_reduces
from optpipe.compile.slabs import HostPlan, plan_slabs
from optpipe.orders import Orders
from optpipe.schedule import Schedule
from optpipe.simulate import simulate


def compile_schedule(schedule: Schedule, *, reduce_gradients: bool = False) -> Program:
    """Compile a schedule to a checked program.

    Only orders and waits of the schedule are used; times are simulated anew from its problem. With `reduce_gradients`
    each stage has a REDUCE once its gradients are complete. Raises OrderError where an op is missing, repeated or
    misplaced, DeadlockError where ops wait for one another in a circle, and BudgetError where the program would hold
    more than a budget of the problem.
    """
    problem = schedule.problem
    simulation = simulate(problem, schedule.orders)  # refuses every order that cannot run
    spans = zip(simulation.start_us.tolist(), simulation.end_us.tolist(), strict=True)
    times = dict(zip(simulation.ops, spans, strict=True))
    host = plan_slabs(problem, times)
    orders = _with_slab_waits(schedule.orders, host)
    placement = tuple(stage.device for stage in problem.stages)
    plan = Plan(placement, orders, times, reload_begins_us(orders, times), host.slab_of)
    program = Program(problem.microbatches, placement, insert_releases(lower(plan)), host.slabs)
    if reduce_gradients:
        program = insert_reduces(program)
    program = with_events(program)
    check_program(program, problem)
    return program


def compile_forward(placement: Sequence[int], microbatches: int, devices: int | None = None) -> Program:
    """A checked program of forwards alone: `placement[s]` is the device of stage s.

    `devices` is their number, where more are meant than the placement names.
    """
    count = max(placement) + 1 if devices is None else devices
    program = with_events(
        Program(microbatches, tuple(placement), forward_lists(placement, microbatches, count), ((),) * count)
    )
    check_program(program)
    return program


def _with_slab_waits(orders: Orders, host: HostPlan) -> Orders:
    waits = {op: list(others) for op, others in orders.waits.items()}
    for offload, reload in host.waits.items():
        waits.setdefault(offload, []).append(reload)
    return replace(orders, waits=waits)
