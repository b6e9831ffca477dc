"""Problem -> Schedule: what every caller uses. Published schedules at once, then the search that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread

from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us, split_backward_suffices
from solver.finish import finish, snapped_bound, within_budgets
from solver.floor import impossible_budgets, known_budgets_bytes, serial_orders
from solver.limits import Answer, Limits, Start
from solver.methods import METHODS, Method, method_named, published_orders


@dataclass(frozen=True)
class Progress:
    """A better value or bound, `seconds` after the start, found by `method`."""

    seconds: float
    value_us: float
    bound_us: float
    method: str

    @property
    def gap(self) -> float:
        """``(value - bound) / value``."""
        return (self.value_us - self.bound_us) / self.value_us if self.value_us else 0.0


SLOW = ("zb-v", "v-zb", "v-min", "v-half", "po-h", "po-f")
"""Published schedules that take seconds on large problems: tried last."""

OnProgress = Callable[[Progress], None]


def solve(
    problem: Problem, method: str = "auto", limits: Limits | None = None, on_progress: OnProgress | None = None
) -> Schedule:
    """The best schedule that `method` finds within `limits`, verified.

    A cancelled search returns the best schedule so far. Raises MethodError where the method cannot handle the
    problem, InfeasibleError where no schedule keeps the budgets, NoSolutionError where none was found in time.
    """
    chosen = method_named(method)
    report = _Reporter(limits or Limits(), on_progress)
    if chosen.orders is not None:
        orders = published_orders(chosen, problem)
        return finish(problem, orders, lower_bound_us(problem), chosen.name, report.limits.seconds)
    return _search(problem, chosen, report)


class _Reporter:
    """Passes on what is better than all before."""

    def __init__(self, limits: Limits, on_progress: OnProgress | None) -> None:
        self.limits = limits
        self.on_progress = on_progress
        self.best: tuple[float, float] = (float("inf"), 0.0)

    def __call__(self, value_us: float, bound_us: float, method: str) -> None:
        if value_us < self.best[0] or bound_us > self.best[1]:
            self.best = (min(value_us, self.best[0]), max(bound_us, self.best[1]))
            if self.on_progress:
                self.on_progress(Progress(self.limits.seconds, *self.best, method))


def _search(problem: Problem, chosen: Method, report: _Reporter) -> Schedule:
    assert chosen.search is not None
    _refuse_impossible(problem)
    start, source = _best_start(problem, report)
    answer = Answer(start.orders, start.value_us, start.bound_us)
    searcher = "cp-sat" if chosen.kind == "portfolio" else chosen.name
    if not report.limits.reached(start.value_us, start.bound_us) and not report.limits.cancel.requested:
        answer = chosen.search(
            problem, report.limits, start, lambda better: report(better.value_us, better.bound_us, searcher)
        )
    if not split_backward_suffices(problem):
        answer = replace(answer, bound_us=start.bound_us, infeasible=False)
    if answer.infeasible:
        raise InfeasibleError("proved: no schedule keeps the memory budgets.", known_budgets_bytes(problem))
    if answer.orders is None:
        raise NoSolutionError(
            f"nothing within the budgets was found in {report.limits.seconds:.1f} s. Maybe allow more time "
            f"(--time-limit), or raise devices[].memory_bytes to {known_budgets_bytes(problem)}, which is known to do."
        )
    bound = snapped_bound(answer.value_us, max(answer.bound_us, start.bound_us))
    kept_start = answer.orders is start.orders
    name = source if chosen.kind == "portfolio" and kept_start else searcher
    report(answer.value_us, bound, name)
    return finish(problem, answer.orders, bound, name, report.limits.seconds)


def _refuse_impossible(problem: Problem) -> None:
    short = impossible_budgets(problem)
    if short:
        device, needed, budget = short[0]
        raise InfeasibleError(
            f"devices[{device}].memory_bytes is {budget}, but one microbatch alone needs {needed}.",
            known_budgets_bytes(problem),
        )


def _best_start(problem: Problem, report: _Reporter) -> tuple[Start, str]:
    """The best published schedule that fits, else the floor; and who made it."""
    bound = lower_bound_us(problem)
    best: tuple[float, Orders | None, str] = (float("inf"), None, "")
    for name, orders in _candidates(problem, report.limits):
        simulation = simulate(problem, orders)
        value = simulation.value_us
        if value < best[0] and within_budgets(problem, orders, simulation):
            best = (value, orders, name)
            report(value, bound, name)
    best_value, best_orders, best_name = best
    return Start(bound, _horizon_us(problem, best_value), best_orders, best_value), best_name


def _candidates(problem: Problem, limits: Limits) -> Iterator[tuple[str, Orders]]:
    """The published schedules that fit, as long as a third of the time lasts; without any of them, the floor."""
    found = False
    for method in sorted(METHODS.values(), key=lambda method: method.name in SLOW):
        late = limits.cancel.requested or limits.seconds > limits.time_limit_s / 3
        if method.orders is None or (found and late):
            continue
        try:
            orders = published_orders(method, problem)
        except MethodError:
            continue
        found = True
        yield method.name, orders
    floor = None if found else serial_orders(problem)
    if floor is not None:
        yield "floor", floor


def _horizon_us(problem: Problem, value_us: float) -> float:
    """A time by which some schedule at least as good as `value_us` has ended, if it begins at 0.

    The makespan itself; for spans twice the value: on the device of the first stage all F and B end within its span,
    every other device begins within that time and has its own span. Without a schedule: everything one after another.
    """
    if value_us < float("inf"):
        return value_us if problem.objective == "makespan" else 2 * value_us
    transfers = sum(stage.offload.offload_us + stage.offload.reload_us for stage in problem.stages if stage.offload)
    delays = sum(problem.forward_delay_us) + sum(problem.backward_delay_us)
    return sum(problem.work_us) + problem.microbatches * (transfers + delays)


def solve_until_interrupted(problem: Problem, method: str, limits: Limits, on_progress: OnProgress | None) -> Schedule:
    """`solve` for a command line: Ctrl-C cancels the search and the best schedule so far is returned.

    The search runs in a thread beside the one that receives the signal; whether it came is `limits.cancel.requested`.
    """
    outcome: SimpleQueue[Schedule | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put(solve(problem, method, limits, on_progress))
        except BaseException as error:
            outcome.put(error)

    Thread(target=run, name="solve", daemon=True).start()
    while True:
        try:
            result = outcome.get()
            break
        except KeyboardInterrupt:
            limits.cancel.request()
    if isinstance(result, BaseException):
        raise result
    return result
