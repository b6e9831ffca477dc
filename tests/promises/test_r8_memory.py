"""R8: a solve that explodes ends with the limit `memory`, and takes neither its incumbent nor its parent with it."""

from __future__ import annotations

from solver.limits import Limits
from solver.process import Heartbeat
from tests.promises.harness import heard

MEMORY_LIMIT_BYTES = 400 * 2**20
STEP_BYTES = 64 * 2**20


def test_a_solver_that_takes_more_and_more() -> None:
    run = heard("explode", Limits(60, workers=1), memory_limit_bytes=MEMORY_LIMIT_BYTES)
    assert run.result.limit == "memory"
    held = [event.memory_bytes for _, event in run.events if isinstance(event, Heartbeat)]
    assert max(size for size in held if size is not None) <= MEMORY_LIMIT_BYTES + 4 * STEP_BYTES
    run.check_best_is_kept()


def test_a_solver_that_is_refused_memory() -> None:
    run = heard("exhaust", Limits(60, workers=1))
    assert run.result.limit == "memory"
    run.check_best_is_kept()
