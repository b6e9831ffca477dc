"""Plan of a training job: all strategies rated, the best families cut and scheduled, and the simplest of equals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from optpipe.cluster.costs import CostModel, work
from optpipe.cluster.layers import strategy_layers
from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError, Issue
from optpipe.layers import LayerProfile
from optpipe.schedule import Schedule
from solver.layout.candidates import Search, candidates
from solver.layout.fitting import Job
from solver.layout.ranking import Judged, rank
from solver.layout.strategies import AXES, FIELDS, Fixed, Rated, Rater, rate_all
from solver.limits import Limits

MOST_SOLVED = 3
"""Most families that are cut and scheduled: each has a part of the time."""
LEAST_S = 2.0
"""Seconds below which no family is begun."""
SHOWN_WORK = 8
"""Best strategies whose seconds are shown by kind."""


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
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.judged.value_us / 1e6 + self.added_s


@dataclass(frozen=True)
class Plan:
    """All strategies of a job with their ends, the best first; those solved; and the one to take."""

    job: Job
    gpus: int
    fixed: Fixed
    ratings: Sequence[Rated]
    solved: Sequence[Solved]
    error: float
    """Median error of predictions on the machine: smaller differences are ties."""

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
        """The fastest of what was cut and scheduled."""
        return min(self.solved, key=lambda one: one.seconds, default=None)

    def tokens_per_s(self, seconds: float) -> float:
        """Tokens a second and GPU."""
        return self.job.global_batch * self.job.sequence / seconds / self.gpus

    def utilization(self, seconds: float) -> float:
        """Operations of the model, without recomputation and with half of causal attention, over the 16-bit peak."""
        one = Strategy()
        costs = CostModel(self.job.model, self.job.machine.facts, one, self.job.sequence)
        kinds = costs.devices().sum((0, 1))
        busy_s = float(kinds @ work(products=1, attention=1, experts=1)) * self.job.global_batch / self.gpus
        return busy_s / seconds

    def document(self) -> dict[str, Any]:
        """The plan as `optpipe.plan/1`."""
        job = self.job
        rater = Rater(job, self.fixed)
        strategies = []
        for number, one in enumerate(self.ratings):
            entry: dict[str, Any] = {axis: getattr(one.strategy, FIELDS[axis]) for axis in AXES}
            entry |= {"recompute": one.strategy.recompute, "sharding": one.strategy.sharding, "end": one.end}
            entry |= {"seconds": one.seconds if one.seconds < inf else None, "bound_s": one.bound_s}
            entry |= {"memory_bytes": round(one.memory_bytes) or None, "reason": one.reason}
            if number < SHOWN_WORK and one.work is not None:
                entry["lost_s"] = rater.lost_s(one)
            strategies.append(entry)
        best = self.best
        return {
            "format": "optpipe.plan/1",
            "model": job.model.name,
            "parameters": job.model.parameters,
            "machine": job.machine.name,
            "gpus": self.gpus,
            "sequence": job.sequence,
            "global_batch": job.global_batch,
            "software": job.software_name,
            "fixed": {name: sorted(map(str, values)) for name, values in self.fixed.items()},
            "assumptions": list(job.model.assumptions),
            "error": self.error,
            "best": {
                **{axis: getattr(best.strategy, FIELDS[axis]) for axis in AXES},
                "seconds": best.seconds,
                "bound_s": min(one.bound_s for one in self.ratings),
                "tokens_per_s_per_gpu": self.tokens_per_s(best.seconds),
                "utilization": self.utilization(best.seconds),
                "ranks": [vars(held) for held in job.held(best.strategy)],
            },
            "solved": [
                {
                    **{axis: getattr(one.rated.strategy, FIELDS[axis]) for axis in AXES if axis != "vpp"},
                    "seconds": one.seconds,
                    "pipeline_us": one.judged.value_us,
                    "bound_us": one.judged.bound_us,
                    "placement": one.judged.candidate.placement,
                    "cut": list(one.judged.candidate.layout.sizes) if one.judged.candidate.layout else [],
                    "method": one.schedule.method,
                }
                for one in self.solved
            ],
            "strategies": strategies,
        }


OnPlan = Callable[[Plan], None]
"""Called with the plan so far: when all strategies are rated, and after each family that is solved."""


def plan_cluster(
    job: Job,
    gpus: int,
    fixed: Fixed,
    limits: Limits,
    on_plan: OnPlan = lambda _: None,
    prepare: Callable[[], None] = lambda: None,
) -> Plan:
    """Rate all strategies and schedule the best families, within the time limit.

    `prepare` is called before the first family is solved; the time that it takes does not count. Raises InputError
    where no strategy is legal.
    """
    ratings: list[Rated] = []
    for group in rate_all(job, gpus, fixed):
        ratings += group
    if not ratings:
        detail = (
            f"has no legal strategy on {gpus} GPUs with what is fixed. Maybe fix fewer options, or see `optpipe fits`."
        )
        raise InputError([Issue(job.model.name, "no_strategy", detail)])
    ratings.sort(key=_order)
    plan = Plan(job, gpus, fixed, ratings, (), job.error(ratings[0].strategy) or 0.0)
    on_plan(plan)
    if limits.time_left_s < LEAST_S or plan.best.end != "solved":
        return plan
    began = time.perf_counter()
    prepare()
    limits = replace(limits, time_limit_s=limits.time_limit_s + time.perf_counter() - began)
    for number, one in enumerate(_families(ratings)):
        left_s = limits.time_left_s
        if left_s < LEAST_S or limits.cancel.requested:
            break
        share = replace(limits, time_limit_s=left_s / (MOST_SOLVED - number), began=time.perf_counter())
        found = solve_family(job, one, share)
        if found is not None:
            ratings = sorted((_with(rating, found) for rating in plan.ratings), key=_order)
            plan = replace(plan, ratings=ratings, solved=[*plan.solved, found])
            on_plan(plan)
    return plan


def _order(one: Rated) -> tuple[float, int, float]:
    return one.seconds, one.axes, one.bound_s


def _families(ratings: Sequence[Rated]) -> list[Rated]:
    """The best rating of each of the best families."""
    best: dict[Strategy, Rated] = {}
    for one in ratings:
        if one.end == "solved":
            best.setdefault(replace(one.strategy, virtual=1, schedule="1f1b", recompute="none"), one)
    return list(best.values())[:MOST_SOLVED]


def _with(rating: Rated, found: Solved) -> Rated:
    """The rating with what was found for it, where that is better."""
    if rating.strategy != found.rated.strategy or found.seconds >= rating.seconds:
        return rating
    reason = f"{found.schedule.method}, {found.judged.candidate.placement}, {found.judged.candidate.cut} cut"
    return replace(rating, seconds=found.seconds, reason=reason)


def solve_family(job: Job, rated: Rated, limits: Limits) -> Solved | None:
    """Cut and schedule a family: all placements, modes of activations and cuts that a layout search has."""
    one = replace(rated.strategy, recompute="none")
    m = one.microbatches(job.global_batch)
    efficiencies = job.machine.efficiencies_of(one.precision, job.software_name)
    layers = strategy_layers(job.model, job.machine, one, job.sequence, job.software, efficiencies)
    placements = ["linear"]
    if one.pipeline > 1:
        placements += [f"interleaved-{one.virtual}"] if one.virtual > 1 else ["interleaved-2"]
        placements.append("v")
    search = Search(
        one.pipeline,
        m * one.microbatch_size,
        [one.microbatch_size],
        placements,
        offload=(False, True) if layers.copies else (False,),
        modes=() if rated.strategy.recompute == "none" else ("selective",),
    )
    judged = rank(candidates(layers, search, limits), limits)
    if not judged or judged[0].schedule is None:
        return None
    costs, slowdowns = job.costs(one), job.slowdowns(one)
    added = costs.replicas(m, judged[0].value_us / 1e6) + work(step=1)
    return Solved(rated, layers, judged[0], float(added @ slowdowns))
