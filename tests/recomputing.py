"""Problems whose stages have activation modes, and orders that use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np

from optpipe.ops import DeviceOrders, Ints, Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.build import build_schedule, orders_from_times
from solver.frozen import orders_without_backwards
from solver.serial import known_budgets_bytes
from tests import mode_oracle as oracle

FULL = {"name": "full", "kept_bytes": 1, "recompute_us": 1, "forward_workspace_bytes": 0, "segment_bytes": 9}
"""All but the input is recomputed: layer by layer in the forward, whole in the backward."""

COPY = {"bytes": 4, "offload_us": 3, "reload_us": 2}
LEAVES = {"name": "half", "kept_bytes": 6, "recompute_us": 2, "workspace_bytes": 2, "segment_bytes": 3, "offload": COPY}
"""Part is recomputed, part of the rest leaves to the host."""


def recomputing(
    devices: int, microbatches: int, modes: Sequence[dict[str, Any]] = (FULL,), budget: int | None = None, **stage: Any
) -> Problem:
    """A linear pipeline of unit times in which each stage has these modes; `stage` replaces fields of the stages."""
    fields = {
        "forward_us": 1,
        "backward_input_us": 1,
        "backward_weight_us": 1,
        "activation_bytes": 10,
        "backward_weight_bytes": 0,
        "modes": list(modes),
    }
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "devices": [{"memory_bytes": budget}] * devices,
            "stages": [{"device": s, **fields, **stage} for s in range(devices)],
        }
    )


def one_f_one_b(problem: Problem, backward: Callable[[int, int], str]) -> Orders:
    """1F1B whose backward of stage s and microbatch i is written as `backward(s, i)`: kinds such as "C BW".

    Each stage that recomputes is in its first mode that does.
    """
    stages, microbatches = problem.stages, problem.microbatches
    modes = np.zeros((len(stages), microbatches), np.int64)
    devices = []
    for s, stage in enumerate(stages):
        ahead = min(len(stages) - s, microbatches)
        order = [Op("F", s, i) for i in range(ahead)]
        for i in range(microbatches):
            kinds = backward(s, i).split()
            if any(kind.startswith("C") for kind in kinds):
                modes[s, i] = next(n for n, mode in enumerate(stage.choices) if mode.recomputes)
            order += [Op(kind, s, i) for kind in kinds]
            order += [Op("F", s, i + ahead)] if i + ahead < microbatches else []
        devices.append(DeviceOrders(order))
    return Orders(devices, modes=modes)


def ops(text: str) -> list[Op]:
    """Ops by name."""
    return [Op.parse(name) for name in text.split()]


def random_stage(rng: Random, device: int) -> dict[str, Any]:
    """A stage with up to three modes of every form, of positive durations."""

    def copy(most: int) -> dict[str, Any]:
        return {"bytes": rng.randint(0, most), "offload_us": rng.randint(1, 5), "reload_us": rng.randint(1, 5)}

    activation = rng.randint(1, 9)
    modes = []
    for n in range(rng.randint(0, 3)):
        kept = rng.randint(0, activation)
        mode: dict[str, Any] = {"name": f"mode {n}", "kept_bytes": kept}
        if kept < activation:
            mode["recompute_us"] = rng.randint(1, 4)
            optional = {"forward_workspace_bytes": 9, "workspace_bytes": 3, "segment_bytes": 9}
            mode |= {name: rng.randint(0, most) for name, most in optional.items() if rng.random() < 0.6}
        if rng.random() < 0.4:
            mode["offload"] = copy(kept)
        modes.append(mode)
    return {
        "device": device,
        **{name: rng.randint(1, 4) for name in ("forward_us", "backward_input_us", "backward_weight_us")},
        "activation_bytes": activation,
        "backward_weight_bytes": rng.randint(0, activation),
        "workspace_bytes": {kind: rng.randint(0, 2) for kind in ("F", "B", "W", "BW")} if rng.random() < 0.5 else {},
        "offload": copy(activation) if rng.random() < 0.5 else None,
        "modes": modes,
        "split_backward": rng.random() < 0.8,
    }


def random_problem(rng: Random) -> dict[str, Any]:
    """A problem with modes on up to two devices, with every kind of copy channel."""
    devices = rng.randint(1, 2)
    return {
        "format": "optpipe.problem/1",
        "microbatches": rng.randint(1, 3),
        "transfer_us": rng.randint(0, 2),
        "devices": [{"memory_bytes": None}] * devices,
        "stages": [random_stage(rng, rng.randrange(devices)) for _ in range(rng.randint(1, 3))],
        "copy_channels": {"duplex": rng.random() < 0.5, "shared_by": rng.choice([[], [list(range(devices))]])},
    }


def random_pipeline(rng: Random) -> Problem:
    """A line or a V of up to three devices with little memory, all stages alike or each by itself.

    Budgets are those of one microbatch at a time and some part of what all of them kept would take.
    """
    devices = rng.randint(1, 3)
    v_shape = rng.random() < 0.3
    homes = [*range(devices), *(reversed(range(devices)) if v_shape else ())]
    copies, alike = rng.random() < 0.5, rng.random() < 0.5
    stages = [random_stage(rng, home) for home in homes]
    for stage in stages:
        if not any(mode["kept_bytes"] < stage["activation_bytes"] for mode in stage["modes"]):
            kept = rng.randrange(stage["activation_bytes"])
            full = {"name": "full", "kept_bytes": kept, "recompute_us": rng.randint(1, 4)}
            full |= {name: rng.randint(0, 9) for name in ("forward_workspace_bytes", "segment_bytes")}
            stage["modes"] = [full]
        if not copies:
            stage["offload"] = None
            for mode in stage["modes"]:
                mode["offload"] = None
    if alike:
        stages = [{**stages[0], "device": home} for home in homes]
    data = {
        "format": "optpipe.problem/1",
        "microbatches": rng.randint(2, 4 if v_shape else 7),
        "transfer_us": rng.randint(0, 2),
        "objective": rng.choice(["makespan", "device_span"]),
        "devices": [{"memory_bytes": None}] * devices,
        "stages": stages,
        "copy_channels": {"duplex": rng.random() < 0.6},
    }
    budgets = []
    for home, least in enumerate(known_budgets_bytes(Problem.from_data(data))):
        kept = sum(stage["activation_bytes"] for stage in stages if stage["device"] == home) * data["microbatches"]
        budgets.append({"memory_bytes": least + int(max(0, kept - least) * rng.choice([0, 0.1, 0.2, 0.3, 0.5]))})
    return Problem.from_data(data | {"devices": budgets})


def random_case(data: dict[str, Any], rng: Random) -> tuple[Ints, dict[oracle.Key, oracle.Cost]]:
    """A random mode and set of ops for each microbatch of each stage: modes as in `Orders`, and all costs."""
    modes, costs = [], {}
    for s, stage in enumerate(data["stages"]):
        modes.append([rng.choice(oracle.mode_names(stage)) for _ in range(data["microbatches"])])
        for i, name in enumerate(modes[s]):
            for kind in ("F", *rng.choice(oracle.ways(stage, name))):
                costs[kind, s, i] = oracle.cost(stage, name, kind)
    numbers = [
        [oracle.mode_names(stage).index(name) for name in names]
        for stage, names in zip(data["stages"], modes, strict=True)
    ]
    return np.array(numbers), costs


def random_plan(problem: Problem, costs: dict[oracle.Key, oracle.Cost], rng: Random) -> dict[Op, tuple[float, float]]:
    """Times of the random list schedule of these ops, microbatches in their order."""
    last = len(problem.stages) - 1
    before = {op: set(oracle.needs(op, set(costs), last)) for op in costs}
    for op in costs:
        before[op] |= {other for other in costs if oracle.alike(other) == oracle.alike(op) and other[2] < op[2]}
    return list_schedule(problem, costs, before, partial(delay_us, problem), rng)


def list_schedule(
    problem: Problem,
    costs: Mapping[oracle.Key, oracle.Cost],
    before: Mapping[oracle.Key, Collection[oracle.Key]],
    delay_us: Callable[[oracle.Key, oracle.Key], float],
    rng: Random,
) -> dict[Op, tuple[float, float]]:
    """Times of a list schedule that always runs some op that can run: one all of whose ops `before` it have run."""
    free: dict[Any, float] = {}
    planned: dict[Op, tuple[float, float]] = {}
    left = sorted(costs)
    while left:
        op = rng.choice([op for op in left if all(other in planned for other in before[op])])
        left.remove(op)
        device = problem.stages[op[1]].device
        group = next(tuple(group) for group in problem.channel_groups if device in group)
        resource: Any = (group, op[0] if problem.copy_channels.duplex else "") if op[0] in ("O", "R") else device
        ready = [planned[Op(*other)][1] + delay_us(other, op) for other in before[op]]
        start = max([free.get(resource, 0.0), *ready])
        free[resource] = start + costs[op].us
        planned[Op(*op)] = (start, free[resource])
    return planned


OFFLOAD = {"bytes": 10, "offload_us": 2, "reload_us": 2}
FULL_AND_OFFLOAD = FULL | {"name": "full+offload", "offload": {"bytes": 1, "offload_us": 1, "reload_us": 1}}
SELECTIVE = {"name": "selective", "kept_bytes": 4, "recompute_us": 1, "segment_bytes": 3}
SELECTIVE_AND_OFFLOAD = SELECTIVE | {"name": "selective+offload", "offload": COPY}
EXECUTABLE = (FULL, FULL_AND_OFFLOAD, SELECTIVE, SELECTIVE_AND_OFFLOAD)
"""Modes that the runtime has for any stage."""


def random_executable(
    placement: Sequence[int],
    microbatches: int,
    seed: int,
    modes: Sequence[dict[str, Any]] = (FULL, FULL_AND_OFFLOAD),
    **stage: Any,
) -> Schedule:
    """A random schedule of stages on these devices; any microbatch may be kept, offloaded, recomputed, or both.

    `stage` replaces fields of the stages.
    """
    linear = recomputing(len(placement), microbatches, modes, offload=OFFLOAD, **stage).to_data()
    stages = [stage | {"device": device} for stage, device in zip(linear["stages"], placement, strict=True)]
    problem = Problem.from_data(linear | {"stages": stages, "devices": linear["devices"][: max(placement) + 1]})
    return random_in_modes(problem, seed)


def random_in_modes(problem: Problem, seed: int) -> Schedule:
    """A random schedule of a problem, with a random mode for each microbatch on each stage."""
    rng = Random(seed)
    modes, costs = random_case(problem.to_data(), rng)
    orders = orders_from_times(problem, random_plan(problem, costs, rng), modes=modes)
    return build_schedule(problem, orders, 0.0, "random", 0.0)


def with_frozen(schedule: Schedule, count: int) -> Schedule:
    """The schedule without the backwards of the first stages, which are kept."""
    problem, orders = schedule.problem, schedule.orders
    stages = [stage.replaced(backward="none") if s < count else stage for s, stage in enumerate(problem.stages)]
    frozen = problem.replaced(stages=stages)
    if orders.modes is not None:
        modes = orders.modes.copy()
        modes[:count] = 0
        orders = replace(orders, modes=modes)
    return build_schedule(frozen, orders_without_backwards(frozen, orders), 0.0, "by hand", 0.0)


def delay_us(problem: Problem, before: oracle.Key, op: oracle.Key) -> float:
    if before[1] == op[1]:
        return 0.0
    return problem.forward_delay_us[before[1]] if before[1] < op[1] else problem.backward_delay_us[op[1]]


def random_recomputing(rng: Random, **stage: Any) -> tuple[Problem, Orders]:
    """A random problem with modes, and random orders of it, with the waits that bound their memory.

    `stage` replaces fields of the stages.
    """
    data = random_problem(rng)
    data["stages"] = [entry | stage for entry in data["stages"]]
    problem = Problem.from_data(data)
    modes, costs = random_case(data, rng)
    return problem, orders_from_times(problem, random_plan(problem, costs, rng), modes=modes)


WHOLE = {"name": "whole", "kept_bytes": 1, "recompute_us": 1}
"""Recomputed ahead only."""


@cache
def every_mode() -> Schedule:
    """Two stages of three microbatches in all modes and forms, with room left between the ops."""
    problem = recomputing(2, 3, [FULL, LEAVES, WHOLE])
    orders = Orders(
        [
            DeviceOrders(ops("F0.0 F0.1 F0.2 C0.0 B0.0 W0.0 C0.1 BW0.1 CB0.2 W0.2"), ops("O0.1"), ops("R0.1")),
            DeviceOrders(ops("F1.0 CBW1.0 F1.1 BW1.1 F1.2 C1.2 BW1.2")),
        ],
        modes=np.array([[1, 2, 1], [1, 0, 3]]),  # 0: kept, 1: full, 2: half, 3: whole
    )
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)
