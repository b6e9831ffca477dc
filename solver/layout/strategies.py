"""Strategies of a job: every legal one is rated, bounded, or does not fit.

A *family* has all degrees but the number of stages on a device, which a layout search chooses with the cut. No
schedule, cut or placement of a family takes less than its devices' mean work for all microbatches, with what a step
adds to the pipeline: a family whose bound is above the best value is beaten without being rated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any, NamedTuple, get_args

import numpy as np

from optpipe.cluster.costs import INDEX, Work, work
from optpipe.cluster.memory import GIB
from optpipe.cluster.strategy import Overlap, Precision, Recompute, Sharding, Strategy
from optpipe.errors import InputError, Issue, shown
from solver.layout.fitting import Job
from solver.layout.why import End, at_least_slower, read_pairs

CONTEXTS = (1, 2, 4, 8, 16)
MOST_VIRTUAL = 16
MICROBATCH_SIZES = (1, 2, 4, 8)
UNEVEN = 1.15
"""Largest number of layers on a device over the mean for which more stages are tried."""

CLOSED_FORMS: Mapping[str, Sequence[int]] = {
    "1f1b": (1,),
    "zb-h1": (1,),
    "interleaved-1f1b": range(2, 1000),
    "zb-v": (2,),
    "v-half": (2,),
    "v-min": (2,),
    "dualpipe-v": (2,),
}
"""Published schedules that are rated without being simulated, with the numbers of stages on a device that they take."""

WITH_BLOCKS = ("1f1b", "interleaved-1f1b", "dualpipe-v")
"""Those that trainers run with blocks: 1F1B on a pipeline of one device alone."""

AXES = ("tp", "cp", "ep", "etp", "dp", "pp", "vpp", "microbatch_size")
FIELDS: Mapping[str, str] = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "dp": "data",
    "pp": "pipeline",
    "vpp": "virtual",
    "microbatch_size": "microbatch_size",
    "sharding": "sharding",
    "recompute": "recompute",
    "precision": "precision",
    "overlap": "overlap",
    "schedule": "schedule",
}
"""Fields of a strategy by the names of options."""
Fixed = Mapping[str, Collection[Any]]
"""Allowed values of options that a user fixed."""
CHOICES: Mapping[str, Sequence[str]] = {
    "precision": get_args(Precision),
    "sharding": get_args(Sharding),
    "recompute": get_args(Recompute),
    "overlap": get_args(Overlap),
    "schedule": tuple(CLOSED_FORMS),
    "offload": ("no",),
}
"""Values of the options that are no degrees."""
MOST_DEGREE = 2**20
MOST_DIGITS = 7


def check_values(name: str, values: Sequence[object], where: str | Sequence[str | int]) -> None:
    """Raise InputError for the first value that an option cannot have; `where` names the option in it."""
    for value in values:
        if name in CHOICES:
            if value not in CHOICES[name]:
                detail = f"has {shown(value)} but must be of {', '.join(CHOICES[name])}."
                raise InputError([Issue(where, "unknown", detail)])
        elif isinstance(value, bool) or not isinstance(value, int):
            raise InputError([Issue(where, "not_numbers", f"is {shown(value)} but must be numbers. Maybe 2,4,8.")])
        elif not 1 <= value <= MOST_DEGREE:
            detail = f"has {shown(value)} but must be from 1 to {MOST_DEGREE:,}."
            raise InputError([Issue(where, "out_of_range", detail)])


def read_degrees(text: str, where: str) -> dict[str, Any]:
    """Values by option of a text such as ``tp=8,pp=2``. Raises InputError; `where` names the text in it."""
    wanted: dict[str, Any] = {}
    for name, value in read_pairs(text, where, FIELDS, "tp=8,pp=2").items():
        wanted[name] = int(value) if value.isdecimal() and len(value) <= MOST_DIGITS else value
        check_values(name, [wanted[name]], where)
    return wanted


def strategy_of(values: Mapping[str, Any]) -> Strategy:
    """The strategy with these values by option."""
    return Strategy(**{field: values[name] for name, field in FIELDS.items()})


def values_of(strategy: Strategy) -> dict[str, Any]:
    """Values of a strategy by option."""
    return {name: getattr(strategy, field) for name, field in FIELDS.items()}


@dataclass(frozen=True)
class Rated:
    """A strategy with its end. `seconds` is inf where it has no schedule; nothing of it takes less than `bound_s`."""

    strategy: Strategy
    end: End
    bound_s: float
    seconds: float = inf
    memory_bytes: float = 0.0
    reason: str = ""
    work: Work | None = field(default=None, compare=False, repr=False)
    """Seconds of a step by kind of work, in the order of FEATURES; None where it was not rated."""

    @property
    def axes(self) -> int:
        """Degrees above one, and other choices that are not the plainest."""
        one = self.strategy
        degrees = one.tensor, one.context, one.expert, one.pipeline, one.virtual, one.microbatch_size
        choices = one.recompute != "none", one.sharding == "fsdp", one.overlap == "yes"
        return sum(degree > 1 for degree in degrees) + sum(choices)

    @property
    def name(self) -> str:
        """Degrees above one, as in ``tp4 pp8 vpp5``."""
        degrees = {axis: getattr(self.strategy, FIELDS[axis]) for axis in AXES}
        parts = [f"{axis}{value}" for axis, value in degrees.items() if value > 1 and axis != "microbatch_size"]
        if self.strategy.microbatch_size > 1:
            parts.append(f"mbs{self.strategy.microbatch_size}")
        parts += [self.strategy.recompute] if self.strategy.recompute != "none" else []
        parts += [self.strategy.sharding] if self.strategy.sharding == "fsdp" else []
        parts += ["overlap"] if self.strategy.overlap == "yes" else []
        return " ".join(parts) or "one GPU"


def families(job: Job, gpus: int, fixed: Fixed) -> Iterator[Strategy]:
    """Legal strategies of a job with one stage on each device of the pipeline and no recomputation."""
    heads = min(layer.attention.heads for layer in job.model.layers)
    experts = max(layer.feed_forward.experts for layer in job.model.layers)
    pipelines = _divisors(gpus, len(job.model.layers) + 2, fixed.get("pp"))
    tensors = _divisors(heads, job.machine.facts.gpus_per_node, fixed.get("tp"))
    contexts = fixed.get("cp", CONTEXTS)
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        data, left = divmod(gpus, tensor * context * pipeline)
        if left or data not in fixed.get("dp", (data,)):
            continue
        choices = product(
            _divisors(experts or 1, gpus // pipeline, fixed.get("ep")),
            fixed.get("etp", (1,)) if experts else _divisors(1, 1, fixed.get("etp")),
            fixed.get("microbatch_size", MICROBATCH_SIZES),
            fixed.get("precision", ("bf16",)),
            fixed.get("sharding", ("optimizer", "fsdp") if pipeline == 1 else ("optimizer",)),
            fixed.get("expert_imbalance", (1.0,)),
            fixed.get("overlap", ("no", "yes") if experts else ("no",)),
        )
        for expert, expert_tensor, size, precision, sharding, imbalance, overlap in choices:
            strategy = Strategy(
                tensor=tensor,
                context=context,
                expert=expert,
                expert_tensor=expert_tensor,
                pipeline=pipeline,
                data=data,
                microbatch_size=size,
                precision=precision,
                sharding=sharding,
                expert_imbalance=imbalance,
                overlap=overlap,
            )
            if job.is_legal(strategy):
                yield strategy


def _divisors(number: int, most: int, allowed: Collection[Any] | None) -> list[int]:
    return [k for k in range(1, min(number, most) + 1) if number % k == 0 and (allowed is None or k in allowed)]


def variants(job: Job, family: Strategy, fixed: Fixed) -> Iterator[Strategy]:
    """Strategies of a family: numbers of stages on a device, each with a published schedule."""
    layers, p = len(job.model.layers), family.pipeline
    if family.overlap == "yes" and {*fixed.get("recompute", ("none",))} == {"full"}:
        return
    m = family.microbatches(job.global_batch)
    for virtual in fixed.get("vpp", range(1, MOST_VIRTUAL + 1) if p > 1 else (1,)):
        if virtual > 1 and "vpp" not in fixed:
            most = -(-layers // (p * virtual)) * virtual
            if p * virtual > layers or most > UNEVEN * layers / p or m < p:
                continue
        if p * virtual > layers + 2:
            continue
        schedules: Collection[str] = ("1f1b" if virtual == 1 else "interleaved-1f1b",)
        if family.overlap == "yes":
            schedules = job.software.with_blocks
        for name in fixed.get("schedule", schedules):
            if virtual not in CLOSED_FORMS[name] or (name == "dualpipe-v" and m < 2 * p):
                continue
            if family.overlap == "no" or (name in WITH_BLOCKS and (name != "1f1b" or p == 1)):
                yield replace(family, virtual=virtual, schedule=name)


class VocabularyLayer(NamedTuple):
    """Output layer of a model in a pipeline, with what predicts further tokens.

    It takes as long as `layers` of the model's layers. A cut evens out up to `most_layers` of them: N / (p - 1), where
    the other layers fill all other devices (Vocabulary Parallelism, arXiv 2411.05288). A step by the closed form of the
    strategy's schedule takes `last_s` with the layer on the last device, and `spread_s` with its rows and those of the
    input on all devices, where the fullest rank holds `spread_bytes`.
    """

    layers: float
    most_layers: float
    last_s: float
    spread_s: float
    spread_bytes: float


class Rater:
    """Rates strategies of a job by the closed forms of their schedules."""

    def __init__(self, job: Job, fixed: Fixed) -> None:
        self.job, self.fixed = job, fixed

    def bound_s(self, family: Strategy) -> float:
        """Seconds that no schedule, cut or placement of a family goes below."""
        costs = self.job.costs(family)
        slowdowns = self.job.slowdowns(family)
        m = family.microbatches(self.job.global_batch)
        mean = (costs.devices().sum((0, 1)) - costs.hidden(slowdowns).sum(0)) / family.pipeline
        return float((m * mean + costs.replicas(m, inf) + work(step=1)) @ slowdowns)

    def rate(self, strategy: Strategy, bound_s: float) -> Rated:
        """The cheapest form of a strategy that fits: as it is, or with full recomputation."""
        least: float = inf
        allowed = self.fixed.get("recompute", ("none", "full"))
        for recompute in ("none", "selective", "full"):
            if recompute not in allowed or (recompute == "full" and strategy.overlap == "yes"):
                continue
            tried = replace(strategy, recompute=recompute)
            held = max(self.job.held(tried), key=lambda one: one.total)
            needed = held.total * self.job.software.reserved + self.job.software.context_bytes
            if needed <= self.job.machine.facts.memory_bytes:
                seconds_by_kind = self.seconds_by_kind(tried)
                seconds = float(seconds_by_kind.sum())
                return Rated(tried, "solved", bound_s, seconds, needed, tried.schedule, seconds_by_kind)
            if needed < least:
                least, kinds = needed, vars(held)
        largest = max(kinds, key=lambda kind: kinds[kind])
        reason = f"{least / GIB:,.0f} GiB of {self.job.machine.facts.memory_bytes / GIB:,.0f}, most of it {largest}"
        return Rated(strategy, "does_not_fit", bound_s, inf, least, reason)

    def seconds_by_kind(self, strategy: Strategy) -> Work:
        """Seconds of a step by kind of work, warm-up and cool-down in their kinds."""
        slowdowns = self.job.slowdowns(strategy)
        return np.asarray(self.job.costs(strategy).step(self.job.global_batch, slowdowns) * slowdowns)

    def useful_s(self, strategy: Strategy) -> float:
        """Seconds of the model's products, attention and experts in a step, divided evenly among all GPUs."""
        mean = self.job.costs(replace(strategy, recompute="none")).devices().sum(1).mean(0)
        kinds = mean * self.job.slowdowns(strategy) * strategy.microbatches(self.job.global_batch)
        return float(sum(kinds[INDEX[kind]] for kind in ("products", "attention", "experts")))

    def vocabulary(self, strategy: Strategy) -> VocabularyLayer | None:
        """Length of the output layer, and a step with it on all devices; None without a pipeline."""
        if strategy.pipeline == 1:
            return None
        costs, slowdowns, layers = self.job.costs(strategy), self.job.slowdowns(strategy), self.job.model.layers
        layer_s = float(sum(costs.layer(one).passes.total for one in layers) @ slowdowns) / len(layers)
        ends, spread = (self.rate(replace(strategy, vocabulary=kind), 0.0) for kind in ("ends", "spread"))
        head_s = float(costs.ends()[1].total @ slowdowns)
        return VocabularyLayer(
            head_s / layer_s, len(layers) / (strategy.pipeline - 1), ends.seconds, spread.seconds, spread.memory_bytes
        )

    def hidden_s(self, rated: Rated) -> float:
        """Seconds of a step that blocks hide, in the mean of all devices."""
        one = rated.strategy
        slowdowns = self.job.slowdowns(one)
        of_a_microbatch = float(self.job.costs(one).hidden(slowdowns).mean(0) @ slowdowns)
        return one.blocks(one.microbatches(self.job.global_batch)) / one.virtual * of_a_microbatch

    def lost_s(self, rated: Rated) -> dict[str, float]:
        """Seconds of a rated strategy beyond its model's products, attention and experts, by what they go to.

        What of exchanges of experts is hidden is not lost.
        """
        assert rated.work is not None, "only rated strategies have seconds by kind"
        strategy, slowdowns = rated.strategy, self.job.slowdowns(rated.strategy)
        m = strategy.microbatches(self.job.global_batch)
        devices = self.job.costs(strategy).devices().sum(1)
        plain = self.job.costs(replace(strategy, recompute="none")).devices().sum(1)
        mean = float(devices.mean(0) @ slowdowns)
        pipeline = float(rated.work[INDEX["pipeline"]])
        once = sum(float(rated.work[INDEX[kind]]) for kind in ("data", "gather", "optimizer", "step"))
        hidden = self.hidden_s(rated)
        lost = {"bubble": rated.seconds - pipeline - once - (m * mean - hidden)}
        lost["recomputation"] = m * (mean - float(plain.mean(0) @ slowdowns))
        kinds = plain.mean(0) * slowdowns * m
        for kind in ("memory", "tensor", "expert", "context", "launch"):
            lost[kind] = float(kinds[INDEX[kind]])
        lost["expert"] -= hidden
        for kind in ("pipeline", "data", "gather", "optimizer", "step"):
            lost[kind] = float(rated.work[INDEX[kind]])
        return lost


def rate_all(job: Job, gpus: int, fixed: Fixed) -> Iterator[list[Rated]]:
    """Rate every legal strategy, the most promising family first; yields a family at a time.

    A family whose bound is above the best value so far is beaten.
    """
    rater, best_s = Rater(job, fixed), inf
    found = [(rater.bound_s(family), family) for family in families(job, gpus, fixed)]
    for bound_s, family in sorted(found, key=lambda one: one[0]):
        group = []
        for strategy in variants(job, family, fixed):
            if bound_s > best_s:
                group.append(Rated(strategy, "beaten", bound_s, reason=at_least_slower(bound_s, best_s)))
                continue
            rated = rater.rate(strategy, bound_s)
            best_s = min(best_s, rated.seconds)
            group.append(rated)
        yield group
