"""Strategies: how a training job is spread over GPUs, which of them are legal, and what each rank then holds.

Ranks are numbered as Megatron-LM and torchtitan do it: tensor parallel innermost, then context, data and pipeline. So
`tensor * context` neighbours share a layer, and a stage of the pipeline is a block of `gpus / pipeline` ranks. Experts
are spread over the same ranks anew (folding): `expert_tensor` innermost, then `expert`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from optpipe.cluster.model import Model
from optpipe.errors import InputError, Issue

Sharding = Literal["none", "optimizer", "fsdp"]
"""Which of a replica's states are divided among replicas: nothing, the optimizer's, or all with weights gathered."""
Recompute = Literal["none", "selective", "full"]
"""Parts of a layer that are computed again in B: none, the core of attention, or all."""
Precision = Literal["bf16", "fp8", "fp4"]
"""Type of the operands of matrix products; attention, head and router are computed in 16 bits."""

Overlap = Literal["no", "yes"]
"""Exchanges of experts wait, or hide behind compute of another microbatch: F and backward run as blocks."""

Vocabulary = Literal["ends", "spread", "balanced"]
"""Place of embedding and head: first and last stage, divided among all devices of the pipeline (Vocabulary Parallelism,
2411.05288), or on their stages with as many layers less as make all equal."""

V_SHAPED = ("zb-v", "v-half", "v-min", "v-zb", "dualpipe-v")
"""Schedules in which the stages of a device are on a V (Controllable Memory, 2405.15362, section 4)."""


@dataclass(frozen=True)
class Strategy:
    """Degrees of parallelism of a job, and how a replica runs. `virtual`: stages on each device of the pipeline.

    `stages_layers`: decoder layers of each stage in order; empty: as evenly as possible, first and last stage least.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    microbatch_size: int = 1
    precision: Precision = "bf16"
    sharding: Sharding = "optimizer"
    recompute: Recompute = "none"
    schedule: str = "1f1b"
    overlap: Overlap = "no"
    vocabulary: Vocabulary = "ends"
    sequence_parallel: bool = True
    """Norms and residuals divide the tokens where tensor parallelism divides the rest (2205.05198, section 4.2.2)."""
    stage_layers: tuple[int, ...] = ()
    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts over the mean."""

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def is_v_shaped(self) -> bool:
        """True if the second stage of each device is the opposite of the first."""
        return self.schedule in V_SHAPED and self.virtual == 2

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline * self.virtual

    @property
    def share_of_layer(self) -> tuple[object, ...]:
        """Choices that decide the work of a layer on one GPU."""
        degrees = self.tensor, self.context, self.expert, self.expert_tensor, self.microbatch_size
        return *degrees, self.precision, self.recompute, self.sequence_parallel, self.expert_imbalance

    @property
    def expert_data(self) -> int:
        """Replicas of each expert."""
        return max(1, self.gpus // (self.expert * self.expert_tensor * self.pipeline))

    def microbatches(self, global_batch: int) -> int:
        """Microbatches of a step in each replica."""
        return global_batch // (self.data * self.microbatch_size)

    def blocks(self, microbatches: int) -> int:
        """Blocks of F and backward on the path through the last device of the pipeline, in passes of a stage.

        Megatron-LM's warm-up has a forward more, so that the two ops of a block are of different microbatches.
        """
        apart = 2 * self.pipeline if self.is_v_shaped else (self.virtual - 1) * self.pipeline
        return max(0, microbatches * self.virtual - apart - 1) if self.overlap == "yes" else 0

    def layers_of_stages(self, model: Model) -> tuple[int, ...]:
        """Number of decoder layers of each stage."""
        return self.stage_layers or even_stages(len(model.layers), self.stages)


def layers_on_devices(strategy: Strategy, model: Model) -> NDArray[np.int64]:
    """How many layers of each distinct kind each device of the pipeline has: shape (p, kinds)."""
    ends = np.cumsum((0, *strategy.layers_of_stages(model)))
    chunks = np.diff(model.layers_before[ends], axis=0).reshape(strategy.virtual, strategy.pipeline, -1)
    if strategy.is_v_shaped:
        chunks = np.stack([chunks[0], chunks[1, ::-1]])
    return np.asarray(chunks.sum(0))


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as can be; the last stage, which has the head, and the first have least."""
    base, more = divmod(layers, stages)
    order = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
    with_more = set(order[:more])
    return tuple(base + (stage in with_more) for stage in range(stages))


def require_legal(
    strategy: Strategy, model: Model, gpus: int, gpus_per_node: int, sequence: int, global_batch: int
) -> None:
    """Raise InputError with every rule that a strategy breaks, and the nearest legal values."""
    if faults := list(_faults(strategy, model, gpus, gpus_per_node, sequence, global_batch)):
        raise InputError(faults)


def _faults(
    strategy: Strategy, model: Model, gpus: int, gpus_per_node: int, sequence: int, global_batch: int
) -> Iterator[Issue]:
    one = strategy
    heads = min(layer.attention.heads for layer in model.layers)
    experts = max(layer.feed_forward.experts for layer in model.layers)
    shared = one.tensor * one.context * one.pipeline
    if shared * one.data != gpus:
        detail = f"makes dp x tp x cp x pp = {shared * one.data:,} GPUs but there are {gpus:,}."
        if gpus % shared == 0:
            detail += f" Maybe dp {gpus // shared}."
        else:
            detail += f" tp x cp x pp is {shared}. Maybe pp {_nearest(one.pipeline, gpus)}."
        yield Issue("dp", "wrong_product", detail)
    if heads % one.tensor:
        detail = (
            f"is {one.tensor} but must divide the {heads} heads. Maybe {_nearest(one.tensor, heads, gpus_per_node)}."
        )
        yield Issue("tp", "does_not_divide", detail)
    if one.tensor > gpus_per_node:
        detail = f"is {one.tensor} but a node has {gpus_per_node} GPUs. Maybe {_nearest(gpus_per_node, heads)}."
        yield Issue("tp", "too_large", detail)
    parts = (2 if one.context > 1 else 1) * one.tensor * one.context
    if sequence % parts:
        rule = "2 x tp x cp" if one.context > 1 else "tp"
        detail = f"is {one.context}: {rule} = {parts} must divide the sequence of {sequence:,} tokens."
        yield Issue(
            "cp", "does_not_divide", f"{detail} Maybe {_nearest(one.context, sequence // (2 * one.tensor) or 1)}."
        )
    if one.expert_imbalance != 1 and not experts:
        detail = f"is {one.expert_imbalance:g} but {model.name} has no experts. Maybe leave it out."
        yield Issue("expert_imbalance", "meaningless", detail)
    if one.expert > 1 and not experts:
        yield Issue("ep", "meaningless", f"is {one.expert} but {model.name} has no experts. Maybe leave it out.")
    elif experts and experts % one.expert:
        detail = f"is {one.expert} but must divide the {experts} experts. Maybe {_nearest(one.expert, experts)}."
        yield Issue("ep", "does_not_divide", detail)
    needed = one.pipeline * one.expert * one.expert_tensor
    if experts and gpus % needed:
        detail = f"is {one.expert}: pp x ep x etp = {needed:,} must divide the {gpus:,} GPUs."
        fit = gpus // (one.pipeline * one.expert_tensor)
        yield Issue("ep", "too_large", detail + (f" Maybe {_nearest(one.expert, fit, experts)}." if fit else ""))
    if one.overlap == "yes" and one.expert == 1:
        yield Issue("overlap", "meaningless", "is yes but ep is 1: no exchange of experts is to be hidden. Maybe no.")
    if one.overlap == "yes" and one.recompute == "full":
        detail = "is yes but all layers are recomputed, within which trainers run no blocks. Maybe --recompute none."
        yield Issue("overlap", "cannot_run", detail)
    if global_batch % (one.data * one.microbatch_size):
        each = one.data * one.microbatch_size
        near = max(1, round(global_batch / each)) * each
        detail = f"is {global_batch:,} but dp x microbatch size = {each:,} must divide it. Maybe {near:,}."
        yield Issue("global_batch", "does_not_divide", detail)
    layers = one.layers_of_stages(model)
    if sum(layers) != len(model.layers) or len(layers) != one.stages:
        detail = (
            f"have {sum(layers)} layers in {len(layers)} stages but {len(model.layers)} in {one.stages} are needed."
        )
        yield Issue("stage_layers", "wrong_sum", detail)
    if one.stages > len(model.layers) + 2:  # embedding and head may have a stage of their own
        most = len(model.layers) + 2
        detail = f"is {one.pipeline}, with {one.virtual} stages a device, but {len(model.layers)} layers, embedding and"
        yield Issue("pp", "too_many_stages", f"{detail} head fill {most} stages. Maybe {min(one.pipeline, most)}.")


def _nearest(value: int, number: int, most: int | None = None) -> int:
    """The divisor of `number` nearest to `value`, and at most `most`."""
    divisors = [k for k in range(1, min(number, most or number, 100_000) + 1) if number % k == 0]
    return min(divisors, key=lambda k: (abs(k - value), -k))
