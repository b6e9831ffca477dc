"""The contract's rules on slices and on microbatches with costs of their own, from the documents' JSON alone.

Nothing is shared with the program. What a mode costs and which ops need which are as in `tests.mode_oracle`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from functools import cache
from itertools import permutations, product
from typing import Any

from tests import mode_oracle
from tests.mode_oracle import Case, Cost, Data, Key, mode_names, needs, ways

TIME_FACTORS = {"F": "forward", "B": "backward_input", "W": "backward_weight", "C": "recompute"}
TIMES = {"F": "forward_us", "B": "backward_input_us", "W": "backward_weight_us"}


def slices_of(problem: Data) -> int:
    """Slices of a microbatch."""
    count: int = (problem.get("slices") or {}).get("count", 1)
    return count


def factor(problem: Data, s: int, unit: int, name: str) -> Decimal:
    """The factor of a unit on a stage: that of its microbatch times that of its slice."""
    i, q = divmod(unit, slices_of(problem))
    own = (problem.get("microbatch_factors") or [{}] * problem["microbatches"])[i]
    of_microbatch = own.get(name)
    if of_microbatch is None:
        of_microbatch = own.get(name if name in ("bytes", "transfer") else "time", 1)
    given = problem["stages"][s].get("slice_factors")  # replaces those of the problem, as a whole
    if given is None:
        given = (problem.get("slices") or {}).get("factors", {})
    values = given.get(name)
    return Decimal(str(of_microbatch)) * Decimal(str(values[q] if values else 1))


def unit_stage(problem: Data, s: int, unit: int) -> dict[str, Any]:
    """A stage with the costs of a unit: every time and every size multiplied, sizes rounded up one by one."""

    def us(value: float, name: str) -> float:
        return float(Decimal(str(value)) * factor(problem, s, unit, name))

    def size(value: int) -> int:
        return int((value * factor(problem, s, unit, "bytes")).to_integral_value(ROUND_CEILING))

    def copy(given: Data | None) -> Data | None:
        return given and {
            "bytes": size(given["bytes"]),
            "offload_us": us(given["offload_us"], "bytes"),
            "reload_us": us(given["reload_us"], "bytes"),
        }

    stage = problem["stages"][s]
    scaled = dict(stage)
    for kind, name in TIMES.items():
        scaled[name] = us(stage[name], TIME_FACTORS[kind])
    for name in ("activation_bytes", "backward_weight_bytes"):
        scaled[name] = size(stage[name])
    scaled["workspace_bytes"] = {kind: size(value) for kind, value in stage.get("workspace_bytes", {}).items()}
    scaled["offload"] = copy(stage.get("offload"))
    scaled["modes"] = []
    for mode in stage.get("modes", []):
        one = dict(mode)
        for name in ("kept_bytes", "forward_workspace_bytes", "workspace_bytes", "segment_bytes"):
            if mode.get(name) is not None:
                one[name] = size(mode[name])
        if mode.get("recompute_us") is not None:
            one["recompute_us"] = us(mode["recompute_us"], "recompute")
        one["offload"] = copy(mode.get("offload"))
        scaled["modes"].append(one)
    return scaled


def cost(problem: Data, s: int, unit: int, name: str, kind: str) -> Cost:
    """The cost of an op of a unit in a mode, with the gradients of keys and values that backwards take and free."""
    found = mode_oracle.cost(unit_stage(problem, s, unit), name, kind)
    gradient, n = problem["stages"][s].get("slice_gradient_bytes", 0), slices_of(problem)
    if not gradient or kind not in mode_oracle.BACKWARDS:
        return found

    def size(other: int) -> int:
        return int((gradient * factor(problem, s, other, "bytes")).to_integral_value(ROUND_CEILING))

    first, q = unit - unit % n, unit % n
    if q == n - 1:
        return found._replace(start=found.start + sum(size(first + k) for k in range(n - 1)))
    return found._replace(end=found.end - size(unit))


def delay_us(problem: Data, before: Key, op: Key) -> float:
    """Transfer time between ops of two stages, by the factor of the stage that sends."""
    (_, s, unit), (_, t, _) = before, op
    stages = problem["stages"]
    if s == t or stages[s]["device"] == stages[t]["device"]:
        return 0.0
    given = problem.get("transfer_us", 0)
    boundary = given[min(s, t)] if isinstance(given, list) else given
    base = boundary["forward" if s < t else "backward"] if isinstance(boundary, dict) else boundary
    return float(Decimal(str(base)) * factor(problem, s, unit, "transfer"))


def place(problem: Data, op: Key, microbatch_order: Sequence[int]) -> int:
    """Place of an op among those of its kind on its stage."""
    n = slices_of(problem)
    i, q = divmod(op[2], n)
    return microbatch_order.index(i) * n + (q if op[0] in ("F", "O") else n - 1 - q)


def alike(op: Key) -> tuple[str, int]:
    """Ops with equal values of this keep the order of their units; all backwards but W are of one kind."""
    return mode_oracle.alike(op)


def edges(problem: Data, there: set[Key]) -> list[tuple[Key, Key, float]]:
    """Precedences by transfers, as (before, op, delay)."""
    last = len(problem["stages"]) - 1
    pairs = [(before, op) for op in there for before in needs(op, there, last) if before[1] != op[1]]
    return [(before, op, delay_us(problem, before, op)) for before, op in pairs]


def orders_of_microbatches(problem: Data) -> list[tuple[int, ...]]:
    """The orders that microbatches may run in."""
    ascending = tuple(range(problem["microbatches"]))
    return list(permutations(ascending)) if problem.get("microbatch_order") == "free" else [ascending]


def every_case(problem: Data) -> Iterator[tuple[tuple[int, ...], Case]]:
    """Every order of microbatches, choice of modes, forms and orders of a problem with one stage a device."""
    n, stages = slices_of(problem), problem["stages"]
    units = range(problem["microbatches"] * n)
    for microbatch_order in orders_of_microbatches(problem):
        each = []
        for s, stage in enumerate(stages):
            of_stage = []
            choices = [(name, way) for name in mode_names(stage) for way in ways(stage, name)]
            for chosen in product(choices, repeat=len(units)):
                flat = [(kind, s, u) for u, (_, way) in zip(units, chosen, strict=True) for kind in ("F", *way)]
                copies = [
                    tuple(
                        sorted(
                            (op for op in flat if op[0] == kind), key=lambda op: place(problem, op, microbatch_order)
                        )
                    )
                    for kind in ("O", "R")
                ]
                compute = frozenset(
                    (*op, place(problem, op, microbatch_order)) for op in flat if op[0] not in ("O", "R")
                )
                names = tuple(name for name, _ in chosen)
                of_stage += [(names, (order, *copies)) for order in _sequences(compute, len(stages) - 1)]
            each.append(of_stage)
        for case in product(*each):
            yield microbatch_order, Case(tuple(names for names, _ in case), tuple(streams for _, streams in case))


@cache
def _sequences(placed: frozenset[tuple[str, int, int, int]], last: int) -> tuple[tuple[Key, ...], ...]:
    """Every order of compute ops of one stage, each with its place, that the rules allow."""
    places = {(kind, s, unit): n for kind, s, unit, n in placed}
    everything = set(places)
    before = {
        op: set(needs(op, everything, last))
        | {other for other in places if alike(other) == alike(op) and places[other] < places[op]}
        for op in places
    }

    def grown(done: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
        if len(done) == len(places):
            yield done
        for op in sorted(everything - set(done)):
            if before[op] <= set(done):
                yield from grown((*done, op))

    return tuple(grown(()))


def costs_of(problem: Data, modes: Sequence[Sequence[str]], ops: Sequence[Key]) -> Mapping[Key, Cost]:
    """Costs of ops whose units are in these modes."""
    return {op: cost(problem, op[1], op[2], modes[op[1]][op[2]], op[0]) for op in ops}
