"""Plan of a training job: all strategies rated, the best families cut and scheduled, and the simplest of equals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from optpipe.cluster.costs import ideal_seconds, work
from optpipe.cluster.layers import strategy_layers, strategy_partition
from optpipe.cluster.strategy import V_SHAPED, Strategy
from optpipe.display import Displayed, Summary
from optpipe.errors import InputError, Issue
from optpipe.layers import LayerProfile
from optpipe.partition import Partition
from optpipe.placement import Kind, placement_name
from optpipe.schedule import Schedule
from optpipe.units import bytes_text, percent_text, time_text
from solver.layout.candidates import Search, candidates
from solver.layout.fitting import Job
from solver.layout.legal import legal_instead
from solver.layout.ranking import Judged, rank
from solver.layout.strategies import (
    AXES,
    CLOSED_FORMS,
    FIELDS,
    Fixed,
    Rated,
    Rater,
    VocabularyLayer,
    rate_all,
    values_of,
)
from solver.limits import Limits
from solver.trainer_settings import Setting, nearest_settings

MOST_SOLVED = 3
"""Most families that are cut and scheduled: each has a part of the time."""
PLAN_FILES = ("plan.json", "schedule.json", "layers.json", *(f"schedule-{n + 1}.json" for n in range(MOST_SOLVED)))
"""Files of the folder of a plan. `schedule.json` and `layers.json` are of the strategy to take, if it was cut and
scheduled; `schedule-2.json` is of the second fastest that was."""
LEAST_S = 2.0
"""Seconds below which no family is begun."""
SHOWN_WORK = 48
"""Best strategies whose seconds and memory are said by kind, besides that of each size of the pipeline."""
PROGRESS_S = 0.5
"""Seconds between two plans while strategies are rated."""


@dataclass(frozen=True)
class Solved:
    """A family that was cut and scheduled: its best layout, and what a step adds to the pipeline."""

    rated: Rated
    layers: LayerProfile
    judged: Judged
    added_s: float

    @property
    def schedule(self) -> Schedule:
        """The schedule of its best layout."""
        assert self.judged.schedule is not None, "only families with a schedule are kept"
        return self.judged.schedule

    @property
    def layout(self) -> Partition:
        """Its cut and placement."""
        assert self.judged.candidate.layout is not None, "a schedule has a layout"
        return self.judged.candidate.layout

    @property
    def strategy(self) -> Strategy:
        """The strategy that was rated, with the stages that were found."""
        sizes = list(self.layout.sizes)
        sizes[0] -= 1  # the embedding
        sizes[-1] -= 1  # the head
        virtual = len(sizes) // self.rated.strategy.pipeline
        name = "interleaved-1f1b" if virtual > 1 else "1f1b"
        if self.judged.candidate.placement == "v":
            name = "dualpipe-v" if self.rated.strategy.overlap == "yes" else "zb-v"
        recompute = self.rated.strategy.recompute if self.judged.recomputed else "none"
        return replace(
            self.rated.strategy, virtual=virtual, stage_layers=tuple(sizes), schedule=name, recompute=recompute
        )

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.judged.value_us / 1e6 + self.added_s

    @cached_property
    def in_1f1b(self) -> Setting | None:
        """Settings of trainers that run 1F1B or interleaved 1F1B, on this cut; None where stages are on a V."""
        with suppress(InputError):
            return nearest_settings(self.schedule, "megatron")[0]
        return None


@dataclass(frozen=True)
class Plan(Displayed):
    """All strategies of a job with their ends, the best first; those solved; and the one to take."""

    job: Job
    gpus: int
    fixed: Fixed
    ratings: Sequence[Rated]
    solved: Sequence[Solved]
    """Families that were cut and scheduled, the fastest first."""
    error: float
    """Median error of predictions on the machine: smaller differences are ties."""
    complete: bool = True
    """False while strategies are rated, or where it was cancelled before all were: only some are among `ratings`."""

    @property
    def best(self) -> Rated:
        """The simplest of the strategies that tie with the fastest."""
        fastest = self.ratings[0].seconds
        ties = [one for one in self.ratings if one.seconds <= fastest * (1 + self.error)]
        return min(ties, key=lambda one: (one.axes, one.seconds))

    @property
    def ties(self) -> int:
        """Strategies that tie with the fastest."""
        return sum(one.seconds <= self.ratings[0].seconds * (1 + self.error) for one in self.ratings)

    @property
    def best_solved(self) -> Solved | None:
        """The strategy to take as it was cut and scheduled; None where it has a published schedule alone."""
        return next((one for one in self.solved if one.strategy == self.best.strategy), None)

    def schedule_file(self, number: int) -> str:
        """Name of the file with the schedule of a family, by its place in `solved`."""
        return "schedule.json" if self.solved[number] is self.best_solved else f"schedule-{number + 1}.json"

    def tokens_per_s(self, seconds: float) -> float:
        """Tokens a second and GPU."""
        return self.job.global_batch * self.job.sequence / seconds / self.gpus

    def utilization(self, seconds: float) -> float:
        """Operations of the model, without recomputation and with half of causal attention, over the 16-bit peak."""
        sequence_s = ideal_seconds(self.job.model, self.job.machine.facts, self.job.sequence)
        return sequence_s * self.job.global_batch / self.gpus / seconds

    @property
    def vocabulary(self) -> VocabularyLayer | None:
        """Length of the output layer in the strategy to take, and a step with it on all devices; None for pp=1."""
        return Rater(self.job, self.fixed).vocabulary(self.best.strategy)

    def summary(self) -> Summary:
        """The fastest strategies, for notebooks."""
        title, best = f"{self.job.model.name} on {self.gpus:,} {self.job.machine.name}", self.best
        fastest = [one for one in self.ratings[:SHOWN_WORK] if one.end == "solved"]
        if not fastest:
            return Summary(title, [("", "nothing fits")])
        facts = [
            ("take", best.name),
            ("a step", time_text(best.seconds * 1e6)),
            ("no strategy below", time_text(min(one.bound_s for one in self.ratings) * 1e6)),
        ]
        rows = [
            (
                one.name,
                time_text(one.seconds * 1e6),
                f"{self.tokens_per_s(one.seconds):,.0f}",
                percent_text(self.utilization(one.seconds)),
                bytes_text(one.memory_bytes),
                one.reason,
            )
            for one in fastest
        ]
        return Summary(title, facts, ("strategy", "step", "tokens/s/GPU", "MFU", "memory", "schedule"), rows)

    def svg(self) -> bytes:
        """The picture of `optpipe plan --plot`, for notebooks; empty where nothing fits."""
        from optpipe.plot import render_plan

        return render_plan(self.document(), "svg") if self.best.end == "solved" else b""

    def document(self) -> dict[str, Any]:
        """The plan as `optpipe.plan/1`."""
        job = self.job
        rater = Rater(job, self.fixed)
        strategies: list[dict[str, Any]] = []
        solved = {one.strategy: number for number, one in enumerate(self.solved)}
        seen: set[int] = set()
        for number, one in enumerate(self.ratings):
            entry: dict[str, Any] = {"name": one.name} | values_of(one.strategy) | {"end": one.end}
            entry |= {"seconds": one.seconds if one.seconds < inf else None, "bound_s": one.bound_s}
            entry |= {"memory_bytes": round(one.memory_bytes) or None, "reason": one.reason}
            pipeline, place = one.strategy.pipeline, solved.get(one.strategy)
            if one.work is not None and (number < SHOWN_WORK or place is not None or pipeline not in seen):
                schedule = None if place is None else self.solved[place].schedule
                entry |= {"lost_s": rater.lost_s(one), "hidden_s": rater.hidden_s(one)}
                entry |= {"ranks": _ranks(job, one.strategy, schedule)}
                seen.add(pipeline)
            if place is not None:
                entry["solved"] = place
            strategies.append(entry)
        return {
            "format": "optpipe.plan/1",
            "model": job.model.name,
            "config": dict(job.model.config),
            "parameters": job.model.parameters,
            "machine": job.machine.name,
            "gpus_per_node": job.machine.facts.gpus_per_node,
            "device_memory_bytes": job.machine.facts.memory_bytes,
            "gpus": self.gpus,
            "sequence": job.sequence,
            "global_batch": job.global_batch,
            "software": job.software_name,
            "fixed": {name: sorted(map(str, values)) for name, values in self.fixed.items()},
            "assumptions": list(job.model.assumptions),
            "error": self.error,
            "complete": self.complete,
            "best": self._taken() if self.best.end == "solved" else None,
            "solved": [
                {
                    **{axis: getattr(one.strategy, FIELDS[axis]) for axis in AXES},
                    "seconds": one.seconds,
                    "pipeline_us": one.judged.value_us,
                    "bound_us": one.judged.bound_us,
                    "placement": one.judged.candidate.placement,
                    "cut": list(one.layout.sizes),
                    "method": one.schedule.method,
                    "bubble": one.schedule.bubble,
                    "schedule_file": self.schedule_file(number),
                }
                for number, one in enumerate(self.solved)
            ],
            "strategies": strategies,
        }

    def _taken(self) -> dict[str, Any]:
        """The strategy to take, with what a trainer needs to be started."""
        best, found = self.best, self.best_solved
        strategy, rated = best.strategy, found.rated if found else best
        kind: Kind = "v" if strategy.is_v_shaped else "interleaved" if strategy.virtual > 1 else "linear"
        entry: dict[str, Any] = {name: getattr(strategy, field) for name, field in FIELDS.items()}
        entry |= {
            "seconds": best.seconds,
            "bound_s": min(one.bound_s for one in self.ratings),
            "tokens_per_s_per_gpu": self.tokens_per_s(best.seconds),
            "utilization": self.utilization(best.seconds),
            "ranks": _ranks(self.job, strategy, found.schedule if found else None),
            "vocabulary": self.vocabulary and self.vocabulary._asdict(),
            "placement": placement_name(kind, strategy.virtual),
            "cut": list(strategy_partition(self.job.model, strategy).sizes),
            "published": {
                "schedule": rated.strategy.schedule,
                "vpp": rated.strategy.virtual,
                "cut": list(strategy_partition(self.job.model, rated.strategy).sizes),
                "recompute": rated.strategy.recompute,
                "seconds": rated.seconds,
            },
        }
        if found is None:
            return entry | {"schedule_file": None}
        in_1f1b = found.in_1f1b
        return entry | {
            "schedule": found.schedule.method,
            "schedule_file": "schedule.json",
            "activations": {
                "all": strategy.stages * strategy.microbatches(self.job.global_batch),
                "offloaded": sum(len(device.offload) for device in found.schedule.devices),
                "recomputed": found.judged.recomputed,
            },
            "in_1f1b": in_1f1b
            and {
                "activations": in_1f1b.mode,
                "overlap": "yes" if in_1f1b.blocks else "no",
                "seconds": in_1f1b.value_us / 1e6 + found.added_s,
                "short_bytes": in_1f1b.short_bytes,
            },
        }


OnPlan = Callable[[Plan], None]
"""Called with the plan so far: twice a second while strategies are rated, when all are, and after each family that is
solved."""


def plan_cluster(
    job: Job,
    gpus: int,
    fixed: Fixed,
    limits: Limits,
    on_plan: OnPlan = lambda _: None,
    prepare: Callable[[], None] = lambda: None,
    max_ops: float = inf,
) -> Plan:
    """Rate all strategies, however long that takes, and schedule the best families within the time limit.

    `prepare` is called before the first family is solved, and its time counts. A family whose schedules have more than
    `max_ops` is rated alone. Raises InputError where no strategy is legal.
    """

    def rated(complete: bool) -> Plan:
        ordered = sorted(ratings, key=_order)
        return Plan(job, gpus, fixed, ordered, (), job.error(ordered[0].strategy) or 0.0, complete)

    ratings: list[Rated] = []
    complete, said = True, time.perf_counter()
    for group in rate_all(job, gpus, fixed):
        if ratings and limits.cancel.requested:
            complete = False
            break
        ratings += group
        if time.perf_counter() - said > PROGRESS_S:
            on_plan(rated(complete=False))
            said = time.perf_counter()
    if not ratings:
        detail = f"has no legal strategy on {gpus:,} GPUs with what is fixed. {legal_instead(job, gpus, fixed)}"
        raise InputError([Issue(job.model.name, "no_strategy", detail.rstrip())])
    plan = rated(complete)
    on_plan(plan)
    if limits.time_left_s < LEAST_S or plan.best.end != "solved":
        return plan
    prepare()
    tried: set[Strategy] = set()

    def is_next(one: Rated) -> bool:
        """True for a pipeline, which alone has something to search, that no bound keeps from being the fastest."""
        may_win = one.end == "solved" and one.strategy.pipeline > 1 and one.bound_s < plan.ratings[0].seconds
        return may_win and _family(one) not in tried and _most_ops(job, one.strategy) <= max_ops

    for number in range(MOST_SOLVED):
        left_s = limits.time_left_s
        one = next(filter(is_next, (plan.best, *plan.ratings)), None)
        if one is None or left_s < LEAST_S or limits.cancel.requested:
            break
        tried.add(_family(one))
        share = replace(limits, time_limit_s=left_s / (MOST_SOLVED - number), began=time.perf_counter())
        found = solve_family(job, one, fixed, share)
        if found is not None:
            solved = sorted([*plan.solved, found], key=lambda one: one.seconds)
            plan = replace(plan, ratings=_with(job, plan.ratings, found), solved=solved)
            on_plan(plan)
    return plan


def _order(one: Rated) -> tuple[float, int, float]:
    return one.seconds, one.axes, one.bound_s


def _family(one: Rated) -> Strategy:
    """Strategy that a rating shares with all ratings of its family."""
    return replace(one.strategy, virtual=1, stage_layers=(), schedule="1f1b", recompute="none")


def _most_ops(job: Job, strategy: Strategy) -> int:
    """Ops of a family's longest schedules: a layout search tries two stages on a device too."""
    virtual = max(strategy.virtual, 2) if strategy.pipeline > 1 else 1
    return 3 * strategy.pipeline * virtual * strategy.microbatches(job.global_batch)


def _with(job: Job, ratings: Iterable[Rated], found: Solved) -> list[Rated]:
    """Ratings with what was found in place of the published schedule of as many stages, if it is faster."""
    rated, strategy = found.rated, found.strategy
    reason = f"{found.schedule.method}, {found.judged.candidate.placement}, {found.judged.candidate.cut} cut"
    memory_bytes = max(sum(kinds.values()) for kinds in _ranks(job, strategy, found.schedule))
    better = replace(rated, strategy=strategy, seconds=found.seconds, memory_bytes=memory_bytes, reason=reason)
    same = {one for one in ratings if (_family(one), one.strategy.virtual) == (_family(rated), strategy.virtual)}
    if any(one.seconds <= found.seconds for one in same):
        return list(ratings)
    return sorted([*(one for one in ratings if one not in same), better], key=_order)


def _ranks(job: Job, strategy: Strategy, schedule: Schedule | None) -> list[dict[str, float]]:
    """Bytes by kind on each device of the pipeline, under a schedule or a published one in closed form."""
    ranks = []
    for device, held in enumerate(job.held(strategy)):
        kinds = vars(held)
        if schedule is not None:
            kinds |= {"activations": schedule.devices[device].peak_bytes_any_timing, "logits": 0.0, "transient": 0.0}
        fragments = sum(kinds.values()) * (job.software.reserved - 1)
        ranks.append(kinds | {"fragments": fragments, "context": job.software.context_bytes})
    return ranks


def _placements(strategy: Strategy, fixed: Fixed) -> list[str]:
    """Placements that fixed numbers of stages and fixed schedules leave, the plainest first."""
    chunks = max(2, strategy.virtual)
    looped = f"interleaved-{chunks}"
    counts = {"linear": 1} if strategy.pipeline == 1 else {"linear": 1, looped: chunks, "v": 2}
    if strategy.overlap == "yes" and strategy.pipeline > 1:  # trainers run no blocks with one stage on a device
        del counts["linear"]
    schedules = fixed.get("schedule", CLOSED_FORMS)
    left = {"v" if name in V_SHAPED else "linear" if 1 in CLOSED_FORMS[name] else looped for name in schedules}
    return [name for name, count in counts.items() if name in left and count in fixed.get("vpp", (count,))]


def solve_family(job: Job, rated: Rated, fixed: Fixed, limits: Limits) -> Solved | None:
    """Cut and schedule a family: all placements, modes of activations and cuts that a layout search has.

    Stages on a device and published schedules that are fixed leave placements out, and none offloads where that is
    left out. None where nothing is left.
    """
    one = replace(rated.strategy, recompute="none")
    m = one.microbatches(job.global_batch)
    efficiencies = job.machine.efficiencies_of(one.precision, job.software_name)
    layers = strategy_layers(job.model, job.machine, one, job.sequence, job.software, efficiencies)
    placements = _placements(one, fixed)
    if not placements:
        return None
    search = Search(
        one.pipeline,
        m * one.microbatch_size,
        [one.microbatch_size],
        placements,
        offload=(False, True) if layers.copies and "no" not in fixed.get("offload", ()) else (False,),
        modes=() if rated.strategy.recompute == "none" or one.overlap == "yes" else ("selective",),
    )
    judged = rank(candidates(layers, search, limits), limits)
    if not judged or judged[0].schedule is None:
        return None
    costs, slowdowns = job.costs(one), job.slowdowns(one)
    added = costs.replicas(m, judged[0].value_us / 1e6) + work(step=1)
    return Solved(rated, layers, judged[0], float(added @ slowdowns))
