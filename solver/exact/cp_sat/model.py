"""CP-SAT model: options, objective, hint, parameters, and the solve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, product
from math import ceil
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from optpipe.document import Document
from optpipe.kinds import COPIES
from optpipe.ops import Op, Orders
from optpipe.problem import DirectedTransfer, MicrobatchFactors, Problem
from optpipe.simulate import Simulation, simulate
from optpipe.spread import AfterOp, AfterPass, Gate, SpreadPass
from optpipe.stage import Offload, SliceFactors, Stage
from optpipe.task_graph import lower
from solver.bounds.unit_order import MOST_ROOM_NODES
from solver.build import orders_from_times
from solver.exact.cp_sat.blocks import TICK_US, add_block_hints, add_blocks, all_pairs, overlaps_in_ticks
from solver.exact.cp_sat.constraints import (
    SLACK,
    Constraints,
    add_heads_and_tails,
    add_weight_order,
    add_work_that_memory_holds_back,
)
from solver.exact.cp_sat.memory_order import add_memory_order, add_memory_precedences
from solver.exact.cp_sat.variables import Moment, OptionTasks, Variables
from solver.exact.incumbent import Incumbent
from solver.exact.memory_order import MOST_ORDER_LITERALS, is_ordered_by_memory
from solver.exact.rules import count_like_pairs, in_weight_order
from solver.exact.ticks import TimeGrid
from solver.limits import Cancel, Limits
from solver.scale import horizon_us, without_endless_copies
from solver.solution import INFEASIBLE, OnSolution, Solution


def add_objective(variables: Variables, bound_ticks: int) -> None:
    """Minimise the makespan or the largest device span; `bound_ticks` is a lower bound proved outside the model."""
    problem, model = variables.problem, variables.model
    model.add(variables.objective >= bound_ticks)
    first_units = [int(problem.units_in_order("F")[0])]
    last_units = {kind: [int(problem.units_in_order(kind)[-1])] for kind in ("F", "B", "W")}
    if problem.has_free_order:
        count = problem.slice_count
        first_units = list(range(0, problem.units, count))
        last_units = {
            kind: [int(problem.units_in_order(kind, [i])[-1]) for i in range(problem.microbatches)]
            for kind in last_units
        }
    spans = problem.objective == "device_span"
    for d, stages in enumerate(problem.stages_of):
        # A device's first op is the first F of its lowest stage, or one of a spread pass. Each stage's last op is its
        # last W, or any W if some may be part of fused backwards and so overtake others.
        low = stages[:1] if spans else [0]
        firsts = [Op("F", s, i) for s in low for i in first_units] + _passes_at(variables, d, first_units, first=True)
        lasts = [
            Op(variables.passes[s][-1], s, i)
            for s in stages
            for i in (range(problem.units) if s in variables.fusing_stages else last_units[variables.passes[s][-1]])
        ] + _passes_at(variables, d, last_units["F"], first=False)
        for last, first in product(lasts, firsts):
            begin, end = Moment(variables.tasks[first], is_end=False), Moment(variables.tasks[last], is_end=True)
            variables.measured.append((begin, end))
    for begin, end in variables.measured:
        model.add(variables.objective >= end.expression - begin.expression)
    if not problem.has_free_order and all(one.after for one in variables.graph.passes):
        model.add(variables.task("F", 0, first_units[0]).start == 0)  # every op follows it
    model.minimize(variables.objective)


def _passes_at(variables: Variables, device: int, units: Sequence[int], *, first: bool) -> list[Op]:
    """Ops of spread passes that may be the first or the last of a device, or of all where the makespan counts."""
    spans, passes = variables.problem.objective == "device_span", variables.graph.passes
    chosen = [one for one in passes if spans or not (first and one.after)]
    return [
        Op(one.name, d, i) for one in chosen for d in one.devices for i in units if d == device or (first and not spans)
    ]


@dataclass(frozen=True)
class Options:
    """Parts of the model that can be switched off, to measure what they give.

    `work`: least work of a device before and after each op (`solver.exact.rules`). `heads`: what order and memory chain
    together before and after each op (`solver.bounds.unit_order`). `weight_order`: W of like stages run
    in the order of their B, for up to `most_weight_pairs` pairs: their number grows with microbatches squared.
    `precedences`: ops that memory forces apart. `memory_order`: memory as a sum over literals that order ops, for up to
    `most_order_literals` of them. `climb`: first look for schedules between bound and value, from below, and raise the
    bound where there is none (destructive improvement).
    """

    work: bool = True
    heads: bool = True
    weight_order: bool = True
    most_weight_pairs: int = 20_000
    precedences: bool = True
    memory_order: bool = True
    most_order_literals: int = MOST_ORDER_LITERALS
    climb: bool = True


DEFAULT = Options()


def build_model(
    problem: Problem, grid: TimeGrid, horizon_us: float, bound_us: float, options: Options = DEFAULT
) -> Variables:
    """The whole model. No op ends later than `horizon_us`; no value is below `bound_us`."""
    variables = Variables(problem, grid, grid.horizon(horizon_us))
    variables.add_all()
    add_blocks(variables, all_pairs(problem))
    Constraints(variables).add_all()
    add_objective(variables, grid.bound_ticks(bound_us))
    if problem.overlaps or not variables.graph.trained.all():
        return variables  # the cuts are proved for F, B and W of every stage, one at a time
    alike = problem.has_equal_microbatches
    if options.work and alike:
        add_work_that_memory_holds_back(variables)
    if options.heads and not problem.has_free_order and 2 * len(problem.stages) * problem.units <= MOST_ROOM_NODES:
        add_heads_and_tails(variables)
    free_weights = all(lag.duty != "W" for lag in variables.graph.lags)
    if options.weight_order and free_weights and count_like_pairs(problem) <= options.most_weight_pairs:
        add_weight_order(variables)
    if options.precedences:
        add_memory_precedences(variables)
    if _has_memory_order(problem, options):
        add_memory_order(variables)
    return variables


def _has_memory_order(problem: Problem, options: Options) -> bool:
    if not problem.has_equal_microbatches or problem.overlaps or not lower(problem).trained.all():
        return False
    return options.memory_order and is_ordered_by_memory(problem, options.most_order_literals)


def solve_cp_sat(
    problem: Problem,
    limits: Limits,
    start: Solution,
    on_solution: OnSolution,
    options: Options = DEFAULT,
) -> Solution:
    """Search with CP-SAT from the best start known, reporting every better answer.

    Returns the last answer: its bound holds whether or not the search ended. It is INFEASIBLE where that is proved.
    """
    return _Search(problem, limits, start, on_solution, options).run()


def ask_for_better(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Ask CP-SAT once for a schedule better than that of `start`: its answer has better orders, or that value as bound.

    Neither where the limits are reached before, or times have too many digits for an exact grid. A start may have a
    value without orders.
    """
    # Measured: heads and tails make no proof of a part shorter, and that of interleaved devices with copies six times
    # as long (4 s); of two workers CP-SAT gives the first a linear relaxation, and that proof was not done in 30 s.
    return _Search(problem, replace(limits, workers=1), start, on_solution, replace(DEFAULT, heads=False)).ask()


FIRST_ORDERS = 0.5
"""Largest share of the time or work for finding any feasible orders, where none are known."""

CLIMB = 0.25
"""Largest share of the time or work for raising the bound from below."""

QUESTION = 0.3
"""The share of what is left of that which one question may take."""

LEAST_WORK = 0.01
"""Work below which nothing more is asked."""

MOST_STEPS = 1000
"""Largest number of steps of a climb from the bound to the value."""


class _Search(Incumbent):
    """Feasibility first where there is no start, then the bound from below, then minimisation from above.

    From below: look for a schedule at the bound; if there is none the bound rises (destructive improvement, Klein and
    Scholl 1999). Every window is then as narrow as can be: with good bounds that finds and proves optima in a fraction
    of the time. From above, one round is enough for a makespan; device spans may lie between the steps of the first
    grid.
    """

    def __init__(
        self, problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution, options: Options
    ) -> None:
        problem = without_endless_copies(problem, horizon_us(problem, start.value_us))
        super().__init__(problem, limits, start, on_solution, has_optimum=True)
        self.options = options
        self.work_left = limits.deterministic_limit

    def run(self) -> Solution:
        """Rounds until the value is proved, no schedule is proved to exist, or the limits are reached."""
        if self.orders is None and self._no_orders_fit():
            return INFEASIBLE
        if self.options.climb:
            self._climb()
        refinement = 1
        while not self._done:
            grid = TimeGrid.of(self.problem, self.horizon_us, refinement)
            self.raise_bound(grid.raised_us(self.bound_us))
            status = self._round(grid)
            if status == cp_model.INFEASIBLE and self.orders is None:
                return INFEASIBLE
            finer = grid.refinement_for(self.value_us) if grid.exact and self.orders else refinement
            if status != cp_model.OPTIMAL or finer == refinement:
                break
            refinement = finer
        return self.answer

    def ask(self) -> Solution:
        """One question for a schedule below the value (`ask_for_better`)."""
        grid = TimeGrid.of(self.problem, self.horizon_us)
        if grid.exact and not self.limits.reached(self.value_us, self.bound_us):
            value_us = self.value_us
            grid = TimeGrid.of(self.problem, self.horizon_us, grid.refinement_for(value_us))
            ticks = (grid.ticks_up(value_us) // grid.step - 1) * grid.step
            variables = build_model(self.problem, grid, self.horizon_us, self.bound_us, self.options)
            variables.model.add(variables.objective <= ticks + grid.step - 1)  # ops without length may add to a step
            variables.model.clear_objective()  # type: ignore[no-untyped-call]
            solver = configured_solver(self.limits)
            # Measured: presolve takes up to ten times what the rest takes, a linear relaxation half of the time.
            solver.parameters.cp_model_presolve, solver.parameters.linearization_level = False, 0
            callback = _Callback(variables, self)
            status, _ = solve_unless_cancelled(solver, variables.model, self.limits.cancel, callback)
            if status == cp_model.INFEASIBLE and self.value_us == value_us:
                self.raise_bound(grid.proved_us(ticks + grid.step))
        return self.answer

    def _no_orders_fit(self) -> bool:
        """Look for orders within the budgets, whatever their value. Returns True if it is proved that there are none.

        Durations do not matter here. Let the ops of any schedule run one after another, in the order of their starts:
        all rules are kept, and an op finds on its device and on the host no more than at its start in that schedule,
        since what has begun before has ended too. So where no schedule of ops that take one tick each keeps the
        budgets, none does, and so short a horizon is quickly searched. Orders that are found may still exceed the
        host's budget with the times of the problem, and are then not taken (docs/adr/0003).
        """
        stages = [_retimed(stage, lambda _: 1) for stage in self.problem.stages]
        retimed = self.problem.replaced(stages=stages, transfer_us=0, objective="makespan", overlaps=None)
        timeless = _without_time_factors(retimed.replaced(**_retimed_spread(self.problem, lambda _: 1, lambda _: 0)))
        horizon = horizon_us(timeless, float("inf"))
        variables = build_model(timeless, TimeGrid.of(timeless, horizon), horizon, 0.0, self.options)
        variables.model.clear_objective()  # type: ignore[no-untyped-call]
        limits = replace(self.limits, deterministic_limit=self.work_left).part(FIRST_ORDERS)
        callback = _Callback(variables, self)
        status, work = solve_unless_cancelled(configured_solver(limits), variables.model, limits.cancel, callback)
        self._spend(work)
        return status == cp_model.INFEASIBLE

    def _climb(self) -> None:
        """Ask for schedules between bound and value, for a part of the time: where there is none, the bound rises.

        The first question is for the bound itself, each further one takes longer strides, but never beyond the
        middle. Those far below the optimum are soon refuted, those far above it soon answered; where neither happens in
        a part of the time left, the rest is spent above. None is asked twice: `least_us`, the next one from below, is
        exact, while the bound is rounded, with times of many digits to less than what was just refuted.
        """
        limits = self.limits.part(CLIMB)
        work_left = limits.deterministic_limit
        stride, least_us = 0, Fraction(0)
        while self.value_us < float("inf") and not self._done:
            grid = TimeGrid.of(self.problem, self.horizon_us)
            if grid.exact:  # for spans as fine as it takes to refute all that is below the value
                grid = TimeGrid.of(self.problem, self.horizon_us, grid.refinement_for(self.value_us))
            self.raise_bound(grid.raised_us(self.bound_us))
            if not grid.exact or self._done:
                return
            first = ceil(max(Fraction(grid.bound_ticks(self.bound_us)), least_us * grid.ticks_per_us) / grid.step)
            ahead = grid.ticks_up(self.value_us) // grid.step - first
            if ahead <= 0:
                return
            stride = max(stride, ahead // MOST_STEPS)  # with times of many digits a step is next to nothing
            steps = first + min(stride, ahead // 2)
            ticks = steps * grid.step
            reach_us = min(self.horizon_us, horizon_us(self.problem, grid.us(ticks)))
            variables = build_model(self.problem, grid, reach_us, self.bound_us, self.options)
            variables.model.add(variables.objective <= ticks + grid.step - 1)  # ops without length may add to a step
            solver = configured_solver(replace(limits, deterministic_limit=work_left).part(QUESTION))
            self._set_linearization(solver)
            solver.parameters.cp_model_presolve = False  # measured: it takes up to ten times what the rest takes
            before_us = self.value_us
            callback = _Callback(variables, self)
            status, work = solve_unless_cancelled(solver, variables.model, limits.cancel, callback)
            self._spend(work)
            work_left = None if work_left is None else max(work_left - work, 0.0)
            if status == cp_model.INFEASIBLE:
                self.raise_bound(grid.proved_us(ticks + grid.step))
            elif status != cp_model.UNKNOWN and self.value_us >= before_us:
                return
            if status in (cp_model.INFEASIBLE, cp_model.UNKNOWN):
                least_us = Fraction(ticks + grid.step) / grid.ticks_per_us
            if limits.seconds >= limits.time_limit_s if work_left is None else work_left < LEAST_WORK:
                return
            stride = 2 * stride + 1

    def _set_linearization(self, solver: cp_model.CpSolver) -> None:
        """No linear relaxation where memory is an order of ops: measured, proofs take half the work without."""
        if _has_memory_order(self.problem, self.options):
            solver.parameters.linearization_level = 0

    def _spend(self, work: float) -> None:
        if self.work_left is not None:
            self.work_left -= work

    @property
    def _done(self) -> bool:
        if self.work_left is None:
            spent = self.orders is not None and self.limits.seconds >= self.limits.time_limit_s
        else:
            spent = self.work_left <= 0
        return spent or self.limits.cancel.requested or self.limits.reached(self.value_us, self.bound_us)

    def _round(self, grid: TimeGrid) -> cp_model.CpSolverStatus:
        variables = build_model(self.problem, grid, self.horizon_us, self.bound_us, self.options)
        if self.orders is not None:
            add_hint(variables, self.orders)
        solver = configured_solver(replace(self.limits, deterministic_limit=self.work_left))
        self._set_linearization(solver)
        callback = _Callback(variables, self)
        status, work = solve_unless_cancelled(solver, variables.model, self.limits.cancel, callback)
        self._spend(work)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self.raise_bound(grid.proved_us(solver.best_objective_bound))
        return status


def add_hint(variables: Variables, orders: Orders) -> None:
    """Give the solver a known schedule to begin with.

    The hint names every variable: CP-SAT takes a complete hint as its first solution, a partial one it must search to
    complete.
    """
    if variables.problem.has_factors and not (variables.grid.exact and variables.grid.step == 1):
        return  # true times are not those of the model
    model, ops = variables.model, set(orders.ops())
    taken = {(s, i): _option_taken(variables, orders, ops, s, i) for s, i in variables.options}
    starts = _hinted_starts(variables, orders, taken)
    tasks, all_starts = dict(variables.tasks), dict(starts)
    for (s, i), options in variables.options.items():
        for option in options:
            model.add_hint(option.literal, option is taken[s, i])
            tasks |= {task.op: task for task in option.tasks.values() if task.op not in tasks or option is taken[s, i]}
    for kind in ("O", "R", "C", "CB"):
        units = variables.problem.units_in_order(kind, orders.microbatch_order).tolist()
        for s, (before, unit) in product(range(len(variables.problem.stages)), pairwise([None, *units])):
            op, earlier = Op(kind, s, unit), Op(kind, s, -1 if before is None else before)
            if op in tasks and op not in starts:  # an absent op: after that of the unit before, in no time
                length = tasks[earlier].ticks if earlier in starts else 0
                all_starts[op] = all_starts[earlier] + length if earlier in all_starts else 0

    more_ticks = add_block_hints(variables, orders.blocks, starts)

    def ticks_between(first: Moment, last: Moment) -> int:
        begin, end = (one.at(all_starts[one.task.op], more_ticks.get(one.task.op, 0)) for one in (first, last))
        return end - begin

    for op, task in tasks.items():
        model.add_hint(task.start, all_starts[op])
    for (s, i), leaves in variables.leaves.items():
        model.add_hint(leaves, Op("O", s, i) in starts)
    for length_variable, first, last, least in variables.lengths:
        present = first.task.op in starts and last.task.op in starts
        model.add_hint(length_variable, max(ticks_between(first, last), least) if present else least)
    for (s, i), fused in variables.fused.items():
        if not variables.graph.splits[s]:
            continue  # a constant, and a variable that is named twice makes a hint invalid
        model.add_hint(fused, Op("BW", s, i) in ops or Op("CBW", s, i) in ops)
    microbatch_order = list(orders.microbatch_order or range(variables.problem.microbatches))
    for (i, j), literal in variables.before.items():
        model.add_hint(literal, microbatch_order.index(i) < microbatch_order.index(j))
    for (n, i), barrier in variables.barriers.items():
        ends = [
            Moment(variables.task(one.name, d, i), True)
            for one in variables.graph.passes[n : n + 1]
            for d in one.devices
        ]
        model.add_hint(barrier, max(end.at(all_starts[end.task.op]) for end in ends))
    for literal, one, other in variables.firsts:
        model.add_hint(literal, all_starts[one] < all_starts[other])
    for literal, forward, s, i in variables.aways:
        offload, reload, at = Op("O", s, i), Op("R", s, i), all_starts[forward]
        gone = offload in starts and all_starts[offload] + tasks[offload].ticks <= at <= all_starts[reload]
        model.add_hint(literal, gone)
    model.add_hint(variables.objective, max(ticks_between(begin, end) for begin, end in variables.measured))


def _option_taken(variables: Variables, orders: Orders, ops: Collection[Op], s: int, i: int) -> OptionTasks:
    """The option of the activation of microbatch i on stage s in known orders."""
    if orders.modes is not None:
        choice = int(orders.modes[s, i])
    else:
        choice = int(variables.graph.whole_option[s]) if Op("O", s, i) in ops else 0
    inside = Op("CB", s, i) in ops or Op("CBW", s, i) in ops
    options = variables.options[s, i]
    return next((option for option in options if (option.number, "CB" in option.tasks) == (choice, inside)), options[0])


def _hinted_starts(
    variables: Variables, orders: Orders, taken: Mapping[tuple[int, int], OptionTasks]
) -> Mapping[Op, int]:
    """Start in ticks of each op of known orders, in the options taken.

    A fused backward is split, a recomputation inside comes before its backward, like W that never are fused are sorted.
    """
    if variables.problem.has_factors:  # the grid is exact, and no op without length
        simulation, tick_us = simulate(variables.problem, orders), float(1 / variables.grid.ticks_per_us)
    else:
        simulation, tick_us = _timed_in_ticks(variables, orders), TICK_US
    starts_us = simulation.start_us - simulation.start_us.min()
    ticks = np.ceil(starts_us / tick_us - SLACK).astype(np.int64)  # the least span may have begins between two ticks
    starts = {}
    for (kind, s, i), at in zip(simulation.ops, ticks.tolist(), strict=True):
        if kind not in ("BW", "CB", "CBW"):
            starts[Op(kind, s, i)] = at
            continue
        backward = at
        if kind != "BW":
            starts[Op("CB", s, i)] = at
            backward += taken[s, i].tasks["CB"].ticks
        starts[Op("B", s, i)] = backward
        if kind != "CB":
            starts[Op("W", s, i)] = backward + variables.task("B", s, i).ticks
    return in_weight_order(variables.problem, starts, variables.fusing_stages)


def _timed_in_ticks(variables: Variables, orders: Orders) -> Simulation:
    """Known orders with the durations of the model, where nothing takes less than a tick.

    True times rounded to ticks could let ops of a device overlap, and CP-SAT would drop the hint.
    """
    problem, grid_ticks = variables.problem, variables.grid.ticks
    delays_us = [
        DirectedTransfer.model_construct(
            forward=TICK_US * grid_ticks(forward_us), backward=TICK_US * grid_ticks(backward_us)
        )
        for forward_us, backward_us in zip(problem.forward_delay_us, problem.backward_delay_us, strict=True)
    ]
    stages = [_retimed(stage, lambda time_us: TICK_US * variables.grid.length(time_us)) for stage in problem.stages]
    spread = _retimed_spread(
        problem,
        lambda time_us: TICK_US * variables.grid.length(time_us),
        lambda time_us: TICK_US * grid_ticks(time_us),
    )
    overlaps = overlaps_in_ticks(variables)
    return simulate(problem.replaced(stages=stages, transfer_us=delays_us, overlaps=overlaps, **spread), orders)


def _retimed(stage: Stage, length: Callable[[float], float]) -> Stage:
    """The stage with ops of other lengths."""

    def times(entry: Document, *names: str) -> dict[str, float]:
        return {name: length(getattr(entry, name)) for name in names}

    def copy(offload: Offload | None) -> Offload | None:
        return offload and offload.replaced(**times(offload, "offload_us", "reload_us"))

    modes = [
        mode.replaced(
            offload=copy(mode.offload),
            **(times(mode, "recompute_us") if stage.choices[stage.choice_numbers[mode.name]].recomputes else {}),
        )
        for mode in stage.modes
    ]
    own = times(stage, "forward_us", "backward_input_us", "backward_weight_us")
    return stage.replaced(**own, offload=copy(stage.offload), modes=modes)


def _retimed_spread(
    problem: Problem, length: Callable[[float], float], delay: Callable[[float], float]
) -> dict[str, Any]:
    """The fields of spread passes and gates, with ops of other lengths and other times between them."""
    if not problem.spread and not problem.gates:
        return {}

    def afters(owner: SpreadPass | Gate) -> list[AfterOp | AfterPass]:
        return [one.replaced(us=delay(one.us)) for one in owner.after]

    passes = [
        one.replaced(us=[length(us) if us else 0 for us in one.us], after=afters(one)) for one in problem.spread or ()
    ]
    return {"spread": passes, "gates": [gate.replaced(after=afters(gate)) for gate in problem.gates or ()]}


def _without_time_factors(problem: Problem) -> Problem:
    """The problem with units that differ in bytes alone."""

    def of_bytes(factors: SliceFactors | None) -> SliceFactors | None:
        return factors and SliceFactors.model_construct(bytes=factors.bytes)

    own, slices = problem.microbatch_factors, problem.slices
    return problem.replaced(
        microbatch_factors=own and [MicrobatchFactors.model_construct(bytes=entry.bytes) for entry in own],
        slices=slices and slices.replaced(factors=of_bytes(slices.factors)),
        stages=[stage.replaced(slice_factors=of_bytes(stage.slice_factors)) for stage in problem.stages],
    )


class _Callback(cp_model.CpSolverSolutionCallback):
    """Offers the orders of each solution to the search as CP-SAT finds it."""

    def __init__(self, variables: Variables, search: _Search) -> None:
        super().__init__()
        self.variables = variables
        self.search = search

    def on_solution_callback(self) -> None:
        variables, problem = self.variables, self.search.problem
        planned = {}
        for op, task in variables.tasks.items():
            if op.kind not in COPIES:
                planned[op] = self.value(task.start), self.value(task.end)
        modes = np.zeros((len(problem.stages), problem.units), np.int64)
        for s, i in {**variables.leaves, **variables.options}:
            option = next(option for option in variables.options_of(s, i) if self.boolean_value(option.literal))
            modes[s, i] = option.number
            for kind, task in option.tasks.items():
                at = self.value(task.start)
                planned[Op(kind, s, i)] = (at, at + task.ticks)
            if "CB" in option.tasks:
                planned[Op("CB", s, i)] = (planned[Op("CB", s, i)][0], planned.pop(Op("B", s, i))[1])
        for (s, i), fused in variables.fused.items():
            if self.value(fused):
                inside = "C" if Op("CB", s, i) in planned else ""
                (begin, _), (_, end) = (planned.pop(Op(kind, s, i)) for kind in (f"{inside}B", "W"))
                planned[Op(f"{inside}BW", s, i)] = (begin, end)
        microbatch_order = None
        if problem.has_free_order:
            firsts = range(0, problem.units, problem.slice_count)
            microbatch_order = np.argsort([planned[Op("F", 0, unit)][0] for unit in firsts]).tolist()
        orders = orders_from_times(
            problem, planned, modes=modes if problem.has_modes else None, microbatch_order=microbatch_order
        )
        orders = replace(orders, blocks=dict(pair for pair, literal in variables.blocks.items() if self.value(literal)))
        minimises = variables.model.has_objective()  # without one the "best bound" of CP-SAT says nothing
        self.search.offer(orders, variables.grid.proved_us(self.best_objective_bound) if minimises else 0.0)


def solve_unless_cancelled(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    cancel: Cancel,
    callback: cp_model.CpSolverSolutionCallback | None = None,
) -> tuple[cp_model.CpSolverStatus, float]:
    """Solve a model until the solver's own limits or `cancel`: the status, and the deterministic work done.

    A solver that has not begun ignores `stop_search`: if the cancel came while the model was built, it is not started,
    and the status is UNKNOWN.
    """
    with cancel.calling(solver.stop_search):
        if cancel.requested:
            return cp_model.UNKNOWN, 0.0
        status = solver.solve(model, callback)
    assert status != cp_model.MODEL_INVALID, model.validate()
    return status, solver.response_proto.deterministic_time


def configured_solver(limits: Limits) -> cp_model.CpSolver:
    """A solver that stops at the limits' gap and time, or after their deterministic amount of work."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.workers
    solver.parameters.random_seed = limits.seed
    solver.parameters.relative_gap_limit = limits.gap
    solver.parameters.catch_sigint_signal = False
    if limits.deterministic_limit is None:
        solver.parameters.max_time_in_seconds = limits.time_left_s
    else:
        solver.parameters.max_deterministic_time = limits.deterministic_limit
    return solver
