"""Rules of the contract about modes, passes and gates, from the documents' JSON: nothing is shared with the program.

Costs are (duration in us, bytes taken at the start, signed change at the end), as the contract's table has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

Data = Mapping[str, Any]
Key = tuple[str, int, int]
"""Kind, stage and microbatch."""

BACKWARDS = ("B", "BW", "CB", "CBW")


class Cost(NamedTuple):
    """Costs of an op: us, and bytes on its device at its start and at its end."""

    us: float
    start: int
    end: int


def mode_names(stage: Data) -> list[str]:
    """Every mode of a stage, in the order of the solver's numbers."""
    return ["kept", *(["offload"] if stage.get("offload") else []), *(mode["name"] for mode in stage.get("modes", []))]


def entry(stage: Data, name: str) -> Data:
    """The entry of a mode."""
    if name == "kept":
        return {}
    if name == "offload":
        return {"offload": stage["offload"]}
    return next(mode for mode in stage["modes"] if mode["name"] == name)


def ways(stage: Data, name: str) -> list[tuple[str, ...]]:
    """The sets of ops beside F that a microbatch in a mode may have."""
    mode = entry(stage, name)
    copies = ("O", "R") if mode.get("offload") else ()
    again = mode.get("kept_bytes", stage["activation_bytes"]) < stage["activation_bytes"]
    backwards: list[tuple[str, ...]] = [("BW",)]
    if stage.get("split_backward", True):
        backwards.append(("B", "W"))
    if not again:
        return [copies + backward for backward in backwards]
    ahead = [("C", *backward) for backward in backwards]
    inside = [tuple({"B": "CB", "BW": "CBW"}.get(kind, kind) for kind in backward) for backward in backwards]
    return [copies + way for way in (*ahead, *(inside if mode.get("segment_bytes") is not None else ()))]


def cost(stage: Data, name: str, kind: str) -> Cost:
    """The cost of an op of a microbatch in a mode."""
    mode = entry(stage, name)
    a, b = stage["activation_bytes"], stage["backward_weight_bytes"]
    k = mode.get("kept_bytes", a)
    work = stage.get("workspace_bytes", {})
    copy = mode.get("offload") or {}
    both = stage["backward_input_us"] + stage["backward_weight_us"]
    if kind == "O":
        return Cost(copy["offload_us"], 0, -copy["bytes"])
    if kind == "R":
        return Cost(copy["reload_us"], copy["bytes"], 0)
    if kind == "C":
        extra = mode.get("workspace_bytes", 0)
        return Cost(mode["recompute_us"], a - k + extra, -extra)
    if kind == "F":
        extra = work.get("F", 0) + mode.get("forward_workspace_bytes", a - k)
        return Cost(stage["forward_us"], k + extra, -extra)
    if kind == "W":
        return Cost(stage["backward_weight_us"], work.get("W", 0), -b - work.get("W", 0))
    if kind in ("B", "BW"):
        extra = work.get(kind, 0)
        return Cost(both if kind == "BW" else stage["backward_input_us"], extra, (b if kind == "B" else 0) - a - extra)
    plain = kind.removeprefix("C")
    extra = work.get(plain, 0) + mode["segment_bytes"]
    us = mode["recompute_us"] + (both if plain == "BW" else stage["backward_input_us"])
    return Cost(us, extra, (b if plain == "B" else 0) - k - extra)


def needs(op: Key, there: set[Key], last: int) -> list[Key]:
    """The ops that must end before `op` starts, by the rules of the model; `lags` has those of passes and gates."""
    kind, s, i = op
    same: tuple[str, ...] = {
        "F": (),
        "C": ("F", "R"),
        "O": ("F",),
        "R": ("O",),
        "W": ("B", "CB"),
        **dict.fromkeys(BACKWARDS, ("F", "R", "C")),
    }.get(kind, ())
    before = [(other, s, i) for other in same]
    before += [("F", s - 1, i)] if kind == "F" else []
    before += [(other, s + 1, i) for other in BACKWARDS] if kind in BACKWARDS and s < last else []
    return [other for other in before if other in there]


def pass_costs(problem: Data) -> dict[Key, Cost]:
    """Costs of every op of a spread pass: its name, its device, its microbatch."""
    passes: list[Data] = problem.get("spread") or []
    kept = {one["name"]: one.get("kept_bytes") or [0] * len(one["us"]) for one in passes}
    costs = {}
    for one in passes:
        for d, us in enumerate(one["us"]):
            work = (one.get("workspace_bytes") or [0] * len(one["us"]))[d]
            freed = kept[one["frees"]][d] if one.get("frees") else 0
            for i in range(problem["microbatches"] if us else 0):
                costs[one["name"], d, i] = Cost(us, kept[one["name"]][d] + work, -work - freed)
    return costs


def lags(problem: Data, there: set[Key]) -> Iterator[tuple[Key, Key, float]]:
    """Precedences of passes and gates: an op, another that starts after its end, and the time between them."""
    doing = {"F": ("F",), "B": BACKWARDS, "W": ("W", "BW", "CBW")}
    devices = [stage["device"] for stage in problem["stages"]]
    waiting = [((one["name"],), d, d, one) for one in problem.get("spread") or [] for d in range(len(one["us"]))]
    for gate in problem.get("gates") or []:
        op, s = gate["op"], gate["stage"]
        waiting.append((doing.get(op, (op,)), s, devices[s], gate))
    for kinds, place, device, one in waiting:
        for kind, i, after in product(kinds, range(problem["microbatches"]), one.get("after") or []):
            if "pass" in after:
                befores = [(after["pass"], d, i) for d in range(len(problem["devices"]))]
            else:
                befores = [(other, after["stage"], i) for other in doing[after["op"]]]
            own = "pass" not in after and devices[after["stage"]] == device
            for before in befores:
                if before in there and (kind, place, i) in there:
                    yield before, (kind, place, i), 0 if own else after.get("us", 0)


def alike(op: Key) -> tuple[str, int]:
    """Ops with equal values of this keep the order of their microbatches."""
    return "backward" if op[0] in BACKWARDS else op[0], op[1]


def earliest(
    costs: Mapping[Key, Cost], streams: Sequence[Sequence[Key]], more: Sequence[tuple[Key, Key, float]] = ()
) -> dict[Key, float] | None:
    """Earliest starts of these streams without transfers, `more` being further (before, op, delay); None: deadlock."""
    there = set(costs)
    last = max(s for _, s, _ in there)
    edges = [(before, op, 0.0) for op in there for before in needs(op, there, last)]
    edges += [(before, op, 0.0) for stream in streams for before, op in pairwise(stream)]
    edges += more
    into: dict[Key, list[tuple[Key, float]]] = {op: [] for op in there}
    for before, op, delay in edges:
        into[op].append((before, delay))
    start: dict[Key, float] = {}
    left = set(there)
    while left:
        ready = [op for op in left if all(before in start for before, _ in into[op])]
        if not ready:
            return None
        for op in ready:
            start[op] = max((start[before] + costs[before].us + delay for before, delay in into[op]), default=0.0)
        left -= set(ready)
    return start


def peak(costs: Mapping[Key, Cost], start: Mapping[Key, float], device_ops: Sequence[Key]) -> int:
    """The peak of the memory of these ops, where all changes at one instant count together."""
    changes: dict[float, int] = {}
    for op in device_ops:
        changes[start[op]] = changes.get(start[op], 0) + costs[op].start
        end = start[op] + costs[op].us
        changes[end] = changes.get(end, 0) + costs[op].end
    level, most = 0, 0
    for instant in sorted(changes):
        level += changes[instant]
        most = max(most, level)
    return most


def worst_peak(costs: Mapping[Key, Cost], streams: Sequence[Sequence[Key]], waits: Mapping[Key, Sequence[Key]]) -> int:
    """The most memory of one device over every timing: each state that its three streams can be in is visited."""
    there = {op for stream in streams for op in stream}
    last = max(s for _, s, _ in there)
    place = {op: (x, n) for x, stream in enumerate(streams) for n, op in enumerate(stream)}
    before = {op: [place[need] for need in (*needs(op, there, last), *waits.get(op, ()))] for op in there}

    @cache
    def most(state: tuple[int, ...], level: int) -> int:
        """The most from a state on; `state[x]` counts the events (starts and ends) of stream x that have happened."""
        best = level
        for x, done in enumerate(state):
            if done == 2 * len(streams[x]):
                continue
            op = streams[x][done // 2]
            if done % 2 == 0 and any(state[y] < 2 * n + 2 for y, n in before[op]):
                continue
            change = costs[op].end if done % 2 else costs[op].start
            best = max(best, most((*state[:x], done + 1, *state[x + 1 :]), level + change))
        return best

    return most((0,) * len(streams), 0)


class Case(NamedTuple):
    """One choice of modes, ops and orders: the streams (compute, offload, reload) of each device."""

    modes: tuple[tuple[str, ...], ...]
    streams: tuple[tuple[tuple[Key, ...], ...], ...]


def every_case(problem: Data) -> Iterator[Case]:
    """Every choice of modes, forms and orders of a problem with one stage a device.

    Along a stage F, C, O, R and backwards are in the order of the microbatches; what cannot run is left out only where
    a stage alone tells.
    """
    microbatches = range(problem["microbatches"])
    each: list[list[tuple[tuple[str, ...], tuple[tuple[Key, ...], ...]]]] = []
    for s, stage in enumerate(problem["stages"]):
        of_stage = []
        choices = [(name, way) for name in mode_names(stage) for way in ways(stage, name)]
        for chosen in product(choices, repeat=len(microbatches)):
            ops = [[("F", s, i), *((kind, s, i) for kind in way)] for i, (_, way) in enumerate(chosen)]
            flat = [op for some in ops for op in some]
            offloads = tuple(op for op in flat if op[0] == "O")
            reloads = tuple(op for op in flat if op[0] == "R")
            compute = frozenset(op for op in flat if op[0] not in ("O", "R"))
            names = tuple(name for name, _ in chosen)
            of_stage += [
                (names, (order, offloads, reloads)) for order in _sequences(compute, len(problem["stages"]) - 1)
            ]
        each.append(of_stage)
    for stages in product(*each):
        yield Case(tuple(names for names, _ in stages), tuple(streams for _, streams in stages))


@cache
def _sequences(ops: frozenset[Key], last: int) -> tuple[tuple[Key, ...], ...]:
    """Every order of compute ops of one stage that the rules allow."""
    everything = set(ops)
    before = {
        op: set(needs(op, everything, last))
        | {other for other in ops if alike(other) == alike(op) and other[2] < op[2]}
        for op in ops
    }

    def grown(done: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
        if len(done) == len(ops):
            yield done
        for op in sorted(everything - set(done)):
            if before[op] <= set(done):
                yield from grown((*done, op))

    return tuple(grown(()))


def least_makespan(problem: Data) -> float | None:
    """The least makespan of all schedules of whole times, copies among them; None where none keeps the budgets.

    Tick by tick: every compute stream and copy channel begins an op that may run, or nothing. Times are whole and not
    0, stages without transfers between them, one a device, barriers too, and nothing holds more at its end than before.
    """
    stages, microbatches = problem["stages"], range(problem["microbatches"])
    choices = [[(name, way) for name in mode_names(stage) for way in ways(stage, name)] for stage in stages]
    best: float | None = None
    for chosen in product(*(of_stage for of_stage in choices for _ in microbatches)):
        costs = {}
        for (s, i), (name, way) in zip(product(range(len(stages)), microbatches), chosen, strict=True):
            costs |= {(kind, s, i): cost(stages[s], name, kind) for kind in ("F", *way)}
        costs |= pass_costs(problem)
        ticks = _least_ticks(problem, costs, best)
        best = ticks if ticks is not None else best
    return best


def _least_ticks(problem: Data, costs: Mapping[Key, Cost], below: float | None) -> int | None:
    """The least ticks in which ops of these costs can end, if that is below a limit."""
    ops, last = sorted(costs), len(problem["stages"]) - 1
    place = {op: n for n, op in enumerate(ops)}
    before = [
        [place[other] for other in needs(op, set(ops), last)]
        + [n for n, other in enumerate(ops) if alike(other) == alike(op) and other[2] < op[2]]
        for op in ops
    ]
    for other, op, _ in lags(problem, set(ops)):
        before[place[op]].append(place[other])
    duplex = problem.get("copy_channels", {}).get("duplex", True)
    resources: dict[tuple[int, str], list[int]] = {}
    for n, (kind, s, _) in enumerate(ops):
        resources.setdefault((s, (kind if duplex else "copy") if kind in "OR" else "compute"), []).append(n)

    def started(left: tuple[int | None, ...]) -> Iterator[tuple[int | None, ...]]:
        """All that may be running once ops have been started; None: not begun, else ticks left."""
        states = [left]
        for members in resources.values():
            if any(left[n] for n in members):
                continue
            ready = [n for n in members if left[n] is None and all(left[other] == 0 for other in before[n])]
            states += [(*state[:n], int(costs[ops[n]].us), *state[n + 1 :]) for state in states for n in ready]
        return (state for state in states if _fits(problem, costs, ops, state))

    layer, ticks = {(None,) * len(ops)}, 0
    while layer and (below is None or ticks < below):
        if any(not any(state) and None not in state for state in layer):
            return ticks
        after = {tuple(n and n - 1 for n in state) for left in layer for state in started(left)}
        if after == layer:  # what is left can never begin: the budgets forbid it
            return None
        layer, ticks = after, ticks + 1
    return None


def _fits(problem: Data, costs: Mapping[Key, Cost], ops: Sequence[Key], state: Sequence[int | None]) -> bool:
    """True if what has begun and ended holds no more than each budget."""
    level = [0] * len(problem["devices"])
    for op, left in zip(ops, state, strict=True):
        if left is not None:
            level[op[1]] += costs[op].start + (costs[op].end if left == 0 else 0)
    return all(
        device["memory_bytes"] is None or size <= device["memory_bytes"]
        for size, device in zip(level, problem["devices"], strict=True)
    )
