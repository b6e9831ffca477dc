"""A plan as a trainer is to run it: the model, all parallel sizes, the stages, and the nearest that its orders come.

A plan of `optpipe plan MODEL --gpus N` (`optpipe.plan/1`) has a schedule that was searched, or a published one alone.
Most trainers run 1F1B or interleaved 1F1B with all activations treated alike: `Launch.in_loops` is what they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field

from optpipe.cluster.model import Model, named_models, read_model
from optpipe.cluster.strategy import Overlap, Precision, Recompute, Sharding, Strategy, require_legal
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
    sequence: Size
    global_batch: Size
    best: Best | None


@dataclass(frozen=True)
class Pipeline:
    """Stages and order of a trainer. `cut`: layers of each stage, the embedding and the head among them.

    `overlap`: exchanges of experts hide behind compute of other microbatches.
    """

    cut: Sequence[int]
    order: str
    recompute: Recompute
    offload: bool
    overlap: bool
    seconds: float


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
        model = read_model(read.config, read.model, source)
        for name, cut, virtual in (
            ("cut", best.cut, best.vpp),
            ("published.cut", best.published.cut, best.published.vpp),
        ):
            layers = len(model.layers) + 2
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
        )
        require_legal(strategy, model, read.gpus, read.gpus_per_node, read.sequence, read.global_batch)
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
    def host_gpus(self) -> int:
        """GPUs of a host."""
        node = self.plan.gpus_per_node
        return min(node if node <= LARGEST_HOST else GPUS_OF_A_TRAY, self.plan.gpus)

    def title(self, cut: Sequence[int]) -> str:
        """Sentence on the job, with all degrees, cut so."""
        plan, virtual = self.plan, len(cut) // self.best.pp
        degrees = [f"{axis}{getattr(self.best, axis)}" for axis in ("tp", "cp", "ep", "etp", "dp", "pp")]
        return (
            f"{plan.model} on {plan.gpus:,} {plan.machine}, sequences of {plan.sequence:,} tokens, "
            f"{plan.global_batch:,} a step: {' '.join(degrees)} vpp{virtual}."
        )

    def in_loops(self, *, offloads: bool = True) -> Pipeline:
        """The nearest in the order of 1F1B or interleaved 1F1B, with stages in loops over the devices.

        The plan's own cut where it has room in this order, of trainers without offload where nothing leaves; else, or
        if that is faster, the even cut of the published schedule. Raises InputError where the strategy has no schedule
        with stages in loops.
        """
        best, published = self.best, self.best.published
        fixed = best.in_1f1b
        published_s = published.seconds if published.schedule in IN_LOOPS else inf
        has_room = fixed is not None and not fixed.short_bytes and (offloads or fixed.activations != OFFLOAD)
        if fixed is not None and has_room and fixed.seconds <= published_s:
            recompute: Recompute = "none" if fixed.activations in (KEPT, OFFLOAD) else "full"
            order = "interleaved-1f1b" if best.vpp > 1 else "1f1b"
            offload, overlap = fixed.activations == OFFLOAD, fixed.overlap == "yes"
            return self._checked(Pipeline(best.cut, order, recompute, offload, overlap, fixed.seconds))
        if published.schedule not in IN_LOOPS:
            detail = f"is {published.schedule}, and this trainer runs 1F1B and interleaved 1F1B alone. Maybe plan with "
            detail += "--schedule 1f1b,interleaved-1f1b"
            detail += ", or export --to torchtitan, which runs the plan's own order." if best.schedule_file else "."
            raise InputError([Issue("best.published.schedule", "cannot_run", detail)])
        overlap = best.overlap == "yes"
        return self._checked(
            Pipeline(published.cut, published.schedule, published.recompute, False, overlap, published.seconds)
        )

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
        """Modules of each stage by the names of embedding, layers, last norm and head."""
        embedding, layers, norm, head = names
        every = iter([embedding, *(f"{layers}.{k}" for k in range(len(self.model.layers))), head])
        stages = [[next(every) for _ in range(size)] for size in cut]
        stages[-1].insert(-1, norm)
        return stages

    def lost_by_fsdp(self) -> Iterator[str]:
        """Sentence on FSDP2 of torch, where the plan divides the optimizer's states alone."""
        if self.best.sharding == "optimizer" and self.best.dp > 1:
            yield (
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
            why = "its stages are on a V (plan with --schedule 1f1b,interleaved-1f1b for others)"
            if (fixed := best.in_1f1b) is not None:
                why = "it needs offload in this order"
                if fixed.short_bytes:
                    why = f"a device lacks {bytes_text(fixed.short_bytes)} with it in this order"
                elif fixed.seconds > runs.seconds:
                    why = f"with it a step takes {time_text(fixed.seconds * 1e6)} in this order"
            stages = count_text(len(runs.cut) // best.pp, "stage")
            yield f"cut: even, with {stages} a device in place of the plan's {best.vpp}, since {why}"
        if best.overlap == "yes" and not runs.overlap:
            yield "overlap: no room for blocks in this order, so exchanges of experts are not hidden"
        moved = best.activations
        if moved is not None and (moved.offloaded or moved.recomputed):
            what = "offloaded" if runs.offload else "recomputed" if runs.recompute != "none" else "kept"
            yield (
                f"activations: all are {what}; of {moved.all:,} the plan offloads {moved.offloaded:,} and recomputes "
                f"{moved.recomputed:,}"
            )
