"""Table of a problem for the annealer: classes of ops with their costs, codes of ops, and constants.

An op is ``class << shift | unit`` with ``class = kind * stages + stage``, kinds in the order of KINDS. Units, which are
microbatches or slices of them, are numbered here in the order of the forwards of a stage; backwards run microbatch
after microbatch, its slices from the last to the first (`turned`). A fused backward is a B with its W right behind it,
or a B alone on a stage that cannot split it. A *group* is the devices that share copy channels, usually one device.

Where stages have activation modes, each activation is held in an *option*: a mode, and ahead or inside where it
recomputes. Where units have costs of their own, they fall into *unit classes* of equal costs. In sequences an op
carries the number ``unit class * options + option`` above its class, so that the record at ``code >> shift`` has what
it costs; all else knows ops by ``code & key_mask``, which has no such number. W costs the same in every option and
carries option 0. Without modes and factors the number is 0, and codes are ops. Where the order of the microbatches is
free, the unit classes of the units are that order: microbatches of one class are alike, and keep the order of their
numbers in the problem.

Spread passes have classes of their own behind those of stages (`links`): one a device, and one for each barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.kinds import CODE, COPIES, codes, kind_of
from optpipe.ops import Floats, Ints
from optpipe.problem import Problem
from optpipe.stage import Stage
from optpipe.task_graph import TaskGraph, lower
from solver.scale import refuse_too_many_costs
from solver.search.annealing.links import Links, PassClasses, build_links
from solver.variants import Variant, variants

Records = NDArray[Any]

KINDS = "FBWCOR"
F, B, W, C, O, R = range(len(KINDS))  # noqa: E741 (the field's names for ops)
NONE = -1
"""No class, or the place of an op that is in no sequence."""

MARKS = 48
"""Largest number of marks of a sweep, the positions at which it can resume."""

NO_BUDGET = np.iinfo(np.int64).max // 4
"""The budget of a device without one: no sum of bytes reaches it, and sums with it stay whole numbers of 64 bits."""

_CLASS = np.dtype(
    [
        ("device", np.int32),
        ("group", np.int32),
        ("stream", np.int32),  # a device's compute stream has its number; channels follow, two a group
        ("acquires", np.int32),
        ("releases", np.int32),
        ("before", np.int32),  # the class whose op of the same unit must end `delay_us` before, on another stream
        ("returns", np.int32),  # for B and C: the class of their R
        ("after", np.int32),  # whose `before` or `returns` this is, O and C aside
        ("leaves", np.int32),  # for F: the class of its O, for R: of its C
        ("duration_us", np.float64),
        ("delay_us", np.float64),
        ("after_us", np.float64),  # the delay to `after`
        ("need_bytes", np.int64),  # the most that it adds while it runs or at its end
        ("change_bytes", np.int64),  # what it leaves behind
        ("block_bytes", np.int64),  # for F and B: what it takes at the start of a block
        ("factor", np.float64),  # for F and B: that of its unit, by the larger of which the time of a block grows
        ("drawn", np.int32),  # for F: the number of options among which moves choose, the first ones
        ("copies", np.int32),  # for F: 1 if its option has O and R
        ("again", np.int32),  # for F: 1 if its option has C
    ]
)


class Table(NamedTuple):
    """Constants of a problem. `classes`: one record a class, from ``n << (option_shift - shift)`` on with the costs of
    number n, which is ``unit class * options + option``.

    `first`: by group, where its part of the sequence array begins. `alone`: by group, its device if it has one only.
    `step`: ops from one mark of a sweep to the next. `choosing`: the stages that may offload, or with several options.
    `key_mask`: the lowest `option_shift` bits of a code. `free_order`: True if microbatches may change places.
    `keys`: the number of classes of number 0. `links`: what there is of spread passes and gates, None without any.
    `has_blocks`: True if a forward and a backward may be one block. `block_us`: the time of one by the stages of both,
    for units of factor 1; below 0 where they may not be one, None where there are no blocks. All functions are given
    the table by value, so it is kept small.
    """

    shift: int
    stages: int
    units: int
    slices: int
    devices: int
    streams: int
    step: int
    spans: bool
    classes: Records
    first: Ints
    alone: Ints
    budget_bytes: Ints
    choosing: Ints
    options: int
    option_shift: int
    key_mask: int
    free_order: bool
    has_blocks: bool
    block_us: Floats | None
    keys: int
    links: Links | None


def build_table(problem: Problem) -> Table:
    """Build the constants of a problem. Raises MethodError where there are more different ops than codes."""
    refuse_too_many_costs(problem)
    count, m = len(problem.stages), problem.units
    numbers = PassClasses.of(problem, len(KINDS) * count)
    keys, shift = numbers.keys, max(m - 1, 1).bit_length()
    options = [options_of_stage(problem, s) for s in range(count)]
    option_shift = shift + keys.bit_length()
    stride, most_options = 1 << keys.bit_length(), max(map(len, options))
    classes = _classes(problem, options, numbers, stride)
    links = build_links(problem, KINDS, numbers, classes["group"], stride, most_options)
    capacity = np.bincount(classes["group"][:keys], minlength=len(problem.channel_groups)) * m
    copying = [s for s, stage in enumerate(problem.stages) if any(mode.offload for mode in stage.choices)]
    recomputing = sum(any(mode.recomputes for mode in stage.choices) for stage in problem.stages)
    spread = sum(len(one.devices) for one in lower(problem).passes) + len(numbers.barriers)
    alone = [g[0] if len(g) == 1 else NONE for g in problem.channel_groups]
    block_us = np.full((count, count), -1.0)
    for stages, time_us in problem.block_us.items():
        block_us[stages] = time_us
    return Table(
        shift=shift,
        stages=count,
        units=m,
        slices=problem.slice_count,
        devices=len(problem.devices),
        streams=len(problem.devices) + 2 * len(problem.channel_groups) + len(numbers.barriers),
        step=(3 * count + 2 * len(copying) + recomputing + spread) * m // MARKS + 1,
        spans=problem.objective == "device_span",
        classes=classes,
        first=np.concatenate([[0], np.cumsum(capacity)[:-1]]).astype(np.int64),
        alone=np.array([*alone, *(NONE for _ in numbers.barriers)], np.int64),
        budget_bytes=budgets_bytes(problem),
        choosing=np.flatnonzero(classes["drawn"][:count] > 1) if problem.has_modes else np.array(copying, np.int64),
        options=most_options,
        option_shift=option_shift,
        key_mask=(1 << option_shift) - 1,
        free_order=problem.has_free_order,
        has_blocks=_has_blocks(problem),
        block_us=block_us if _has_blocks(problem) else None,
        keys=keys,
        links=links,
    )


def _has_blocks(problem: Problem) -> bool:
    return bool(problem.overlaps) and not problem.has_modes


@njit(cache=True)
def turned(slices: int, forwards: bool, place: int) -> int:
    """The unit at a place among the ops of a class, or the place of a unit there: this is its own inverse.

    Units are numbered by their place among forwards. F and O run in that order, backwards, R and C slices descending.
    """
    return place if slices == 1 or forwards else place + slices - 1 - 2 * (place % slices)


def options_of_stage(problem: Problem, s: int) -> Sequence[Variant]:
    """The options of a stage: its variants, then the modes that these leave out, since a start may have them.

    Without modes there is one, which is kept; there an activation leaves if its O is in the sequence. Where there are
    blocks there is another, of an F that joins.
    """
    stage = problem.stages[s]
    found = list(variants(stage))
    if not problem.has_modes:
        return found[:1] * (2 if _has_blocks(problem) else 1)
    others = set(range(len(stage.choices))) - {option.choice for option in found}
    return found + [Variant(choice, stage.choices[choice]) for choice in sorted(others)]


def budgets_bytes(problem: Problem) -> Ints:
    """For each device its budget, `NO_BUDGET` where there is none."""
    return np.array([NO_BUDGET if d.memory_bytes is None else d.memory_bytes for d in problem.devices], np.int64)


def _classes(problem: Problem, options: Sequence[Sequence[Variant]], pass_classes: PassClasses, stride: int) -> Records:
    """Records of all classes, those of number n from ``n * stride`` on; costs of classes that an option lacks are 0."""
    stages, count, devices = problem.stages, len(problem.stages), len(problem.devices)
    group_of = {d: g for g, members in enumerate(problem.channel_groups) for d in members}
    keys, most_options = pass_classes.keys, max(map(len, options))
    numbers = len(problem.class_units) * most_options
    classes = np.zeros((numbers - 1) * stride + keys, _CLASS)
    first = classes[:keys]
    for c, record in enumerate(first[: pass_classes.first]):
        kind, stage = KINDS[c // count], stages[c % count]
        group = group_of[stage.device]
        channel = devices + 2 * group + int(kind == "R" and problem.copy_channels.duplex)
        record["device"], record["group"] = stage.device, group
        record["stream"] = channel if kind in "OR" else stage.device
    for c in range(pass_classes.first, pass_classes.first_barrier):
        device = (c - pass_classes.first) % devices
        first["device"][c], first["group"][c], first["stream"][c] = device, group_of[device], device
    for n, c in enumerate(range(pass_classes.first_barrier, keys), len(problem.channel_groups)):
        first["group"][c], first["stream"][c] = n, devices + len(problem.channel_groups) + n
    for name in ("before", "returns", "after", "leaves"):
        first[name] = NONE
    first["before"][F * count + 1 : B * count] = np.arange(F * count, B * count - 1)
    first["after"][F * count : B * count - 1] = np.arange(F * count + 1, B * count)
    first["before"][B * count : W * count - 1] = np.arange(B * count + 1, W * count)
    first["after"][B * count + 1 : W * count] = np.arange(B * count, W * count - 1)
    for s, stage in enumerate(stages):
        out, back, again = O * count + s, R * count + s, C * count + s
        first["before"][out], first["before"][back], first["after"][out] = s, out, back
        if any(mode.offload for mode in stage.choices):
            first["leaves"][s] = out
            first["returns"][B * count + s], first["after"][back] = back, B * count + s
            if stage.modes:
                first["returns"][again], first["leaves"][back] = back, again
    graph = lower(problem)
    delays_us = {name: delays[:, problem.class_units] for name, delays in graph.delays_us.items()}
    for n in range(numbers):
        unit_class, number = divmod(n, most_options)
        records = classes[n * stride : n * stride + keys]
        records[:] = first
        forward_us, backward_us = (delays_us[name][:, unit_class] for name in ("forward", "backward"))
        records["delay_us"][F * count + 1 : B * count] = records["after_us"][F * count : B * count - 1] = forward_us
        records["delay_us"][B * count : W * count - 1] = records["after_us"][B * count + 1 : W * count] = backward_us
        for s in range(count):
            if number >= len(options[s]):
                continue
            option = options[s][number]
            kinds = [_op_kind(kind, stages[s], option, named=problem.has_modes) for kind in KINDS]
            own, there = zip(*((k * count + s, kind) for k, kind in enumerate(kinds) if kind), strict=True)
            choice = option.choice if problem.has_modes else None
            costs = records[[*own]]
            effects = _set_costs(graph, costs, graph.types_of_stage(codes(there), s, choice, unit_class))
            whole = graph.types_of_stage([CODE[kind_of("B", "W")]], s, choice, unit_class)
            costs["block_bytes"] = graph.device_bytes[whole, 0]
            costs["block_bytes"][own.index(s)] = effects[own.index(s), 0]
            costs["factor"] = [_block_factor(problem, kind, s, unit_class) for kind in there]
            records[[*own]] = costs
            record = records[s]
            record["drawn"] = len(variants(stages[s]))
            record["copies"], record["again"] = option.mode.offload is not None, option.ahead
        for n, one in enumerate(graph.passes):
            at = pass_classes.of_pass(n, np.array(one.devices))
            costs = records[at]
            unit = problem.class_units[unit_class]
            _set_costs(graph, costs, np.array([graph.type_of(one.name, d, 0, unit) for d in one.devices]))
            records[at] = costs
    return classes


def _set_costs(graph: TaskGraph, costs: Records, types: Ints) -> Ints:
    """Set durations and memory of classes to those of these types of ops. Returns what these do to memory."""
    effects = graph.device_bytes[types]
    costs["duration_us"], costs["change_bytes"] = graph.duration_us[types], graph.change_bytes[types]
    costs["need_bytes"] = graph.needed_bytes[types]
    costs["acquires"], costs["releases"] = costs["need_bytes"] > 0, effects[:, 1] < 0
    return effects


def _block_factor(problem: Problem, kind: str, stage: int, unit_class: int) -> float:
    own = problem.unit_factors(stage, problem.class_units[unit_class])
    return float(own.forward if kind == "F" else max(own.backward_input, own.backward_weight))


def _op_kind(kind: str, stage: Stage, option: Variant, named: bool) -> str | None:
    """Kind of the op that a kind of sequences is in an option; None if there is none. `named`: stages have modes."""
    if kind in COPIES and not (option.mode.offload if named else stage.offload):
        return None
    if kind == "C" and not option.ahead:
        return None
    if kind == "W" and not stage.split_backward:
        return None
    if kind != "B":
        return kind
    return kind_of("B", *([] if stage.split_backward else ["W"]), *(["C"] if option.inside else []))
