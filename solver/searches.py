"""Lazy entry points of the searches, each loaded when it begins.

OR-Tools and HiGHS take longer to load than a published schedule takes to be made, and who only names methods, as the
service does, needs neither. So what chooses a search takes it from here, and a process that waits for its problem
loads them all meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from optpipe.problem import Problem
from solver.limits import Limits
from solver.solution import OnSolution, Solution


def cp_sat(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """CP-SAT on the whole model of intervals."""
    from solver.exact.cp_sat.model import solve_cp_sat

    return solve_cp_sat(problem, limits, start, on_solution)


def milp(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """HiGHS on the whole mixed-integer program. Raises MethodError where that would be too large."""
    from solver.exact.milp.model import solve_milp

    return solve_milp(problem, limits, start, on_solution)


def annealing(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Simulated annealing over orders, offloads and waits."""
    from solver.search.annealing.search import local_search

    return local_search(problem, limits, start, on_solution)


def modulo(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """One block of a microbatch, or of a cycle of unequal ones, repeated every period."""
    from solver.search.modulo.modes import modulo_with_modes
    from solver.search.modulo.search import modulo_search
    from solver.search.modulo.units import modulo_with_units

    if problem.has_factors or problem.slice_count > 1:
        return modulo_with_units(problem, limits, start, on_solution)
    search = modulo_with_modes if problem.has_modes else modulo_search
    return search(problem, limits, start, on_solution)


def in_flight(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """List schedules with as many microbatches in flight as memory has room for."""
    from solver.search.in_flight import in_flight_search

    return in_flight_search(problem, limits, start, on_solution)


def lns(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Parts of the best schedule in time, solved anew by CP-SAT."""
    from solver.search.lns.search import lns_search

    return lns_search(problem, limits, start, on_solution)


def relaxation(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Better bounds, from parts of the problem that CP-SAT solves exactly."""
    from solver.exact.relaxation import relaxation_bound

    return relaxation_bound(problem, limits, start, on_solution)


def states(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Better bounds, and where nothing leaves the optimum, from states of progress; copies take no time."""
    from solver.exact.state_bound import state_bound

    return state_bound(problem, limits, start, on_solution)


def copy_states(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Better bounds where copies take time, from states of progress of ever more devices."""
    from solver.exact.copy_states import copy_state_bound

    return copy_state_bound(problem, limits, start, on_solution)


def copy_proof(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """A proof that the start is optimal where copies take time, from states of ever more devices."""
    from solver.exact.copy_states import copy_state_proof

    return copy_state_proof(problem, limits, start, on_solution)


def beam(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Schedules from a beam over states of progress."""
    from solver.search.beam import beam_search

    return beam_search(problem, limits, start, on_solution)


def parts(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """A proof that the start is optimal, from one device or a few, or a better schedule."""
    from solver.exact.relaxation import proof_by_parts

    return proof_by_parts(problem, limits, start, on_solution)


def part_bounds(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Better bounds, from questions to one device or two halfway to the best value known."""
    from solver.exact.relaxation import bound_by_parts

    return bound_by_parts(problem, limits, start, on_solution)


KERNELS = {
    in_flight: "lists",
    states: "states",
    beam: "beam",
    modulo: "pattern",
    lns: "windows",
    annealing: "search",
    copy_proof: "copies",
    copy_states: "copies",
}
"""Searches with kernels, each with the stage of `solver.kernels` that compiles them, the quickest first."""


def is_ready(search: Callable[..., Solution]) -> bool:
    """True if a search can begin; False while another process compiles its kernels."""
    from solver.kernels import are_ready

    return search not in KERNELS or are_ready(KERNELS[search])


def load_searches() -> None:
    """Load them all."""
    import solver.exact.copy_states
    import solver.exact.cp_sat.model
    import solver.exact.milp.model
    import solver.exact.relaxation
    import solver.exact.states
    import solver.search.annealing.search
    import solver.search.beam
    import solver.search.lns.search  # noqa: F401
