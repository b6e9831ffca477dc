"""Scale of a problem: op count, planning horizon, time unit, and the size limits of the MILP and of annealing."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, gcd, isnan, lcm

import numpy as np

from optpipe.errors import MethodError, ModelTooLargeError
from optpipe.problem import Problem
from optpipe.stage import Mode, Offload, Stage, scaled_us
from optpipe.task_graph import lower
from solver.variants import variants


def horizon_us(problem: Problem, value_us: float) -> float:
    """A time by which some schedule at least as good as `value_us` has ended, if it begins at 0.

    The makespan itself; for spans twice the value: on the device of the first stage all F and B end within its span,
    every other device begins within that time and has its own span. For an infinite value: everything one after
    another.
    """
    if value_us < float("inf"):
        return value_us if problem.objective == "makespan" else 2 * value_us
    lags_us = sum(float(lag.us.sum()) for lag in lower(problem).lags)
    if problem.has_factors:
        counts = np.bincount(problem.unit_class).tolist()
        extra_us: float = sum(
            count * max(map(_extra_us, stage.choices))
            for of_classes in problem.unit_stages
            for count, stage in zip(counts, of_classes, strict=True)
        )
        delays_us = sum(float(us.sum()) for us in problem.unit_delays_us.values())
        return sum(problem.work_us) + extra_us + delays_us + lags_us
    extra_us = sum(max(map(_extra_us, stage.choices)) for stage in problem.stages)
    delays = sum(problem.forward_delay_us) + sum(problem.backward_delay_us)
    return sum(problem.work_us) + problem.units * (extra_us + delays) + lags_us


def _extra_us(mode: Mode) -> float:
    """Time of the copies and of the recomputation of a microbatch in a mode."""
    copies = mode.offload.offload_us + mode.offload.reload_us if mode.offload else 0
    return copies + mode.recompute_us


def without_endless_copies(problem: Problem, horizon_us: float) -> Problem:
    """The problem with no copy that takes much longer than `horizon_us`: no schedule that ends by then has one.

    In ticks such copies may exceed the integers of solvers.
    """
    stages = range(len(problem.stages))
    factors = [float(problem.unit_factors(s, unit).bytes) for s in stages for unit in problem.class_units]
    least = min((factor for factor in factors if factor), default=1.0)
    most_us = ceil((int(horizon_us) + 1) / min(least, 1.0))

    def ended(copy: Offload | None) -> Offload | None:
        if copy is None or max(copy.offload_us, copy.reload_us) <= most_us:
            return copy
        return copy.replaced(offload_us=min(copy.offload_us, most_us), reload_us=min(copy.reload_us, most_us))

    copies = [copy for stage in problem.stages for copy in (stage.offload, *(mode.offload for mode in stage.modes))]
    if all(ended(copy) is copy for copy in copies):
        return problem
    return problem.replaced(
        stages=[
            stage.replaced(
                offload=ended(stage.offload), modes=[mode.replaced(offload=ended(mode.offload)) for mode in stage.modes]
            )
            for stage in problem.stages
        ]
    )


def count_ops(problem: Problem) -> int:
    """F, B and W of all stages and microbatches, O and R where a stage may offload, and C where it may recompute.

    Besides, those of spread passes.
    """
    stages = [stage.choices for stage in problem.stages]
    offloading = sum(any(mode.offload for mode in choices) for choices in stages)
    recomputing = sum(any(mode.recomputes for mode in choices) for choices in stages)
    spread = sum(us > 0 for one in problem.spread or () for us in one.us)
    return problem.units * (3 * len(stages) + 2 * offloading + recomputing + spread)


def count_entries(problem: Problem) -> int:
    """Entries that cost time and memory without being ops: devices, groups of copy channels, and modes."""
    return len(problem.devices) + len(problem.copy_channels.shared_by) + count_modes(problem)


def count_modes(problem: Problem) -> int:
    """Modes of all stages, once for each class of units, which have costs of their own."""
    modes = sum(len(stage.modes) for stage in problem.stages)
    return modes * len(problem.class_units) if modes else 0


MAX_STEPS = 2**45
"""Most steps of a time grid: floats represent them exactly, and sums in solvers stay far from 64 bits."""


def value_step_us(problem: Problem) -> float:
    """The least by which two values of a problem can differ.

    Makespans are multiples of the unit. The least span of given orders is a mean over at most as many terms as devices
    (`optpipe.simulate`): a multiple of the unit's j-th part, and two of them differ by a j k-th part at least.
    """
    devices = sum(1 for stages in problem.stages_of if stages)
    return float(time_unit_us(problem) / (devices**2 if problem.objective == "device_span" else 1))


def time_unit_us(problem: Problem) -> Fraction:
    """The largest time of which all durations and delays of a problem are multiples (1 where none has a length)."""
    times = {time for of_classes in problem.unit_stages for stage in of_classes for time in stage_times_us(stage)}
    times |= {*problem.block_us.values(), *spread_times_us(problem)}
    if problem.has_factors:
        stages = range(len(problem.stages)) if problem.overlaps else ()
        factors = {one for s in stages for unit in problem.class_units for one in problem.unit_factors(s, unit)[:3]}
        times |= {scaled_us(time, factor) for time in problem.block_us.values() for factor in factors}
        times |= {time for delays_us in problem.unit_delays_us.values() for time in delays_us.ravel().tolist()}
    else:
        times |= {*problem.forward_delay_us, *problem.backward_delay_us}
    lengths = [Fraction(str(time)) for time in times if time]
    if not lengths:
        return Fraction(1)
    return Fraction(gcd(*(length.numerator for length in lengths)), lcm(*(length.denominator for length in lengths)))


def spread_times_us(problem: Problem) -> set[float]:
    """Durations of spread passes for all units, and the times of all their waits and those of gates."""
    graph = lower(problem)
    durations = {time for one in graph.passes for time in one.duration_us.ravel().tolist() if not isnan(time)}
    return durations.union(*(lag.us.tolist() for lag in graph.lags))


def stage_times_us(stage: Stage) -> list[float]:
    """Durations of F, B and W, of O and R where the stage may offload, and of the C, O and R of its modes."""
    moves = [time for mode in stage.choices if (copy := mode.offload) for time in (copy.offload_us, copy.reload_us)]
    again = [mode.recompute_us for mode in stage.choices if mode.recomputes]
    return [stage.forward_us, stage.backward_input_us, stage.backward_weight_us, *moves, *again]


MOST_MILP_OPS = 3000
"""The largest model that is built: tables of all pairs of ops take 168 bytes a pair, 1.5 GB at this size."""


def count_milp_ops(problem: Problem) -> int:
    """Ops of the mixed-integer program: those of `count_ops`, but O, R and C for each variant of a stage with modes."""
    own = sum(
        2 * (option.mode.offload is not None) + option.ahead
        for stage in problem.stages
        if stage.modes
        for option in variants(stage)
    )
    offloading = sum(stage.offload is not None for stage in problem.stages if not stage.modes)
    return problem.units * (3 * len(problem.stages) + 2 * offloading + own)


def has_options(problem: Problem, device: int) -> bool:
    """True if activations of a device with a budget may leave it, or be recomputed."""
    stages = [problem.stages[s] for s in problem.stages_of[device]]
    limited = problem.devices[device].memory_bytes is not None
    return limited and any(stage.modes or (stage.offload and stage.offload.bytes) for stage in stages)


def refuse_beyond_milp(problem: Problem) -> None:
    """Raise MethodError where the mixed-integer program lacks fused backwards, ModelTooLargeError beyond its limit."""
    for s, stage in enumerate(problem.stages):
        if not stage.split_backward and has_options(problem, stage.device):
            raise MethodError(
                f"milp splits backwards where activations may leave or be recomputed, but "
                f"stages[{s}].split_backward is false. Maybe use cp-sat."
            )
    ops = count_milp_ops(problem)
    if ops > MOST_MILP_OPS:
        raise ModelTooLargeError(
            f"milp would build a model of {ops:,} ops, and its limit is {MOST_MILP_OPS:,}: it decides on every pair of "
            "them. Maybe use auto or cp-sat, or fewer microbatches."
        )


CODE_BITS = 31
"""Bits with which annealing numbers an op: its unit, its kind and stage, and which costs it has."""


def costs_have_codes(problem: Problem) -> bool:
    """True if annealing has a number for every op with every cost: a matter of many units that all differ."""
    return _code_bits(problem) <= CODE_BITS


def refuse_too_many_costs(problem: Problem) -> None:
    """Raise MethodError where annealing has no number for every op with every cost."""
    if not costs_have_codes(problem):
        raise MethodError(
            f"search numbers ops with {CODE_BITS} bits, but {len(problem.class_units)} different units on "
            f"{len(problem.stages)} stages need {_code_bits(problem)}. Maybe round microbatch_factors, so that more "
            "microbatches are alike, or use one of the published methods."
        )


def _code_bits(problem: Problem) -> int:
    """Bits for the unit, for one of six kinds and the stage, and for the unit's costs in each of the stage's options.

    Spread passes have kinds of their own on each device, and one more for their barriers.
    """
    options = 2 if problem.overlaps else 1
    if problem.has_modes:
        options = max(
            sum(2 if mode.recomputes and mode.segment_bytes is not None else 1 for mode in stage.choices)
            for stage in problem.stages
        )
    costs = options * len(problem.class_units)
    classes = 6 * len(problem.stages) + len(problem.pass_names) * (1 + len(problem.devices))
    return max(problem.units - 1, 1).bit_length() + classes.bit_length() + (costs - 1).bit_length()


def handles_states(problem: Problem) -> bool:
    """True for equal microbatches without modes that every stage trains, and times that are whole ticks."""
    if not problem.has_equal_microbatches or problem.has_modes or not lower(problem).trained.all():
        return False
    return horizon_us(problem, float("inf")) / time_unit_us(problem) < MAX_STEPS
