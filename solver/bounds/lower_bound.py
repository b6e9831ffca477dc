"""The best lower bound that needs no search (docs/math/bounds.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import numpy as np

from optpipe.kinds import CODE, COPIES
from optpipe.problem import Floats, Problem
from optpipe.task_graph import lower
from solver.bounds.blocks import block_bounds_us, block_relaxation, blocks_in_memory_bound_us, without_blocks
from solver.bounds.device import longest_chain_us
from solver.bounds.free_order import free_order_bound_us
from solver.bounds.modes import mode_bounds_us
from solver.bounds.rounds import round_bounds_us
from solver.bounds.shared_channel import shared_channel_bounds_us
from solver.bounds.spread import spread_bound_us, without_passes
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import MOST_RELEASE_NODES, from_stage, ordered_bounds_us
from solver.bounds.units import memory_time_bounds_us
from solver.bounds.warmup_cooldown import warmup_cooldown_bounds_us
from solver.bounds.whole_forwards import whole_forwards_bound_us
from solver.variants import fitting_variants, without_unusable_offloads


def lower_bound_us(problem: Problem, without: Set[str] = frozenset()) -> float:
    """The best bound known on the problem's objective without search, in less than a second.

    `without`: names of bounds that are left out (`solver.components`).
    """
    return best_bound(problem, without)[1]


def best_bound(problem: Problem, without: Set[str] = frozenset()) -> tuple[str, float]:
    """The name of the best of all bounds, and the bound; "" and 0 where all are left out."""
    bounds_us = lower_bounds_us(problem, without)
    return max(bounds_us.items(), key=lambda entry: entry[1], default=("", 0.0))


def lower_bounds_us(problem: Problem, without: Set[str] = frozenset()) -> dict[str, float]:
    """The best bound of each kind that a problem has, by its name in `solver.components`.

    Measured for 96 microbatches on 32 devices in little memory: 0.2 s of one core, 0.4 s with activation modes or with
    eight slices; 0.8 s for 512 of eight slices on 64. Larger ones get only bounds whose time hardly grows.

    The windows and byte-time apart hold where activations are kept or offloaded whole. Where there are other modes they
    are asked without budgets: then nothing needs to be recomputed, and keeping everything is as fast as any choice of
    modes. With budgets there are both in one (`solver.bounds.modes`).
    All three hold for units with costs of their own. What their order says counts for equal microbatches as well, up to
    `MOST_RELEASE_NODES`.
    All of these are of F, B and W: where the first stages have F alone, of the stages behind them. With spread passes
    they are of a relaxation that has none.
    """
    problem = without_unusable_offloads(problem)
    if problem.spread or problem.gates:
        bounds = lower_bounds_us(without_passes(problem), without)
        apart = block_relaxation(problem) if problem.overlaps else problem
        return bounds | _kept({"spread": spread_bound_us(apart)}, without)
    if problem.overlaps:
        apart, bounds = without_blocks(problem), lower_bounds_us(block_relaxation(problem), without)
        if not lower(problem).trained.all():
            return bounds
        if problem.has_equal_microbatches:  # a block makes no op shorter
            bounds |= _kept({"chain": max(bounds.get("chain", 0.0), longest_chain_us(apart))}, without)
        return bounds | _kept({"blocks": max(*block_bounds_us(problem), blocks_in_memory_bound_us(problem))}, without)
    if not lower(problem).trained.all():
        return _kept(_partly_trained_bounds_us(problem, without), without)
    if problem.has_modes and problem.has_equal_microbatches:
        relaxed = lower_bounds_us(_without_budgets(problem), without)
        own = {
            **_order_bounds_us(problem),
            "modes": max(mode_bounds_us(problem)),
            "rounds": max(round_bounds_us(problem)),
        }
        return _kept({name: max(relaxed.get(name, 0.0), own.get(name, 0.0)) for name in {**relaxed, **own}}, without)
    bounds = {"chain": longest_chain_us(problem), **_order_bounds_us(problem)}
    bounds |= {name: max(bounds_us(problem)) for name, bounds_us in _device_bounds(problem).items()}
    kept = _kept(bounds, without)
    if problem.has_equal_microbatches and "whole-forwards" not in without:
        kept["whole-forwards"] = whole_forwards_bound_us(problem, max(kept.values(), default=0.0))
    return kept


def _kept(bounds_us: dict[str, float], without: Set[str]) -> dict[str, float]:
    return {name: float(bound_us) for name, bound_us in bounds_us.items() if name not in without}


def _partly_trained_bounds_us(problem: Problem, without: Set[str]) -> dict[str, float]:
    """Bounds where not every stage does F, B and W: the work of each device, and what the last stages need that do.

    Every op of these comes after F of the stages before them.
    """
    graph = lower(problem)
    bounds = {"unit-device": max(_work_bounds_us(problem))}
    trained = graph.trained
    behind = from_stage(problem, int(np.argmax(trained)))
    if trained.any() and lower(behind).trained.all():
        head_us = _heads_us(problem)[np.argmax(trained)]
        for name, bound_us in lower_bounds_us(behind, without).items():
            bounds[name] = max(bounds.get(name, 0.0), head_us + bound_us)
    return bounds


def _work_bounds_us(problem: Problem) -> Sequence[float]:
    """For each device that has stages the least time of its compute ops, after F of the stages before, for a makespan.

    Units of a stage take the chain of ops that takes least.
    """
    graph = lower(problem)
    counts = np.bincount(graph.unit_class)
    us = graph.of_stages(graph.duration_us)
    least_us = np.array(
        [
            np.min(
                [
                    us[[CODE[kind] for kind in chain if kind not in COPIES], s, option].sum(axis=0)
                    for option in range(graph.options[s])
                    for chain in graph.chains(s, option)
                ],
                axis=0,
            )
            @ counts
            for s in range(len(problem.stages))
        ]
    )
    heads_us = _heads_us(problem)
    return [float(heads_us[own[0]] + least_us[list(own)].sum()) for own in problem.stages_of if own]


def _heads_us(problem: Problem) -> Floats:
    """The least time before F of each stage: that of F on the stages before, for a makespan; 0 for spans."""
    heads_us = UnitCosts.of(problem).heads_us.min(axis=1)
    return heads_us if problem.objective == "makespan" else np.zeros_like(heads_us)


def _order_bounds_us(problem: Problem) -> dict[str, float]:
    """Bound by the chain of order and memory over all devices; 0 for equal microbatches where they are too many."""
    costs = UnitCosts.of(problem)
    if problem.has_free_order:
        return {"free-order": free_order_bound_us(costs)}
    if problem.has_equal_microbatches and 2 * costs.forward.size > MOST_RELEASE_NODES:
        return {"release-order": 0.0}
    return {"release-order": max(ordered_bounds_us(costs), default=0.0)}


def _device_bounds(problem: Problem) -> dict[str, Callable[[Problem], Sequence[float]]]:
    """Bounds of each device, by name; those of rounds and shared channels are proved for equal microbatches."""
    of_units: dict[str, Callable[[Problem], Sequence[float]]] = {
        "warmup-cooldown": warmup_cooldown_bounds_us,
        "memory-time": memory_time_bounds_us,
    }
    of_equal = {"rounds": round_bounds_us, "shared-channel": shared_channel_bounds_us}
    return of_units | of_equal if problem.has_equal_microbatches else of_units


def device_bounds_us(problem: Problem) -> Sequence[float]:
    """The best bound from each device that has stages."""
    if not lower(problem).trained.all():
        return _work_bounds_us(problem)
    return [max(bounds) for bounds in zip(*(each(problem) for each in _device_bounds(problem).values()), strict=True)]


def _without_budgets(problem: Problem) -> Problem:
    """The problem with room for everything, on devices and host, and without modes, of which it then needs none.

    Where a budget leaves no choice but to recompute inside the backward, each backward takes that much longer.
    """
    stages = []
    for s, stage in enumerate(problem.stages):
        again_us = min(variant.mode.recompute_us if variant.inside else 0 for variant in fitting_variants(problem, s))
        stages.append(stage.replaced(modes=[], backward_input_us=stage.backward_input_us + again_us))
    devices = [device.replaced(memory_bytes=None) for device in problem.devices]
    return problem.replaced(host_memory_bytes=None, devices=devices, stages=stages)
