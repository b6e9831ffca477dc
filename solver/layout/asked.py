"""A job as a user asks for it, with a schedule by name or from a file, and the cheapest change by which it fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError, Issue, MethodError
from optpipe.partition import cut_in_name
from optpipe.placement import name_of_placement
from optpipe.schedule import Schedule
from solver.layout.fitting import Job, ranks_of
from solver.layout.strategies import WITH_PASSES, require_stages

Asked = str | Schedule | None
"""A published schedule by name, one from a file, or none in particular."""


def as_asked(job: Job, strategy: Strategy, asked: Asked, gpus: int | None = None) -> Strategy:
    """A strategy with the schedule that was asked for, from a file with its cut. Raises InputError if it is illegal.

    Without any it is 1F1B, interleaved where a device has several stages, or the one with spread passes. `gpus`: those
    of the job; None for as many as the strategy takes.
    """
    named = replace(strategy, schedule=asked if isinstance(asked, str) else _plain_schedule(strategy))
    job.rules(gpus or named.gpus).require(named)
    if isinstance(asked, Schedule):
        return _as_in_file(job, named, asked)
    require_stages(named)
    return named


def _plain_schedule(strategy: Strategy) -> str:
    if strategy.vocabulary == "spread":
        return WITH_PASSES
    return "1f1b" if strategy.virtual == 1 else "interleaved-1f1b"


def _as_in_file(job: Job, strategy: Strategy, schedule: Schedule) -> Strategy:
    """The strategy with the cut and the placement of a schedule; its modes say what is recomputed, if it has any."""
    problem = schedule.problem
    microbatches, spread = strategy.microbatches(job.global_batch), strategy.vocabulary == "spread"
    of_file = {
        "pp": (len(problem.devices), strategy.pipeline, "devices"),
        "vpp": (len(problem.stages) // len(problem.devices), strategy.virtual, "stages on each device"),
    }
    for option, (own, asked, what) in of_file.items():
        if own != asked:
            raise _other(f"has {own:,} {what}, but {option} is {asked:,}. Maybe --{option} {own}.")
    if problem.units != microbatches:
        detail = f"runs {problem.units:,} microbatches, but a step has {microbatches:,}. "
        raise _other(detail + "Maybe another --microbatch-size, --dp or --global-batch.")
    if bool(problem.spread) != spread:
        place, instead = ("on all devices", "spread") if problem.spread else ("in one stage", "last")
        detail = f"has the output layer's rows {place}, but vocabulary is {strategy.vocabulary}. "
        raise _other(f"{detail}Maybe --vocabulary {instead}.")
    job.require_rates((), offload=any(device.offload for device in schedule.devices))
    changes: dict[str, Any] = {"recompute": "none"} if schedule.mode_names else {}
    if name_of_placement([stage.device for stage in problem.stages]) == "v":
        changes["schedule"] = "zb-v"
    if cut := cut_in_name(problem.name):
        sizes = [int(size) for size in cut.split(",")]
        layers = len(job.model.stack) + 2
        if len(sizes) != len(problem.stages) or sum(sizes) != layers:
            detail = f"is cut {cut}, but {job.model.name} has {layers} layers with embedding and output layer. "
            raise _other(detail + "Maybe it is of another model.")
        sizes[0] -= 1
        sizes[-1] -= 1
        changes["stage_layers"] = tuple(sizes)
        if not spread:
            changes["vocabulary"] = "last" if sizes[-1] else "own"
    return replace(strategy, **changes)


def _other(detail: str) -> InputError:
    return InputError([Issue("schedule", "other_pipeline", detail)])


def cheapest_change(
    job: Job, strategy: Strategy, asked: Asked = None, *, fixed_data: bool = False
) -> tuple[str, Strategy] | None:
    """The single change of a strategy that fits and costs least time, with its options; None if none fits.

    `fixed_data`: replicas are an option of the user's too, and change with the others.
    """
    changes = [(name, changed, asked) for name, changed in _changes(strategy, fixed_data)]
    plain = _plain_schedule(strategy)
    if asked not in (None, plain):
        changes.append((f"--schedule {plain}", strategy, plain))
    return _cheapest(job, changes)


def longer_pipeline(
    job: Job, strategy: Strategy, asked: Asked = None, *, fixed_data: bool = False
) -> tuple[str, Strategy] | None:
    """More stages and full recomputation, with their options, as `cheapest_change`."""
    changes = (
        (f"{name} --recompute full", replace(changed, recompute="full"), asked)
        for name, changed in _changes(strategy, fixed_data)
        if changed.pipeline > strategy.pipeline and strategy.recompute != "full"
    )
    return _cheapest(job, changes)


def _cheapest(job: Job, changes: Iterable[tuple[str, Strategy, Asked]]) -> tuple[str, Strategy] | None:
    """The fastest of changed strategies that fits; each is judged as the command with these options would be."""
    legal: list[tuple[float, str, Strategy, Asked]] = []
    for name, changed, asked in changes:
        with suppress(InputError):
            found = as_asked(job, changed, asked)
            legal.append((job.seconds(found), name, found, asked))
    for _, name, found, asked in sorted(legal, key=lambda one: one[0]):
        with suppress(InputError, MethodError):
            ranks = ranks_of(job, found, found.schedule if asked is None else asked)
            if all(rank.total <= job.machine.facts.memory_bytes for rank in ranks):
                return name, found
    return None


def _changes(one: Strategy, fixed_data: bool) -> Iterator[tuple[str, Strategy]]:
    """All strategies that differ from this one in one choice, with as many GPUs."""
    if one.recompute != "full":
        yield "--recompute full", replace(one, recompute="full")
    for place in ("last", "own"):
        if place != one.vocabulary and one.pipeline > 1:
            yield f"--vocabulary {place}", replace(one, vocabulary=place)
    for sharding in ("optimizer", "fsdp"):
        if sharding != one.sharding and not (sharding == "fsdp" and one.pipeline > 1):
            yield f"--sharding {sharding}", replace(one, sharding=sharding)
    for factor in (2, 4, 8):
        if one.microbatch_size % factor == 0:
            smaller = one.microbatch_size // factor
            yield f"--microbatch-size {smaller}", replace(one, microbatch_size=smaller)
        if one.data % factor == 0:
            fewer = one.data // factor
            replicas = f" --dp {fewer}" if fixed_data else ""
            yield f"--tp {one.tensor * factor}{replicas}", replace(one, tensor=one.tensor * factor, data=fewer)
            yield f"--pp {one.pipeline * factor}{replicas}", replace(one, pipeline=one.pipeline * factor, data=fewer)
            yield f"--cp {one.context * factor}{replicas}", replace(one, context=one.context * factor, data=fewer)
        yield f"--ep {one.expert * factor}", replace(one, expert=one.expert * factor)
