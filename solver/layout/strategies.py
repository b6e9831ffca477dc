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
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from optpipe.cluster.costs import INDEX, Work, work
from optpipe.cluster.memory import GIB
from optpipe.cluster.rules import DEGREES, MOST_DEGREE
from optpipe.cluster.strategy import Offload, Overlap, Precision, Recompute, Sharding, Strategy, Vocabulary
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
    "vocab-2": (1,),
}
"""Published schedules that are rated without being simulated, with the numbers of stages on a device that they take."""

WITH_BLOCKS = ("1f1b", "interleaved-1f1b", "dualpipe-v")
"""Those that trainers run with blocks: 1F1B on a pipeline of one device alone."""

WITH_PASSES = "vocab-2"
"""The one with the output layer's rows on all devices."""

VOCABULARY: tuple[Vocabulary, ...] = ("last", "own")
"""Places of the output layer that are tried by default: no trainer but ours runs spread passes."""

LEAST_OWN = 0.5
"""Length of the output layer, over the mean of all other stages, from which it is tried as a stage of its own."""

Objective = Literal["time", "memory"]
"""Quantity that the strategy to take has least of: seconds of a step, or bytes on its fullest rank."""

AXES = tuple(DEGREES)
FIELDS: Mapping[str, str] = {
    **DEGREES,
    **{name: name for name in ("sharding", "recompute", "precision", "overlap", "offload", "vocabulary", "schedule")},
}
"""Fields of a strategy by the names of options."""
Fixed = Mapping[str, Collection[Any]]
"""Allowed values of options that a user fixed."""
CHOICES: Mapping[str, Sequence[str]] = {
    "precision": get_args(Precision),
    "sharding": get_args(Sharding),
    "recompute": get_args(Recompute),
    "overlap": get_args(Overlap),
    "vocabulary": (*VOCABULARY, "spread"),
    "schedule": tuple(CLOSED_FORMS),
    "offload": get_args(Offload),
}
"""Values of the options that are no degrees."""
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


def require_stages(strategy: Strategy) -> None:
    """Raise InputError if the schedule is for other numbers of stages on a device, or for another output layer."""
    name, virtual, spread = strategy.schedule, strategy.virtual, strategy.vocabulary == "spread"
    has_passes = name in (WITH_PASSES, "vocab-1")
    if spread != has_passes:
        rows, place = ("on all devices", "spread") if has_passes else ("in one stage", "last")
        other = WITH_PASSES if spread else "1f1b" if virtual == 1 else "interleaved-1f1b"
        detail = f"is {name}, which has the output layer's rows {rows}, but vocabulary is {strategy.vocabulary}."
        detail += f" Maybe schedule {other}, or vocabulary {place}."
        raise InputError([Issue("schedule", "other_output_layer", detail)])
    counts = CLOSED_FORMS.get(name, (virtual,))
    if virtual not in counts:
        others = [one for one, taken in CLOSED_FORMS.items() if virtual in taken and (one == WITH_PASSES) == spread]
        instead = f", or schedule {' or '.join(others)}" if others else ""
        runs = f"vpp {counts[0]}" + (" or more" if len(counts) > 1 else "")
        detail = f"is {name}, which runs with {runs}, but vpp is {virtual}. Maybe vpp {counts[0]}{instead}."
        raise InputError([Issue("schedule", "wrong_stages", detail)])


def require_blocks(strategy: Strategy, microbatches: int) -> None:
    """Raise InputError if exchanges of experts hide in blocks that the schedule lacks, or microbatches are too few."""
    name, p = strategy.schedule, strategy.pipeline
    if strategy.overlap == "yes" and (name not in WITH_BLOCKS or (name == "1f1b" and p > 1)):
        detail = f"is {name}, which has no blocks on a pipeline of {p:,} devices, but overlap is yes. Maybe schedule "
        raise InputError([Issue("schedule", "no_blocks", f"{detail}interleaved-1f1b or dualpipe-v, or overlap no.")])
    if name == "dualpipe-v" and microbatches < 2 * p:
        detail = f"is {name}, which needs 2 x pp = {2 * p:,} microbatches, but a step has {microbatches:,}."
        raise InputError([Issue("schedule", "too_few_microbatches", f"{detail} Maybe a smaller pp or dp.")])


def read_degrees(text: str, where: str) -> dict[str, Any]:
    """Values by option of a text such as ``tp=8,pp=2``. Raises InputError; `where` names the text in it."""
    wanted: dict[str, Any] = {}
    for name, value in read_pairs(text, where, FIELDS, "tp=8,pp=2").items():
        wanted[name] = int(value) if value.isdecimal() and len(value) <= MOST_DIGITS else value
        check_values(name, [wanted[name]], where)
    return wanted


def strategy_of(values: Mapping[str, Any]) -> Strategy:
    """The strategy with these values by option, and the plainest of others: plans of earlier versions lack some."""
    return Strategy(**{FIELDS[name]: value for name, value in values.items()})


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
        choices = (
            *(one.recompute != "none", one.sharding == "fsdp", one.overlap == "yes", one.offload == "yes"),
            one.vocabulary != "last",
        )
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
        parts += ["offload"] if self.strategy.offload == "yes" else []
        parts += [f"{self.strategy.vocabulary} head"] if self.strategy.vocabulary != "last" else []
        return " ".join(parts) or "one GPU"


def vocabulary_of(fixed: Fixed) -> Collection[Any]:
    """Places of the output layer that are tried; its rows lie on all devices where a user asks for that."""
    asked = WITH_PASSES in fixed.get("schedule", ())
    return fixed.get("vocabulary", (*VOCABULARY, "spread") if asked else VOCABULARY)


def families(job: Job, gpus: int, fixed: Fixed) -> Iterator[Strategy]:
    """Legal strategies of a job with one stage on each device of the pipeline and no recomputation.

    One family has all cuts with the output layer in the last stage, one has its rows on all devices.
    """
    vocabulary = vocabulary_of(fixed)
    kinds: dict[Vocabulary, None] = {"spread" if kind == "spread" else "last": None for kind in vocabulary}
    heads = min(layer.attention.heads for layer in job.model.layers)
    experts = max(layer.feed_forward.experts for layer in job.model.layers)
    pipelines = _divisors(gpus, job.model.most_stages, fixed.get("pp"))
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
            fixed.get("offload", ("no",)),
            kinds,
        )
        for expert, expert_tensor, size, precision, sharding, imbalance, overlap, offload, kind in choices:
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
                offload=offload,
                vocabulary=kind,
            )
            if job.is_legal(strategy):
                yield strategy


def _divisors(number: int, most: int, allowed: Collection[Any] | None) -> list[int]:
    return [k for k in range(1, min(number, most) + 1) if number % k == 0 and (allowed is None or k in allowed)]


def variants(job: Job, family: Strategy, fixed: Fixed) -> Iterator[Strategy]:
    """Strategies of a family: numbers of stages on a device, each with a published schedule and place of the head."""
    layers, p, spread = len(job.model.stack), family.pipeline, family.vocabulary == "spread"
    vocabulary = [kind for kind in vocabulary_of(fixed) if (kind == "spread") == spread and (kind != "own" or p > 1)]
    head = _head_in_layers(job, family) if "own" in vocabulary and "vocabulary" not in fixed else inf
    if family.overlap == "yes" and {*fixed.get("recompute", ("none",))} == {"full"}:
        return
    m = family.microbatches(job.global_batch)
    for virtual in fixed.get("vpp", range(1, MOST_VIRTUAL + 1) if p > 1 else (1,)):
        if virtual > 1 and "vpp" not in fixed:
            most = -(-layers // (p * virtual)) * virtual
            if p * virtual > layers or most > UNEVEN * layers / p or m < p:
                continue
        if p * virtual > job.model.most_stages - spread or (p == 1 and virtual > 1):
            continue
        schedules: Collection[str] = (WITH_PASSES if spread else "1f1b" if virtual == 1 else "interleaved-1f1b",)
        if family.overlap == "yes":
            schedules = job.software.with_blocks
        for name in fixed.get("schedule", schedules):
            if virtual not in CLOSED_FORMS[name] or (name == "dualpipe-v" and m < 2 * p):
                continue
            if (name == WITH_PASSES) != spread:
                continue
            if family.overlap == "no" or (name in WITH_BLOCKS and (name != "1f1b" or p == 1)):
                for kind in vocabulary:
                    if kind != "own" or head >= LEAST_OWN * layers / (p * virtual - 1):
                        yield replace(family, virtual=virtual, schedule=name, vocabulary=kind)


def _head_in_layers(job: Job, strategy: Strategy) -> float:
    """Decoder layers that take as long as the output layer does for all predicted tokens."""
    costs, slowdowns, layers = job.costs(strategy), job.slowdowns(strategy), job.model.layers
    kinds = costs.parts.layers.sum(1) @ slowdowns
    layer_s = float(job.model.layers_before[len(layers)] @ kinds) / len(layers)
    return float(costs.parts.last.sum(0) @ slowdowns) / layer_s


class OutputLayer(NamedTuple):
    """Output layer of a model in a pipeline, with the losses of all predicted tokens.

    It takes as long as `layers` of the model's layers. A cut evens out up to `most_layers` of them: N / (p - 1), where
    the other layers fill all other devices (Vocabulary Parallelism, arXiv 2411.05288). `rated`: by its place, the
    strategy with a published schedule of as many stages, or of one a device where its rows lie on all devices.
    """

    layers: float
    most_layers: float
    rated: Mapping[Vocabulary, Rated]

    @property
    def may_be_spread(self) -> bool:
        """True if rows on all devices may pay: no cut evens the layer out, or the published schedule is faster so."""
        spread_s = self.rated["spread"].seconds if "spread" in self.rated else inf
        whole_s = min(self.rated[place].seconds for place in VOCABULARY)
        return self.layers > self.most_layers or spread_s < whole_s


class Rater:
    """Rates strategies of a job: time by the closed forms of their schedules, memory at the peaks of these."""

    def __init__(self, job: Job, fixed: Fixed, objective: Objective = "time") -> None:
        self.job, self.fixed, self.objective = job, fixed, objective

    def bound_s(self, family: Strategy) -> float:
        """Seconds that no schedule, cut or placement of a family goes below."""
        costs = self.job.costs(family)
        slowdowns = self.job.slowdowns(family)
        m = family.microbatches(self.job.global_batch)
        mean = (costs.devices().sum((0, 1)) - costs.hidden(slowdowns).sum(0)) / family.pipeline
        return float((m * mean + costs.replicas(m, inf) + work(step=1)) @ slowdowns)

    def rate(self, strategy: Strategy, bound_s: float) -> Rated:
        """The form of a strategy that fits and has least of the objective: as it is, or with recomputation."""
        least: float = inf
        found: Rated | None = None
        allowed = self.fixed.get("recompute", ("none", "full"))
        for recompute in ("none", "selective", "full"):
            if recompute not in allowed or (recompute == "full" and strategy.overlap == "yes"):
                continue
            tried = replace(strategy, recompute=recompute)
            held = max(self.job.held(tried), key=lambda one: one.total)
            needed = held.total * self.job.software.reserved + self.job.software.context_bytes
            if needed <= self.job.machine.facts.memory_bytes:
                if found is None or needed < found.memory_bytes:
                    seconds_by_kind = self.seconds_by_kind(tried)
                    seconds = float(seconds_by_kind.sum()) + self.job.copies_s(tried)
                    found = Rated(tried, "solved", bound_s, seconds, needed, tried.schedule, seconds_by_kind)
                if self.objective == "time":
                    return found
            elif needed < least:
                least, kinds = needed, vars(held)
        if found is not None:
            return found
        largest = max(kinds, key=lambda kind: kinds[kind])
        reason = f"{least / GIB:,.0f} GiB of {self.job.machine.facts.memory_bytes / GIB:,.0f}, most of it {largest}"
        return Rated(strategy, "does_not_fit", bound_s, inf, least, reason)

    def seconds_by_kind(self, strategy: Strategy) -> Work:
        """Seconds of a step by kind of work, warm-up and cool-down in their kinds."""
        slowdowns = self.job.slowdowns(strategy)
        return np.asarray(self.job.costs(strategy).step(self.job.global_batch, slowdowns) * slowdowns)

    def output_layer(self, strategy: Strategy) -> OutputLayer | None:
        """Length of the output layer, and the strategy with it in every legal place; None without a pipeline."""
        if strategy.pipeline == 1:
            return None
        p, layers = strategy.pipeline, len(self.job.model.stack)
        plain = replace(strategy, recompute="none", stage_layers=())
        if strategy.vocabulary == "spread":
            plain = replace(plain, virtual=1, schedule="1f1b")
        places = {kind: replace(plain, vocabulary=kind) for kind in VOCABULARY}
        places["spread"] = replace(plain, vocabulary="spread", virtual=1, schedule=WITH_PASSES)
        rated = {kind: self.rate(one, self.bound_s(one)) for kind, one in places.items() if self.job.is_legal(one)}
        return OutputLayer(_head_in_layers(self.job, plain), layers / (p - 1), rated)

    def hidden_s(self, rated: Rated) -> float:
        """Seconds of a step that blocks hide, in the mean of all devices."""
        one = rated.strategy
        slowdowns = self.job.slowdowns(one)
        of_a_microbatch = float(self.job.costs(one).hidden(slowdowns).mean(0) @ slowdowns)
        return one.blocks(one.microbatches(self.job.global_batch)) / one.virtual * of_a_microbatch

    def lost_s(self, rated: Rated) -> dict[str, float]:
        """Seconds of a rated strategy beyond its model's products, attention and experts, by what they go to.

        Hidden exchanges of experts are not lost, nor are messages for which a searched schedule has no idle time.
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
        copies = self.job.copies_s(strategy)
        idle = rated.seconds - once - copies - (m * mean - hidden)
        pipeline = min(pipeline, max(idle, 0.0))
        lost = {"bubble": idle - pipeline, "offload": copies}
        lost["recomputation"] = m * (mean - float(plain.mean(0) @ slowdowns))
        kinds = plain.mean(0) * slowdowns * m
        for kind in ("memory", "tensor", "expert", "context", "launch"):
            lost[kind] = float(kinds[INDEX[kind]])
        lost["expert"] -= hidden
        lost["pipeline"] = pipeline
        for kind in ("data", "gather", "optimizer", "step"):
            lost[kind] = float(rated.work[INDEX[kind]])
        return lost


def rate_all(job: Job, gpus: int, fixed: Fixed, objective: Objective = "time") -> Iterator[list[Rated]]:
    """Rate every legal strategy, the most promising family first; yields a family at a time.

    A family whose bound is above the best value so far is beaten, unless memory is the objective.
    """
    rater, best_s = Rater(job, fixed, objective), inf
    found = [(rater.bound_s(family), family) for family in families(job, gpus, fixed)]
    for bound_s, family in sorted(found, key=lambda one: one[0]):
        group = []
        for strategy in variants(job, family, fixed):
            if bound_s > best_s:
                group.append(Rated(strategy, "beaten", bound_s, reason=at_least_slower(bound_s, best_s)))
                continue
            rated = rater.rate(strategy, bound_s)
            best_s = min(best_s, rated.seconds) if objective == "time" else inf
            group.append(rated)
        yield group
