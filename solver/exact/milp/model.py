"""Mixed-integer program: arrays, objective, warm start, and the solve with HiGHS (docs/math/milp.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, product
from math import isfinite

import highspy
import numpy as np
from scipy.sparse import csr_matrix

from optpipe.mode_names import OFFLOAD
from optpipe.ops import Bools, Floats, Ints, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import orders_from_times
from solver.exact.incumbent import Incumbent
from solver.exact.milp.constraints import (
    Constraints,
    Rows,
    add_length_terms,
    add_weight_order,
    add_work_that_memory_holds_back,
)
from solver.exact.milp.time_windows import TOLERANCE
from solver.exact.milp.variables import DEFAULT, OptionColumn, Options, Table, Variables, has_every_schedule
from solver.exact.rules import in_weight_order
from solver.exact.ticks import TimeGrid
from solver.limits import Limits
from solver.microbatch_orders import with_equals_ascending
from solver.scale import refuse_beyond_milp
from solver.solution import INFEASIBLE, OnSolution, Solution


@dataclass(frozen=True)
class Program:
    """Minimise the objective column subject to ``matrix @ columns >= row_lower`` and ``lower <= columns <= upper``."""

    variables: Variables
    rows: Rows
    matrix: csr_matrix
    row_lower: Floats
    lower: Floats
    upper: Floats


def build_program(
    problem: Problem, horizon_us: float, bound_us: float, value_us: float = float("inf"), options: Options = DEFAULT
) -> Program:
    """The whole model. No op ends later than `horizon_us`, no value is below `bound_us`.

    Schedules with a value above `value_us` may be left out.
    """
    variables = Variables(problem, horizon_us, value_us, options)
    constraints = Constraints(variables, options)
    constraints.add_all()
    add_objective(variables, constraints.rows, options)
    if options.work:
        add_work_that_memory_holds_back(variables, constraints.rows)
    if options.weight_order:
        add_weight_order(variables, constraints.rows)
    matrix, row_lower = constraints.rows.matrix(variables.size)
    lower, upper = variables.bounds()
    if options.bound:
        lower[variables.objective] = min(bound_us / variables.unit_us, upper[variables.objective])
    return Program(variables, constraints.rows, matrix, row_lower, lower, upper)


def load_program(program: Program) -> highspy.Highs:
    """Load the program into a HiGHS without output."""
    lp = highspy.HighsLp()
    lp.num_row_, lp.num_col_ = program.matrix.shape
    cost = np.zeros(lp.num_col_)
    cost[program.variables.objective] = 1.0
    lp.col_cost_ = cost
    lp.col_lower_ = program.lower
    lp.col_upper_ = program.upper
    lp.row_lower_, lp.row_upper_ = program.row_lower, np.full(lp.num_row_, highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_ = program.matrix.indptr, program.matrix.indices
    lp.a_matrix_.value_ = program.matrix.data
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[binary] for binary in program.variables.is_binary().astype(int)]
    highs = highspy.Highs()
    highs.silent()
    highs.passModel(lp)
    return highs


def add_objective(variables: Variables, rows: Rows, options: Options) -> None:
    """The objective column is the makespan or the largest device span.

    An op ends no later than the objective less all work ordered after it. Where `workloads` is off that work is left
    out, and the last W of each stage is enough, since it ends after all other ops of the stage.
    """
    length, spans = variables.windows.surely, variables.problem.objective == "device_span"
    for device, stages in enumerate(variables.problem.stages_of):
        if not stages:
            continue
        first, compute = variables.first_of(device), variables.of("FBWC", device)
        ends = compute if options.workloads else np.array(variables.last_of(device))
        block = rows.block("objective", (ends,), length[ends]).term(variables.objective, 1.0).term(ends, -1.0)
        if spans:
            block.term(int(variables.begin[device]), 1.0)
        add_length_terms(block, variables, ends, -1.0)
        if options.workloads:
            for k in compute:
                block.choice(variables.order, ends, np.full(len(ends), k), -length[k])
                if k != first:  # behind which a device does all that is decided
                    add_length_terms(block, variables, np.full(len(ends), k), -1.0, ends == first)


def point_from_orders(variables: Variables, orders: Orders) -> Floats:
    """The columns of a known schedule, as a start for HiGHS. A fused backward counts as B and W without a pause."""
    orders = with_equals_ascending(variables.problem, orders)
    simulation = simulate(variables.problem, orders)
    values = np.zeros(variables.size)
    values[variables.objective] = simulation.value_us / variables.unit_us
    start, present = values[: variables.objective], np.zeros(len(variables.ops), bool)
    begin, length = float(simulation.start_us.min()), variables.windows.length
    taken = _options_taken(variables, orders)
    slots: dict[Op, tuple[float, float, int]] = {}
    """Start, end and place of each op among those of its device: ops without length may share an instant."""
    place = count()
    longer = np.zeros(len(variables.ops))
    for op in orders.ops():
        at = (float(simulation.start_us[simulation.index[op]]) - begin) / variables.unit_us
        option = taken.get(op[1:])
        names = (
            [op.kind + str(option.number)]
            if option and op.kind in "ORC"
            else ["B", "W"]
            if "BW" in op.kind
            else [op.kind[-1]]
        )
        for part in (Op(name, *op[1:]) for name in names):
            if part in variables.index:
                k = variables.index[part]
                if "CB" in op.kind and part.kind == "B" and option:
                    longer[k] = option.variant.mode.recompute_us / variables.unit_us
                end = at + float(length[k]) + float(longer[k])
                slots[part] = at, end, next(place)
                at = end
    places = np.zeros(len(variables.ops), np.int64)
    for (s, i), one in variables.fused.items():
        values[one.column] = any(Op(kind, s, i) in simulation.index for kind in ("BW", "CBW"))
    for op, (at, _, number) in in_weight_order(variables.problem, slots, variables.fusing).items():
        k = variables.index[op]
        start[k], present[k], places[k] = at, True, number
    _place_absent(variables, start, present, places, orders.microbatch_order)
    moves = variables.leaves >= 0
    values[variables.leaves[moves]] = present[moves]
    for options in variables.options.values():
        values[[option.column for option in options]] = [option in taken.values() for option in options]
    for column, firsts in zip(variables.begin.tolist(), variables.windows.firsts, strict=True):
        if column >= 0:
            values[column] = start[firsts].min()
    _set_binaries(variables, values, present, places, longer, orders.microbatch_order)
    return values


def _options_taken(variables: Variables, orders: Orders) -> dict[tuple[int, int], OptionColumn]:
    """The option of each activation of known orders that has one of its own and is not kept."""
    there = {op for op in orders.ops() if op.kind in ("O", "CB", "CBW")}
    taken = {}
    for (s, i), options in variables.options.items():
        implied = variables.problem.stages[s].choice_numbers.get(OFFLOAD, 0) if Op("O", s, i) in there else 0
        choice = implied if orders.modes is None else int(orders.modes[s, i])
        inside = Op("CB", s, i) in there or Op("CBW", s, i) in there
        for option in options:
            if (option.variant.choice, option.variant.inside) == (choice, inside):
                taken[s, i] = option
    return taken


def _place_absent(
    variables: Variables, start: Floats, present: Bools, places: Ints, microbatch_order: Sequence[int] | None
) -> None:
    """Times of absent ops, which have no length.

    A copy follows F, or O, and those of the unit before at once. A recomputation comes as late as it can: right before
    its backward, or before one of a later unit; with slices a reload too.
    """
    problem, length, index = variables.problem, variables.windows.length, variables.index
    late = "C" if problem.slice_count == 1 else "RC"
    kinds: dict[tuple[str, int], set[str]] = defaultdict(set)
    for kind, s, _ in variables.ops:
        kinds[kind[0], s].add(kind)
    for s, kind in product(range(len(problem.stages)), "OR"):
        earlier: list[int] = []  # copies of the unit before, of whatever variant
        for i in problem.units_in_order(kind, microbatch_order).tolist() if kind not in late else ():
            own = [index[Op(other, s, i)] for other in kinds[kind, s]]
            for k in own:
                if not present[k]:
                    before = [variables.partner(k, "F" if kind == "O" else "O"), *earlier]
                    start[k] = max(start[b] + length[b] * present[b] for b in before)
            earlier = own
    for s, kind in product(range(len(problem.stages)), late):
        latest = np.inf
        for at, i in reversed(list(enumerate(problem.units_in_order(kind, microbatch_order).tolist()))):
            own = [index[Op(other, s, i)] for other in kinds[kind, s]]
            latest = min(latest, start[index[Op("B", s, i)]], *(start[k] for k in own if present[k]), np.inf)
            for k in own:
                if not present[k]:
                    start[k], places[k] = latest, at - problem.units


def _set_binaries(
    variables: Variables,
    values: Floats,
    present: Bools,
    places: Ints,
    longer: Floats,
    microbatch_order: Sequence[int] | None,
) -> None:
    """Set the binaries that say what is before what, from the starts in `values` and, at one instant, from `places`.

    `longer`: what each op takes beyond its own length, where a backward recomputes inside.
    """
    start = values[: variables.objective]
    end = start + variables.windows.length * present + longer
    rank = np.empty(len(start), np.int64)
    # Of ops at one instant those without length come first, in the order of their device.
    rank[np.lexsort((places, end, start))] = np.arange(len(start))

    partners = variables.partners

    def set_values(table: Table, a: Ints, b: Ints, yes: Bools) -> None:
        values[table.column[a, b]] = yes

    def value(table: Table, a: Ints, b: Ints) -> Floats:
        column = table.column[a, b]
        chosen: Floats = table.constant[a, b] + table.slope[a, b] * np.where(column >= 0, values[column], 0.0)
        return chosen

    for table in (variables.order, variables.ahead):
        a, b = table.open_pairs()
        set_values(table, a, b, rank[a] < rank[b])
    i, j = variables.before.open_pairs()  # whose columns those of `order` share, also for absent copies at one instant
    turn = np.argsort(microbatch_order or range(variables.problem.microbatches))
    set_values(variables.before, i, j, turn[i] < turn[j])
    x, r = variables.started.open_pairs()
    # At the instant of an absent reload nothing needs to count as started, and its level is no more than that before.
    set_values(variables.started, x, r, start[x] <= start[r] + np.where(present[r], TOLERANCE, -TOLERANCE))
    x, r = variables.ended.open_pairs()
    set_values(variables.ended, x, r, end[x] <= start[r] + TOLERANCE)
    # Away at x: offloaded before x, and its reload comes after x, which counts there (`Constraints.away`).
    o, x = variables.away.open_pairs()
    reload = partners(o, "R")
    compute = variables.windows.computes[x]
    counts = np.where(compute, value(variables.started, x, reload), value(variables.order, x, reload))
    left, returns = end[o] <= start[x] + TOLERANCE, start[x] <= start[reload] + TOLERANCE
    set_values(variables.away, o, x, present[o] & left & returns & (counts > 0))
    o, q = variables.returned.open_pairs()
    set_values(variables.returned, o, q, end[partners(o, "R")] <= start[q] + TOLERANCE)
    o, q = variables.counted.open_pairs()
    ahead, returned = value(variables.ahead, o, q), value(variables.returned, o, q)
    set_values(variables.counted, o, q, present[o] & (ahead > returned))
    for n, option in enumerate(variables.recomputing):
        x = np.flatnonzero(variables.gone[n] >= 0)
        compute = variables.windows.computes[x]
        forward, last = (np.full(len(x), op) for op in (option.forward, option.end))
        over = value(variables.ended if option.variant.inside else variables.started, last, x)
        begun = np.where(compute, value(variables.order, forward, x), value(variables.started, forward, x))
        before = np.where(compute, value(variables.order, x, last), 1 - over)
        values[variables.gone[n, x]] = values[option.column] * begun * before
    for (n, kind, reload_), column in variables.beside.items():
        option = variables.recomputing[n]
        k, r = np.array([variables.running(option, kind)]), np.array([reload_])
        running = value(variables.started, k, r) - value(variables.ended, k, r)
        values[column] = max(0.0, values[option.column] + float(running[0]) - 1)


class Timing:
    """Exact times for the binaries of a solution: the earliest that keep every row between two starts.

    A solver's own times carry its tolerances, and with them a decision may seem to contradict its time.
    """

    def __init__(self, variables: Variables, matrix: csr_matrix, lower: Floats) -> None:
        self.variables = variables
        starts = matrix[:, : variables.objective]
        objective = matrix[:, variables.objective].toarray().ravel()
        rows = np.flatnonzero((np.diff(starts.indptr) == 2) & (objective == 0))
        pairs = starts[rows]
        first, second = pairs.indices[::2], pairs.indices[1::2]
        forward = pairs.data[1::2] > 0
        self.before, self.after = np.where(forward, first, second), np.where(forward, second, first)
        self.binaries = matrix[rows][:, variables.objective + 1 :]
        self.lower = lower[rows]

    def orders(self, values: Floats) -> Orders:
        """The orders that the binaries of `values` stand for."""
        variables = self.variables
        decided = np.round(values)
        # With the binaries fixed each row is start[after] - start[before] >= gap: longest paths, by relaxing all rows
        # until nothing moves (Bellman and Ford).
        gap = self.lower - self.binaries @ decided[variables.objective + 1 :]
        start: Floats = np.array(variables.windows.earliest, np.float64)
        for _ in range(len(start) + 1):
            later = start.copy()
            np.maximum.at(later, self.after, start[self.before] + gap)
            if (later <= start + TOLERANCE / len(start)).all():
                break
            start = later
        present = [k for k in range(len(start)) if variables.leaves[k] < 0 or decided[variables.leaves[k]]]
        planned: dict[Op, tuple[float, float]] = {}
        for k in present:
            kind, s, i = variables.ops[k]
            inside = sum(time for column, time in variables.longer.get(k, ()) if decided[column])
            is_inside = any(decided[column] for column, _ in variables.longer.get(k, ()))
            op = Op("CB" if is_inside else kind[0], s, i)
            planned[op] = (float(start[k]), float(start[k] + variables.windows.length[k] + inside))
        for (s, i), one in variables.fused.items():
            if decided[one.column]:
                (begin, _), (_, end) = (planned.pop(Op(kind, s, i)) for kind in "BW")
                planned[Op("BW", s, i)] = (begin, end)
        planned = _at_shared_instants(planned)
        problem, modes = variables.problem, None
        if problem.has_modes:
            modes = np.zeros((len(problem.stages), problem.units), np.int64)
            for kind, s, i in planned:
                if kind == "O":
                    modes[s, i] = problem.stages[s].choice_numbers.get(OFFLOAD, 0)
            for (s, i), options in variables.options.items():
                modes[s, i] = sum(option.variant.choice for option in options if decided[option.column])
        return orders_from_times(problem, planned, TOLERANCE, modes, variables.microbatch_order(values))


def _at_shared_instants(planned: dict[Op, tuple[float, float]]) -> dict[Op, tuple[float, float]]:
    """The same starts and ends, of which those that only rounding sets apart are equal.

    Else an op without length may seem to come before one at the same instant that it follows.
    """
    times, places = np.unique(list(planned.values()), return_inverse=True)
    begins = np.diff(times, prepend=-np.inf) > ROUNDING
    at = times[begins][np.cumsum(begins) - 1][places].reshape(-1, 2)
    return {op: (start, end) for op, (start, end) in zip(planned, at.tolist(), strict=True)}


ROUNDING = TOLERANCE / 100
"""Units that sums of times may be apart by rounding."""

BOUND_SLACK = 1e-5
"""Units by which a bound of HiGHS is lowered: ten times its tolerances, and at most 1e-8 of the horizon."""


def solve_milp(
    problem: Problem,
    limits: Limits,
    start: Solution,
    on_solution: OnSolution,
    options: Options = DEFAULT,
) -> Solution:
    """Search with HiGHS from the best start known, reporting every better answer.

    Returns the last answer: its bound holds whether or not the search ended. It is INFEASIBLE where that is proved.
    Raises MethodError, before anything is built, where the model would be too large.
    """
    refuse_beyond_milp(problem)
    search = _Search(problem, limits, start, on_solution, options)
    with limits.cancel.calling(search.stop):
        return search.run()


class _Search(Incumbent):
    """Rounds of building and solving. A much better schedule ends a round: it narrows all windows of the next."""

    def __init__(
        self, problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution, options: Options
    ) -> None:
        super().__init__(problem, limits, start, on_solution, has_optimum=has_every_schedule(problem))
        self.options = options
        self.grid = TimeGrid.of(problem, self.horizon_us)
        self.stopped = False

    def stop(self) -> None:
        """End the search soon; HiGHS polls for it every few milliseconds."""
        self.stopped = True

    @property
    def over(self) -> bool:
        """True if no more time may be spent."""
        return self.stopped or self.limits.seconds >= self.limits.time_limit_s

    def run(self) -> Solution:
        """Rounds until one ends by itself or time is up."""
        while not self.over:
            round_ = _Round(self)
            round_.solve()
            if round_.infeasible and self.orders is None and self.has_optimum:
                return INFEASIBLE
            if not round_.outgrown or self.limits.reached(self.value_us, self.bound_us):
                break
        return self.answer


class _Round:
    """One model, with the windows that the best schedule allows, and one run of HiGHS on it."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        self.program = build_program(
            search.problem, search.horizon_us, search.bound_us, search.value_us, search.options
        )
        self.timing = Timing(self.program.variables, self.program.matrix, self.program.row_lower)
        self.built_for_us = search.value_us
        self.failure: BaseException | None = None
        self.infeasible = False

    @property
    def outgrown(self) -> bool:
        """True if the best schedule has become so much better that the model should be built again."""
        search = self.search
        return search.value_us < self.built_for_us * (1 - search.options.rebuild_gain)

    def solve(self) -> None:
        """Run HiGHS until it ends, is stopped, or has outgrown the model."""
        search, limits = self.search, self.search.limits
        highs = load_program(self.program)
        highs.setOptionValue("time_limit", limits.time_left_s)
        highs.setOptionValue("mip_rel_gap", limits.gap)
        highs.setOptionValue("threads", limits.workers)
        highs.setOptionValue("random_seed", limits.seed % 2**31)
        if search.orders is not None and search.options.warm_start:
            solution = highspy.HighsSolution()
            solution.col_value = point_from_orders(self.program.variables, search.orders)
            highs.setSolution(solution)
        highs.cbMipImprovingSolution.subscribe(self._on_solution)
        for event in (highs.cbMipInterrupt, highs.cbSimplexInterrupt):
            event.subscribe(self._on_interrupt)
        try:
            highs.run()
        finally:
            # The next run in this process may ask for another number of threads.
            highspy.Highs.resetGlobalScheduler(True)
        if self.failure:
            raise self.failure
        self.infeasible = highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        if self.infeasible:
            return
        # The point that HiGHS ended with: an incumbent that ends the search at once is not always reported before.
        info = highs.getInfo()
        bound_us = self._proved_us(info.mip_dual_bound)
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            search.offer(self.timing.orders(np.array(highs.getSolution().col_value)), bound_us)
        search.raise_bound(bound_us)

    def _proved_us(self, objective: float) -> float:
        """A bound of HiGHS, raised to the next value that schedules can have; 0 where it has none yet."""
        if not isfinite(objective):
            return 0.0
        return self.search.grid.raised_us((objective - BOUND_SLACK) * self.program.variables.unit_us)

    def _on_solution(self, event: highspy.HighsCallbackEvent) -> None:
        try:
            orders = self.timing.orders(np.array(event.data_out.mip_solution))
            self.search.offer(orders, self._proved_us(event.data_out.mip_dual_bound))
        except BaseException as error:  # HiGHS cannot pass it on: it is raised when HiGHS has stopped
            self.failure = error

    def _on_interrupt(self, event: highspy.HighsCallbackEvent) -> None:
        if self.search.over or self.failure or self.outgrown:
            event.interrupt()
