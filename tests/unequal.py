"""Problems whose microbatches are cut into slices or have costs of their own, and orders of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np

from optpipe.ops import Ints, Op, Orders
from optpipe.problem import Floats, Problem
from optpipe.stage import UnitFactors
from solver.build import orders_from_times
from tests import mode_oracle, unit_oracle
from tests.recomputing import list_schedule, random_problem


def unequal(devices: int, microbatches: int, budget: int | None = None, **fields: Any) -> Problem:
    """A linear pipeline of unit times, activations of 4 and W of 2 bytes; `fields` are the problem's or a stage's."""
    own = {name: fields.pop(name) for name in list(fields) if name in Problem.model_fields}
    stage = {
        "forward_us": 1,
        "backward_input_us": 1,
        "backward_weight_us": 1,
        "activation_bytes": 4,
        "backward_weight_bytes": 2,
        **fields,
    }
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "devices": [{"memory_bytes": budget}] * devices,
            "stages": [{"device": s, **stage} for s in range(devices)],
            **own,
        }
    )


def factor_rows(times: Sequence[float], sizes: Sequence[float] | None = None) -> Floats:
    """Factors of microbatches as `Places` takes them: of all times, and of bytes (default: 1)."""
    ones = [1.0] * len(times)
    rows = {"bytes": sizes or ones, "transfer": ones}
    return np.array([rows.get(name, times) for name in UnitFactors._fields], np.float64)


def times(*factors: float) -> list[dict[str, float]]:
    """Factors of the times of microbatches."""
    return [{"time": factor} for factor in factors]


def random_factor(rng: Random) -> float:
    return rng.choice([1, 1, 2, 0.5, 1.5, 0.1, 3, round(rng.uniform(0.2, 3), 2)])


def random_kinds(data: dict[str, Any], microbatch: int) -> dict[str, float]:
    """Factors of times of one kind for every other microbatch; `data` is a problem without them."""
    rng = Random(f"{data} {microbatch}")
    names = ("forward", "backward_input", "backward_weight", "recompute") if rng.random() < 0.5 else ()
    return {name: random_factor(rng) for name in names if rng.random() < 0.5}


def random_slice_factors(rng: Random, count: int) -> dict[str, list[float]]:
    names = ("forward", "backward_input", "backward_weight", "recompute", "bytes", "transfer")
    return {name: [random_factor(rng) for _ in range(count)] for name in names if rng.random() < 0.5}


def random_unequal(rng: Random) -> dict[str, Any]:
    """A problem with modes, copies and transfers, with slices, factors or both, in given or free order."""
    data = random_problem(rng)
    if rng.random() < 0.6:
        names = ("time", "bytes", "transfer")
        data["microbatch_factors"] = [
            {name: random_factor(rng) for name in names if rng.random() < 0.7} | random_kinds(data, i)
            for i in range(data["microbatches"])
        ]
        data["microbatch_order"] = rng.choice(["given", "free"])
    if rng.random() < 0.7:
        count = rng.randint(1, 3)
        data["slices"] = {"count": count, "factors": random_slice_factors(rng, count)}
        for stage in data["stages"]:
            if rng.random() < 0.5:
                stage["slice_gradient_bytes"] = rng.randint(0, 5)
            if rng.random() < 0.3:
                stage["slice_factors"] = random_slice_factors(rng, count)
    return data


def random_case(
    data: dict[str, Any], rng: Random, *, split: bool = False
) -> tuple[Ints, dict[unit_oracle.Key, unit_oracle.Cost]]:
    """A random mode and set of ops for each unit of each stage: modes as in `Orders`, and all costs.

    `split`: all backwards are B and W.
    """
    units = data["microbatches"] * unit_oracle.slices_of(data)
    numbers, costs = [], {}
    for s, stage in enumerate(data["stages"]):
        names = [rng.choice(mode_oracle.mode_names(stage)) for _ in range(units)]
        numbers.append([mode_oracle.mode_names(stage).index(name) for name in names])
        for unit, name in enumerate(names):
            ways = [way for way in mode_oracle.ways(stage, name) if "W" in way or not split]
            for kind in ("F", *rng.choice(ways)):
                costs[kind, s, unit] = unit_oracle.cost(data, s, unit, name, kind)
    return np.array(numbers), costs


def random_orders(
    problem: Problem, rng: Random, *, split: bool = False
) -> tuple[Orders, dict[unit_oracle.Key, unit_oracle.Cost], dict[Op, tuple[float, float]]]:
    """Random orders of a problem, the costs of their ops, and the times of the list schedule that they are of."""
    data = problem.to_data()
    modes, costs = random_case(data, rng, split=split)
    microbatch_order = list(range(data["microbatches"]))
    if data.get("microbatch_order") == "free":
        rng.shuffle(microbatch_order)
    there, last = set(costs), len(data["stages"]) - 1
    places = {op: unit_oracle.place(data, op, microbatch_order) for op in costs}
    before = {
        op: {*mode_oracle.needs(op, there, last)}
        | {other for other in costs if unit_oracle.alike(other) == unit_oracle.alike(op) and places[other] < places[op]}
        for op in costs
    }
    planned = list_schedule(problem, costs, before, partial(unit_oracle.delay_us, data), rng)
    free_order = microbatch_order if data.get("microbatch_order") == "free" else None
    return orders_from_times(problem, planned, modes=modes, microbatch_order=free_order), costs, planned


def random_pipeline(rng: Random) -> Problem:
    """A small pipeline, linear or a V, of whole times, with copies and workspaces but no modes, without budgets."""
    devices = rng.choice([1, 2, 2, 3])
    folded = rng.random() < 0.25
    placed = [*range(devices), *reversed(range(devices))] if folded else list(range(devices))
    microbatches, count = rng.randint(1, 4), rng.choice([1, 2] if folded else [1, 1, 2, 3])
    while microbatches * count * len(placed) > 14:
        microbatches, count = max(1, microbatches - 1), max(1, count - 1) if rng.random() < 0.5 else count

    def factor() -> float:
        return rng.choice([1, 1, 2, 0.5, 3])

    stages = []
    for device in placed:
        size = rng.randint(1, 8)
        stage: dict[str, Any] = {
            "device": device,
            "forward_us": rng.randint(0, 6),
            "backward_input_us": rng.randint(0, 6),
            "backward_weight_us": rng.choice([0, rng.randint(0, 6)]),
            "activation_bytes": size,
            "backward_weight_bytes": rng.choice([0, rng.randint(0, size), rng.randint(0, size + 3)]),
            "split_backward": rng.random() < 0.7,
        }
        if rng.random() < 0.3:
            stage["workspace_bytes"] = {kind: rng.randint(0, 3) for kind in ("F", "B", "W", "BW")}
        if rng.random() < 0.3:
            stage["offload"] = {
                "bytes": rng.randint(0, size),
                "offload_us": rng.randint(0, 5),
                "reload_us": rng.randint(0, 5),
            }
        if count > 1 and rng.random() < 0.4:
            stage["slice_gradient_bytes"] = rng.randint(0, 4)
        stages.append(stage)
    data = {
        "format": "optpipe.problem/1",
        "microbatches": microbatches,
        "objective": rng.choice(["makespan", "device_span"]),
        "transfer_us": rng.choice([0, 0, 1, {"forward": 1, "backward": 2}]),
        "devices": [{"memory_bytes": None}] * devices,
        "stages": stages,
    }
    if rng.random() < 0.7:
        names = ("time", "bytes", "transfer")
        data["microbatch_factors"] = [
            {name: factor() for name in names} | random_kinds(data, i) for i in range(microbatches)
        ]
        data["microbatch_order"] = rng.choice(["given", "given", "free"])
    if count > 1:
        names = ("forward", "backward_input", "backward_weight", "bytes", "transfer")
        factors = {name: [factor() for _ in range(count)] for name in names if rng.random() < 0.6}
        data["slices"] = {"count": count, "factors": factors}
    if rng.random() < 0.2:
        data["copy_channels"] = {"duplex": False}
    return Problem.from_data(data)
