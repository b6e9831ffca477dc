"""A plan as a trainer is to run it: the model, all parallel sizes, the stages, and the nearest that its orders come.

A plan of `optpipe plan MODEL --gpus N` (`optpipe.plan/1`) has a schedule that was searched, or a published one alone.
Most trainers run 1F1B or interleaved 1F1B with all activations treated alike: `Launch.in_loops` is what they run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, isclose
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field

from optpipe.cluster.costs import CostModel
from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import Model, named_models, read_model
from optpipe.cluster.rules import Rules
from optpipe.cluster.strategy import Offload, Overlap, Precision, Recompute, Sharding, Strategy, Vocabulary
from optpipe.document import Document
from optpipe.errors import InputError, Issue
from optpipe.export.megatron_layout import layout_text
from optpipe.mode_names import KEPT, OFFLOAD
from optpipe.units import bytes_text, count_text, time_text

IN_LOOPS = {"1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B"}
"""Orders that every trainer has, by the names of published schedules."""
LARGEST_HOST = 16
"""Most GPUs of a host; a machine of more in one NVLink domain has hosts of `GPUS_OF_A_TRAY`."""
GPUS_OF_A_TRAY = 4


Size = Annotated[int, Field(ge=1, le=2**40)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(Document):
    """Part of a plan; fields that launching does not need are not read."""

    model_config = ConfigDict(extra="ignore")


class Published(_Part):
    """The published schedule in closed form by which the strategy was rated: it fits."""

    schedule: str
    vpp: Size
    cut: list[Size]
    recompute: Recompute
    seconds: Seconds


class InOrder(_Part):
    """The plan's cut in the order of 1F1B or interleaved 1F1B: the nearest that all activations are treated alike."""

    activations: str
    overlap: Overlap = "no"
    seconds: Seconds
    short_bytes: int = Field(ge=0)


class Activations(_Part):
    """Activations of a step, over stages and microbatches."""

    all: Size
    offloaded: int = Field(ge=0)
    recomputed: int = Field(ge=0)


class Best(_Part):
    """The strategy to take."""

    tp: Size
    cp: Size
    ep: Size
    etp: Size
    dp: Size
    pp: Size
    vpp: Size
    microbatch_size: Size
    sharding: Sharding
    recompute: Recompute
    precision: Precision
    overlap: Overlap = "no"
    offload: Offload = "no"
    vocabulary: Vocabulary = "last"
    schedule: str
    seconds: Seconds
    placement: str
    cut: list[Size]
    schedule_file: str | None
    published: Published
    activations: Activations | None = None
    in_1f1b: InOrder | None = None


class PlanDocument(_Part):
    """Part of a plan that launching needs."""

    format: Literal["optpipe.plan/1"]
    model: str
    config: dict[str, Any]
    machine: str
    gpus_per_node: Size
    gpus: Size
    software: str = ""
    sequence: Size
    global_batch: Size
    best: Best | None


@dataclass(frozen=True)
class Pipeline:
    """Stages and order of a trainer. `cut`: layers of each stage, the embedding and the head among them.

    `overlap`: exchanges of experts hide behind compute of other microbatches. `recut`: why the plan's cut is not taken,
    empty where it is.
    """

    cut: Sequence[int]
    order: str
    recompute: Recompute
    offload: bool
    overlap: bool
    seconds: float
    recut: str = ""


class Untimed(str):
    """Sentence on what a trainer does otherwise than planned, and what it changes of a step's time is not predicted."""

    __slots__ = ()


def no_offload(why: str) -> Issue:
    """A plan with offload of all activations where none is run, and why."""
    return Issue("best.offload", "cannot_run", f"is yes, but {why}. Maybe plan with --offload no.")


@dataclass(frozen=True)
class Launch:
    """A plan to be launched."""

    plan: PlanDocument
    best: Best
    model: Model
    strategy: Strategy

    @classmethod
    def of(cls, plan: Mapping[str, Any], source: str = "") -> Self:
        """Read a plan. Raises InputError for another document, a plan of nothing, and one that breaks a rule."""
        read = PlanDocument.from_data(plan, source)
        best = read.best
        if best is None:
            detail = "is null: no strategy of this plan fits. Maybe plan for more GPUs."
            raise InputError([Issue("best", "nothing_fits", detail)], source)
        if best.vocabulary == "spread":
            detail = "is spread, but no trainer except optpipe train runs the passes of an output layer on all devices."
            raise InputError([Issue("best.vocabulary", "cannot_run", f"{detail} Maybe --vocabulary last,own.")], source)
        model = read_model(read.config, read.model, source)
        for name, cut, virtual in (
            ("cut", best.cut, best.vpp),
            ("published.cut", best.published.cut, best.published.vpp),
        ):
            layers = len(model.stack) + 2
            if len(cut) != best.pp * virtual or sum(cut) != layers:
                detail = (
                    f"has {sum(cut)} layers in {len(cut)} stages, but pp x vpp = {best.pp * virtual} stages divide "
                    f"{layers} layers, embedding and head included. Maybe plan again."
                )
                raise InputError([Issue(f"best.{name}", "other_layers", detail)], source)
        strategy = Strategy(
            tensor=best.tp,
            context=best.cp,
            expert=best.ep,
            expert_tensor=best.etp,
            pipeline=best.pp,
            virtual=best.vpp,
            data=best.dp,
            microbatch_size=best.microbatch_size,
            precision=best.precision,
            sharding=best.sharding,
            overlap=best.overlap,
            offload=best.offload,
        )
        Rules(model, read.gpus, read.gpus_per_node, read.sequence, read.global_batch).require(strategy)
        return cls(read, best, model, strategy)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step in each replica."""
        return self.strategy.microbatches(self.plan.global_batch)

    @property
    def has_experts(self) -> bool:
        """True if a layer has experts."""
        return any(layer.feed_forward.experts for layer in self.model.layers)

    @property
    def hub_name(self) -> str:
        """Name of the model on the Hugging Face hub; empty where the plan has its configuration alone."""
        config = named_models().get(self.plan.model)
        if config != self.plan.config:
            return ""
        name, _, where = str(config.get("source", "")).partition(", ")
        return name if where == "config.json on the Hugging Face hub" else ""

    @property
    def _most_on_host(self) -> int:
        """GPUs of a host, of those that the plan has."""
        node = self.plan.gpus_per_node
        return min(node if node <= LARGEST_HOST else GPUS_OF_A_TRAY, self.plan.gpus)

    @property
    def host_gpus(self) -> int:
        """Processes of each host: as many everywhere, and whole groups of tensor parallelism if a host has room."""
        equal = [count for count in range(1, self._most_on_host + 1) if self.plan.gpus % count == 0]
        return max([count for count in equal if count % self.best.tp == 0] or equal)

    def lost_on_hosts(self) -> Iterator[str]:
        """Sentence on GPUs that are left over, since torchrun starts as many processes on every host."""
        most, used, node = self._most_on_host, self.host_gpus, self.plan.gpus_per_node
        if used == most:
            return
        sentence = (
            f"hosts: {most - used} of the {most} GPUs of each are not used, since torchrun starts as many processes "
            f"everywhere: {self.plan.gpus // used:,} hosts of {used}"
        )
        best, stage = self.best, self.plan.gpus // self.best.pp
        neighbours = (best.tp, best.tp * best.cp, best.ep, stage, 2 * stage if best.pp > 1 else 1)
        apart = node <= LARGEST_HOST and any(used < ranks <= node for ranks in neighbours)
        yield Untimed(f"{sentence}; ranks that the plan has on one node are on several") if apart else sentence

    def title(self, cut: Sequence[int]) -> str:
        """Sentence on the job, with all degrees, cut so."""
        plan, virtual = self.plan, len(cut) // self.best.pp
        degrees = [f"{axis}{getattr(self.best, axis)}" for axis in ("tp", "cp", "ep", "etp", "dp", "pp")]
        return (
            f"{plan.model} on {plan.gpus:,} {plan.machine}, sequences of {plan.sequence:,} tokens, "
            f"{plan.global_batch:,} a step: {' '.join(degrees)} vpp{virtual}."
        )

    def in_loops(self, *, offloads: bool = True, cuts_prediction: bool = True) -> Pipeline:
        """The nearest in the order of 1F1B or interleaved 1F1B, with stages in loops over the devices.

        The plan's own cut where it has room in this order, of trainers without offload where nothing leaves; else, or
        if that is faster, the even cut of the published schedule. `cuts_prediction`: the trainer may have layers of
        multi-token prediction in a stage of their own, though all in one. Raises InputError where the strategy has no
        schedule with stages in loops.
        """
        best, published = self.best, self.best.published
        fixed = best.in_1f1b
        published_s = published.seconds if published.schedule in IN_LOOPS else inf
        recut = self._recut(fixed, published_s, offloads=offloads, cuts_prediction=cuts_prediction)
        if fixed is not None and not recut:
            recompute: Recompute = "none" if fixed.activations in (KEPT, OFFLOAD) else "full"
            order = "interleaved-1f1b" if best.vpp > 1 else "1f1b"
            offload, overlap = fixed.activations == OFFLOAD, fixed.overlap == "yes"
            return self._checked(Pipeline(best.cut, order, recompute, offload, overlap, fixed.seconds))
        if published.schedule not in IN_LOOPS:
            detail = f"is {published.schedule}, and this trainer runs 1F1B and interleaved 1F1B alone. Maybe plan with "
            detail += "--schedule 1f1b,interleaved-1f1b."
            raise InputError([Issue("best.published.schedule", "cannot_run", detail)])
        overlap, offload = best.overlap == "yes", best.offload == "yes"
        if offload and not offloads:
            raise InputError([no_offload("this trainer has none")])
        return self._checked(
            Pipeline(published.cut, published.schedule, published.recompute, offload, overlap, published.seconds, recut)
        )

    def _recut(self, fixed: InOrder | None, published_s: float, *, offloads: bool, cuts_prediction: bool) -> str:
        """Why the plan's cut cannot be run in 1F1B or interleaved 1F1B, or is slower than the even one; else empty."""
        if fixed is None:
            return "its stages are on a V (plan with --schedule 1f1b,interleaved-1f1b for others)"
        predicted = self.stages_of_prediction(self.best.cut)
        if cuts_prediction and len(set(predicted)) > 1:
            return "its layers of multi-token prediction are in several stages"
        if not cuts_prediction and any(predicted.count(stage) == self.best.cut[stage] for stage in predicted):
            return "a stage of it has multi-token prediction alone"
        if fixed.short_bytes:
            return f"a device lacks {bytes_text(fixed.short_bytes)} with it in this order"
        if fixed.seconds > published_s:
            return f"with it a step takes {time_text(fixed.seconds * 1e6)} in this order"
        return "" if offloads or fixed.activations != OFFLOAD else "it needs offload in this order"

    def stages_of_prediction(self, cut: Sequence[int]) -> list[int]:
        """Stage of each layer of multi-token prediction."""
        first, ends = 1 + len(self.model.layers), [*accumulate(cut)]
        return [bisect_right(ends, first + token) for token in range(self.model.predicted_tokens)]

    def _checked(self, runs: Pipeline) -> Pipeline:
        """The pipeline. Raises InputError for interleaved 1F1B of fewer microbatches than devices, and for blocks with
        more layers of multi-token prediction than Megatron-Core takes."""
        if len(runs.cut) > self.best.pp > self.microbatches:
            detail = (
                f"is {self.best.pp}, but a step has {self.microbatches} microbatches, and interleaved 1F1B needs as"
            )
            detail += " many. Maybe plan with --vpp 1, or a smaller --pp or --dp."
            raise InputError([Issue("best.pp", "cannot_run", detail)])
        if runs.overlap and self.model.predicted_tokens > (self.best.pp > 1):
            detail = (
                f"is yes, but with it {count_text(self.best.pp, 'device')} of a pipeline take at most "
                f"{int(self.best.pp > 1)} layers of multi-token prediction, and the model has "
                f"{self.model.predicted_tokens}. Maybe plan with --overlap no."
            )
            raise InputError([Issue("best.overlap", "cannot_run", detail)])
        return runs

    def layout(self, cut: Sequence[int]) -> str:
        """Layout string of Megatron-LM of a cut."""
        return layout_text(cut, predicted=self.model.predicted_tokens)

    def modules(self, cut: Sequence[int], names: tuple[str, str, str, str]) -> list[list[str]]:
        """Modules of each stage by the names of embedding, layers, last norm and head.

        Those of multi-token prediction are left out. Raises InputError for a stage of nothing else.
        """
        embedding, layers, norm, head = names
        numbers = range(len(self.model.layers))
        every = iter([embedding, *(f"{layers}.{k}" for k in numbers), *[""] * self.model.predicted_tokens, head])
        stages = [[module for _ in range(size) if (module := next(every))] for size in cut]
        if [] in stages:
            detail = (
                f"gives stage {stages.index([])} multi-token prediction alone, which this trainer does not cut off."
            )
            raise InputError([Issue("best.cut", "cannot_run", f"{detail} Maybe plan with --vocabulary last.")])
        stages[-1].insert(-1, norm)
        return stages

    def published_s(self, precision: Precision) -> float | None:
        """Predicted seconds of the published schedule with products in this precision.

        None unless the machine of that name gives the plan's own figure: a plan holds no rates of a user's own.
        """
        best, published = self.best, self.best.published
        machine = named_machines().get(self.plan.machine)
        if machine is None:
            return None
        one = replace(
            self.strategy,
            virtual=published.vpp,
            schedule=published.schedule,
            recompute=published.recompute,
            vocabulary=best.vocabulary,
        )

        def seconds(precision: Precision) -> float:
            costs = CostModel(self.model, machine.facts, replace(one, precision=precision), self.plan.sequence)
            slowdowns = machine.efficiencies_of(precision, self.plan.software).slowdowns
            return float(costs.step(self.plan.global_batch, slowdowns) @ slowdowns)

        return seconds(precision) if isclose(seconds(best.precision), published.seconds) else None

    def in_precision(self, precision: Precision, seconds: float, where: str) -> tuple[float, str]:
        """Seconds of what runs with products in another precision than planned, `seconds` in that; and the sentence."""
        products = "16 bits" if precision == "bf16" else precision.upper()
        sentence = f"precision: products are in {products} in {where}, planned {self.best.precision}"
        other = self.published_s(precision) if seconds == self.best.published.seconds else None
        if other is None:
            return seconds, Untimed(sentence)
        step, planned = time_text(other * 1e6), time_text(seconds * 1e6)
        return other, f"{sentence}: {step} a step by the cost model, the plan's {planned} ({other / seconds - 1:+.1%})"

    def lost_by_fsdp(self) -> Iterator[str]:
        """Sentence on FSDP2 of torch, where the plan divides the optimizer's states alone."""
        if self.best.sharding == "optimizer" and self.best.dp > 1:
            yield Untimed(
                "sharding: FSDP divides weights and gradients too, and gathers weights once a step: less memory than "
                "planned, more traffic"
            )

    def lost_in_loops(self, runs: Pipeline) -> Iterator[str]:
        """Sentences on what 1F1B and interleaved 1F1B lose against the plan."""
        best = self.best
        if best.schedule_file is None:
            return
        step, planned = time_text(runs.seconds * 1e6), time_text(best.seconds * 1e6)
        yield (
            f"order: {IN_LOOPS[runs.order]} in place of the plan's {best.schedule}: {step} a step by the cost model, "
            f"the plan's {planned} ({runs.seconds / best.seconds - 1:+.1%})"
        )
        if runs.cut != best.cut:
            how = "even" if runs.cut[-1] > 1 else "even but for the output layer's own stage"
            virtual = len(runs.cut) // best.pp
            if virtual != best.vpp:
                how += f", with {count_text(virtual, 'stage')} a device in place of the plan's {best.vpp}"
            yield f"cut: {how}, since {runs.recut}"
        if best.overlap == "yes" and not runs.overlap:
            yield "overlap: no room for blocks in this order, so exchanges of experts are not hidden"
        moved = best.activations
        if moved is not None and (moved.offloaded or moved.recomputed):
            what = "offloaded" if runs.offload else "recomputed" if runs.recompute != "none" else "kept"
            yield (
                f"activations: all are {what}; of {moved.all:,} the plan offloads {moved.offloaded:,} and recomputes "
                f"{moved.recomputed:,}"
            )
