"""Plan of a training job: all strategies rated, the best families cut and scheduled, and the simplest of equals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any

from optpipe.cluster.costs import ideal_seconds, work
from optpipe.cluster.layers import strategy_cut, strategy_layers
from optpipe.cluster.strategy import V_SHAPED, Strategy, Vocabulary
from optpipe.display import Displayed, Summary
from optpipe.errors import InputError, Issue
from optpipe.layers import LayerProfile
from optpipe.partition import Partition, stage_sizes
from optpipe.placement import Kind, placement_name
from optpipe.schedule import Schedule
from optpipe.units import bytes_text, percent_text, time_text
from solver.layout.candidates import Search, candidates
from solver.layout.fitting import Job
from solver.layout.legal import broken_rule, legal_instead
from solver.layout.ranking import Judged, rank
from solver.layout.strategies import (
    AXES,
    CLOSED_FORMS,
    FIELDS,
    VOCABULARY,
    WITH_PASSES,
    Fixed,
    Objective,
    OutputLayer,
    Rated,
    Rater,
    rate_all,
    values_of,
    vocabulary_of,
)
from solver.limits import Limits
from solver.trainer_settings import Setting, nearest_settings

PLAN_FORMAT = "optpipe.plan/1"
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
    """A family that was cut and scheduled: its best layout, and what a step adds to the pipeline.

    `costed`: the strategy of the layers that were cut.
    """

    rated: Rated
    costed: Strategy
    judged: Judged
    added_s: float

    @property
    def layers(self) -> LayerProfile:
        """The layers that were cut."""
        return self.judged.candidate.profile

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
        sizes, vocabulary = list(self.layout.sizes), self.rated.strategy.vocabulary
        sizes[0] -= 1  # the embedding
        if vocabulary != "spread":
            sizes[-1] -= 1  # the head
            vocabulary = "last" if sizes[-1] else "own"
        virtual = len(sizes) // self.rated.strategy.pipeline
        name = "interleaved-1f1b" if virtual > 1 else "1f1b"
        if self.judged.candidate.placement == "v":
            name = "dualpipe-v" if self.rated.strategy.overlap == "yes" else "zb-v"
        elif vocabulary == "spread" and virtual == 1:
            name = WITH_PASSES
        return replace(
            self.rated.strategy,
            virtual=virtual,
            stage_layers=tuple(sizes),
            schedule=name,
            recompute=(self.rated.strategy if self.judged.recomputed else self.costed).recompute,
            vocabulary=vocabulary,
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


def strategy_entry(one: Rated) -> dict[str, Any]:
    """A strategy as an entry of `strategies`, without what only some have."""
    entry: dict[str, Any] = {"name": one.name} | values_of(one.strategy) | {"end": one.end}
    entry |= {"seconds": one.seconds if one.seconds < inf else None, "bound_s": one.bound_s}
    return entry | {"memory_bytes": round(one.memory_bytes) or None, "reason": one.reason}


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
    objective: Objective = "time"
    complete: bool = True
    """False while strategies are rated, or where it was cancelled before all were: only some are among `ratings`."""
    spread: Solved | None = None
    """The strategy to take with the output layer's rows on all devices, where that may pay and is no choice of this
    plan."""

    @property
    def best(self) -> Rated:
        """The simplest of the strategies that tie with the fastest; the first, where memory is the objective."""
        if self.objective == "memory":
            return self.ratings[0]
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

    @property
    def operations(self) -> float:
        """Operations of the model in a step (FLOP), without recomputation and with half of causal attention."""
        facts = self.job.machine.facts
        sequence_s = ideal_seconds(self.job.model, facts, self.job.sequence)
        return sequence_s * facts.operations_bf16_per_s * self.job.global_batch

    def utilization(self, seconds: float) -> float:
        """Operations of the model over those at the 16-bit peak of all GPUs."""
        return self.operations / (self.gpus * self.job.machine.facts.operations_bf16_per_s * seconds)

    @property
    def output_layer(self) -> OutputLayer | None:
        """Length of the output layer in the strategy to take, and that strategy with it elsewhere; None for pp=1."""
        return Rater(self.job, self.fixed).output_layer(self.best.strategy)

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
            entry = strategy_entry(one)
            pipeline, place = one.strategy.pipeline, solved.get(one.strategy)
            if one.work is not None and (number < SHOWN_WORK or place is not None or pipeline not in seen):
                schedule = None if place is None else self.solved[place].schedule
                entry |= {"lost_s": rater.lost_s(one), "hidden_s": rater.hidden_s(one)}
                entry |= {"ranks": rank_memory(job, one.strategy, schedule)}
                seen.add(pipeline)
            if place is not None:
                entry["solved"] = place
            strategies.append(entry)
        return {
            "format": PLAN_FORMAT,
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
            "objective": self.objective,
            "complete": self.complete,
            "best": self._taken() if self.best.end == "solved" else None,
            "solved": [
                {
                    **{axis: getattr(one.strategy, FIELDS[axis]) for axis in AXES},
                    "seconds": one.seconds,
                    "pipeline_us": one.judged.value_us,
                    "bound_us": one.judged.bound_us,
                    "placement": one.judged.candidate.placement,
                    "cut": stage_sizes(one.layers, one.layout),
                    "method": one.schedule.method,
                    "bubble": one.schedule.bubble,
                    "vocabulary": one.strategy.vocabulary,
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
            "operations": self.operations,
            "ranks": rank_memory(self.job, strategy, found.schedule if found else None),
            "output_layer": self._places(),
            "placement": placement_name(kind, strategy.virtual),
            "cut": stage_sizes(found.layers, found.layout) if found else strategy_cut(self.job.model, strategy),
            "published": {
                "schedule": rated.strategy.schedule,
                "vpp": rated.strategy.virtual,
                "cut": strategy_cut(self.job.model, rated.strategy),
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

    def _places(self) -> dict[str, Any] | None:
        """The output layer of the strategy to take, with its step and its fullest rank by the layer's place."""
        layer, found = self.output_layer, self.spread
        if layer is None:
            return None
        entries: dict[str, Any] = {
            place: {"seconds": one.seconds if one.seconds < inf else None, "memory_bytes": round(one.memory_bytes)}
            for place, one in layer.rated.items()
        }
        if found is not None:
            bound_s = min(found.judged.bound_us, found.judged.value_us) / 1e6 + found.added_s
            entries["spread"] |= {"searched_s": found.seconds, "searched_bound_s": bound_s}
        return {"layers": layer.layers, "most_layers": layer.most_layers} | entries


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
    objective: Objective = "time",
) -> Plan:
    """Rate all strategies, however long that takes, and schedule the best families within the time limit.

    Where memory is the objective, the best is the one whose fullest rank holds least, the fastest of equals; it has its
    published schedule, and no family is scheduled.

    `prepare` is called before the first family is solved, and its time counts. A family whose schedules have more than
    `max_ops` is rated alone. Raises InputError where no strategy is legal.
    """

    def rated(complete: bool) -> Plan:
        ordered = sorted(ratings, key=_order if objective == "time" else _order_by_memory)
        return Plan(job, gpus, fixed, ordered, (), job.error(ordered[0].strategy) or 0.0, objective, complete)

    job.require_rates(fixed.get("precision", ()), offload="yes" in fixed.get("offload", ()))
    rules = job.rules(gpus)
    degrees = [(name, value) for name in AXES for value in fixed.get(name, ())]
    of_degrees = (fault for name, value in degrees for fault in rules.of_degree(name, value))
    if faults := [*rules.of_sequence(), *of_degrees]:
        raise InputError(faults)
    ratings: list[Rated] = []
    complete, said = True, time.perf_counter()
    for group in rate_all(job, gpus, fixed, objective):
        if ratings and limits.cancel.requested:
            complete = False
            break
        ratings += group
        if ratings and time.perf_counter() - said > PROGRESS_S:
            on_plan(rated(complete=False))
            said = time.perf_counter()
    if not ratings:
        detail = f"has no legal strategy on {gpus:,} GPUs with what is fixed{broken_rule(job, gpus, fixed)}. "
        raise InputError([Issue(job.model.name, "no_strategy", (detail + legal_instead(job, gpus, fixed)).rstrip())])
    plan = rated(complete)
    on_plan(plan)
    if limits.time_left_s < LEAST_S or plan.best.end != "solved" or objective == "memory":
        return plan
    prepare()
    tried: set[Strategy] = set()

    def is_next(one: Rated) -> bool:
        """True for a pipeline, which alone has something to search, that no bound keeps from being the fastest."""
        may_win = one.end == "solved" and one.strategy.pipeline > 1 and one.bound_s < plan.ratings[0].seconds
        return may_win and _family(one) not in tried and _most_ops(job, one.strategy) <= max_ops

    more = _with_spread_head(plan) is not None
    for number in range(MOST_SOLVED):
        left_s, waiting = limits.time_left_s, len({_family(one) for one in plan.ratings if is_next(one)})
        one = next(filter(is_next, (plan.best, *plan.ratings)), None)
        if one is None or left_s < LEAST_S or limits.cancel.requested:
            break
        tried.add(_family(one))
        parts = max(1, min(MOST_SOLVED - number, waiting)) + more
        share = replace(limits, time_limit_s=left_s / parts, began=time.perf_counter())
        found = solve_family(job, one, fixed, share)
        if found is not None:
            solved = sorted([*plan.solved, found], key=lambda one: one.seconds)
            plan = replace(plan, ratings=_with(job, plan.ratings, found), solved=solved)
            on_plan(plan)
    other, left_s = _with_spread_head(plan), limits.time_left_s
    if other is not None and left_s >= LEAST_S and not limits.cancel.requested:
        rest = replace(limits, time_limit_s=left_s, began=time.perf_counter())
        plan = replace(plan, spread=solve_family(job, other, fixed, rest))
        on_plan(plan)
    return plan


def _with_spread_head(plan: Plan) -> Rated | None:
    """The strategy to take with the output layer's rows on all devices; None where that is a choice, or of no use."""
    layer = plan.output_layer
    if layer is None or "spread" in vocabulary_of(plan.fixed):
        return None
    rated = layer.rated.get("spread")
    return rated if rated is not None and rated.end == "solved" and layer.may_be_spread else None


def _order(one: Rated) -> tuple[float, int, float]:
    return one.seconds, one.axes, one.bound_s


def _order_by_memory(one: Rated) -> tuple[bool, float, float]:
    return one.end != "solved", one.memory_bytes, one.seconds


def _family(one: Rated) -> Strategy:
    """Strategy that a rating shares with all ratings of its family."""
    vocabulary: Vocabulary = "spread" if one.strategy.vocabulary == "spread" else "last"
    return replace(one.strategy, virtual=1, stage_layers=(), schedule="1f1b", recompute="none", vocabulary=vocabulary)


def _most_ops(job: Job, strategy: Strategy) -> int:
    """Ops of a family's longest schedules: a layout search tries two stages on a device too."""
    virtual = max(strategy.virtual, 2) if strategy.pipeline > 1 else 1
    passes = 2 if strategy.vocabulary == "spread" else 0
    return (3 * virtual + passes) * strategy.pipeline * strategy.microbatches(job.global_batch)


def _with(job: Job, ratings: Iterable[Rated], found: Solved) -> list[Rated]:
    """Ratings with what was found in place of the published schedule of as many stages, if it is faster."""
    rated, strategy = found.rated, found.strategy
    reason = f"{found.schedule.method}, {found.judged.candidate.placement}, {found.judged.candidate.cut} cut"
    memory_bytes = max(sum(kinds.values()) for kinds in rank_memory(job, strategy, found.schedule))
    better = replace(rated, strategy=strategy, seconds=found.seconds, memory_bytes=memory_bytes, reason=reason)

    def stages(one: Rated) -> tuple[object, ...]:
        return _family(one), one.strategy.virtual, one.strategy.vocabulary

    same = {one for one in ratings if stages(one) == stages(better)}
    if any(one.seconds <= found.seconds for one in same):
        return list(ratings)
    return sorted([*(one for one in ratings if one not in same), better], key=_order)


def rank_memory(job: Job, strategy: Strategy, schedule: Schedule | None) -> list[dict[str, float]]:
    """Bytes by kind on each device of the pipeline, under a schedule or the published one of the strategy."""
    ranks = []
    for device, held in enumerate(job.held(strategy) if schedule is None else job.memory(strategy).devices()):
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


def _offload(strategy: Strategy, layers: LayerProfile, fixed: Fixed) -> Sequence[bool]:
    """Choices of offload to search: both also where a strategy is rated without, unless that is fixed."""
    if strategy.offload == "yes":
        return (True,)
    stays = layers.copies is None or "offload" in fixed or strategy.vocabulary == "spread"
    return (False,) if stays else (False, True)


def solve_family(job: Job, rated: Rated, fixed: Fixed, limits: Limits) -> Solved | None:
    """Cut and schedule a family: all placements, modes of activations and cuts that a layout search has.

    Stages on a device, published schedules and places of the output layer that are fixed leave layouts out, and none
    offloads where that is left out. With the output layer's rows on all devices none offloads; where that was rated
    with recomputation, all microbatches recompute, or none. None where nothing is left.
    """
    spread = rated.strategy.vocabulary == "spread"
    one = replace(rated.strategy, recompute="none")
    costed = [one, *([rated.strategy] if spread and rated.strategy != one else [])]
    m = one.microbatches(job.global_batch)
    efficiencies = job.machine.efficiencies_of(one.precision, job.software_name)
    profiles = [
        strategy_layers(job.model, job.machine, each, job.sequence, job.software, efficiencies) for each in costed
    ]
    placements = _placements(one, fixed)
    if not placements:
        return None
    search = Search(
        one.pipeline,
        m * one.microbatch_size,
        [one.microbatch_size],
        placements,
        offload=_offload(one, profiles[0], fixed),
        modes=() if rated.strategy.recompute == "none" or one.overlap == "yes" or spread else ("selective",),
        vocabulary=VOCABULARY if spread else [kind for kind in vocabulary_of(fixed) if kind != "spread"],
    )
    parts = [replace(limits, time_limit_s=limits.time_limit_s * (n + 1) / len(costed)) for n in range(len(costed))]
    layouts = (candidates(profile, search, part) for profile, part in zip(profiles, parts, strict=True))
    judged = rank(chain.from_iterable(layouts), limits)
    if not judged or judged[0].schedule is None:
        return None
    number = next(n for n, profile in enumerate(profiles) if profile is judged[0].candidate.profile)
    costs, slowdowns = job.costs(one), job.slowdowns(one)
    added = costs.replicas(m, judged[0].value_us / 1e6) + work(step=1)
    return Solved(rated, costed[number], judged[0], float(added @ slowdowns))
