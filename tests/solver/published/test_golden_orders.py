"""Golden orders: published schedules answer instances and a seeded set of random problems as they were recorded.

The digests lie in ``golden_orders.json``, of every combination that a method handles. Where orders change on purpose,
``python -m tests.solver.published.test_golden_orders`` records them anew, and the commit says why they changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from instances import INSTANCES
from optpipe.errors import MethodError
from optpipe.ops import Orders, orders_to_data
from optpipe.problem import Problem
from solver.methods import METHODS
from solver.search.annealing.table import budgets_bytes
from solver.search.modulo.ends import Filler, few_units, first_ends, tuned_ends
from solver.search.modulo.pattern import Passes, orders_from_pattern
from solver.search.modulo.search import fitting_patterns
from solver.serial import known_budgets_bytes, serial_orders
from tests.sample import some

GOLDEN = Path(__file__).with_name("golden_orders.json")
RANDOM_PROBLEMS = 60
MOST_OPS = 1_600
"""Instances with more ops take long and follow the same code."""


def random_problem(seed: int) -> Problem:
    """Unequal stages along a line, in chunks, along a V or anywhere, with budgets from hardly enough to ample."""
    rng = Random(seed)
    p, microbatches = rng.choice([2, 3, 4, 6]), rng.randint(1, 12)
    line, v = list(range(p)), [*range(p), *reversed(range(p))]
    anywhere = [*line, *rng.choices(line, k=rng.randint(0, p))]
    rng.shuffle(anywhere)
    placement = [line, line * rng.choice([2, 3]), v, anywhere][seed % 4]
    times: list[float] = rng.choice([[10], [1, 2, 3, 9], [0, 0.5, 2.25, 7]])
    offloads, activation = rng.random() < 0.7, rng.randint(2, 9)
    stages: list[dict[str, Any]] = []
    for device in placement:
        held = max(1, activation + rng.choice([0, 0, -1, 1]))
        stages.append(
            {
                "device": device,
                **{f"{op}_us": rng.choice(times) for op in ("forward", "backward_input", "backward_weight")},
                "activation_bytes": held,
                "backward_weight_bytes": rng.randint(0, held + 1),
                "workspace_bytes": {"F": rng.randint(0, 1), "W": rng.randint(0, 2)} if rng.random() < 0.3 else {},
                "offload": {
                    "bytes": rng.randint(1, held),
                    "offload_us": rng.choice(times),
                    "reload_us": rng.choice(times),
                }
                if offloads and rng.random() < 0.8
                else None,
            }
        )
    share, budgets = rng.choice([0.05, 0.2, 0.4, 0.7, None]), []
    for d in range(p):
        sizes = [stage["activation_bytes"] for stage in stages if stage["device"] == d]
        least, most = max(sizes) + 3, microbatches * sum(sizes) + 3
        budgets.append(None if share is None else least + round(share * (most - least)))
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "objective": rng.choice(["makespan", "device_span"]),
            "transfer_us": rng.choice([0, 1, 5]),
            "devices": [{"memory_bytes": budget} for budget in budgets],
            "stages": stages,
            "copy_channels": {"duplex": rng.random() < 0.5, "shared_by": rng.choice([[], [[0, 1]], [line]])},
            "host_memory_bytes": rng.choice([None, None, 40]),
        }
    )


@cache
def problems() -> dict[str, Problem]:
    """The instances without activation modes or slices, and the random problems, by name."""
    loaded = {path.stem: Problem.load(path) for path in sorted(INSTANCES.glob("*-*.json"))}
    plain = {name: p for name, p in loaded.items() if not p.has_modes and not p.has_factors and p.slice_count == 1}
    small = {name: p for name, p in plain.items() if 3 * len(p.stages) * p.microbatches <= MOST_OPS}
    return small | {f"random-{seed}": random_problem(seed) for seed in range(RANDOM_PROBLEMS)}


def modulo_orders(problem: Problem) -> Orders | None:
    """The ends of the first pattern that fits, tuned a little."""
    passes, budgets = Passes.of(problem), budgets_bytes(problem)
    patterns = fitting_patterns(passes, budgets, float(passes.work_us().max()), 12, 0.15, np.random.default_rng(0))
    if not patterns:
        return None
    few = few_units(patterns[0], problem.microbatches)
    filler = Filler(patterns[0], passes, few, budgets, problem.objective == "device_span")
    _, ends = tuned_ends(filler, first_ends(filler)[1], 30, np.random.default_rng(1), lambda: False)
    filler = Filler(patterns[0], passes, problem.microbatches, budgets, problem.objective == "device_span")
    return None if filler.value_us(ends) == np.inf else orders_from_pattern(problem, filler.orders(ends))


def serial(problem: Problem) -> Orders | None:
    known_budgets_bytes(problem)
    return serial_orders(problem)


APART = ("seq1f1b", "slimpipe", "dualpipe-v", "vocab-1", "vocab-2")
"""Schedules of problems that are not among these."""

SCHEDULERS = {
    # 1F1B that recomputes is for stages with modes, others for slices, blocks or passes; those recorded have none.
    **{
        name: method.orders
        for name, method in METHODS.items()
        if method.orders and "recompute" not in name and name not in APART
    },
    "serial": serial,
    "modulo": modulo_orders,
}


def digest(scheduler: str, problem: Problem) -> str | None:
    """Digest of the orders, the waits and the channels; None where the scheduler does not handle the problem."""
    try:
        orders = SCHEDULERS[scheduler](problem)
    except MethodError:
        return None
    return None if orders is None else hashlib.sha256(json.dumps(orders_to_data(orders)).encode()).hexdigest()[:10]


def record(scheduler: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        found = digest(scheduler, problems()[name])
        if found:
            yield name, found


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_orders_are_those_recorded(scheduler: str) -> None:
    golden = json.loads(GOLDEN.read_text())[scheduler]
    assert len(golden) >= 10
    names = some(sorted(golden)) + some(sorted({*problems()} - {*golden}))
    assert dict(record(scheduler, names)) == {name: golden[name] for name in names if name in golden}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: dict(record(name, problems())) for name in SCHEDULERS}, indent=1) + "\n")
