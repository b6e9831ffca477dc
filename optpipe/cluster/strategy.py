"""Strategies: how a training job is spread over GPUs.

Ranks are numbered as Megatron-LM and torchtitan do it: tensor parallel innermost, then context, data and pipeline. So
`tensor * context` neighbours share a layer, and a stage of the pipeline is a block of `gpus / pipeline` ranks. Experts
are spread over the same ranks anew (folding): `expert_tensor` innermost, then `expert`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from optpipe.cluster.model import Model

Sharding = Literal["none", "optimizer", "fsdp"]
"""Which of a replica's states are divided among replicas: nothing, the optimizer's, or all with weights gathered."""
Recompute = Literal["none", "selective", "full"]
"""Parts of a layer that are computed again in B: none, the core of attention, or all."""
Precision = Literal["bf16", "fp8", "fp4"]
"""Type of the operands of matrix products; attention, head and router are computed in 16 bits."""

Overlap = Literal["no", "yes"]
"""Exchanges of experts wait, or hide behind compute of another microbatch: F and backward run as blocks."""

Offload = Literal["no", "yes"]
"""Activations of decoder layers stay on the device, or all are copied to the host between F and backward."""

Vocabulary = Literal["last", "own", "spread", "spread-ends", "balanced"]
"""Place of the output layer: the last stage, with layers or as a stage of its own, or its rows on all devices of the
pipeline (Vocabulary Parallelism, 2411.05288). Of measured runs also: rows of the embedding on all devices too, or ends
on their stages with as many layers less as make all equal."""

V_SHAPED = ("zb-v", "v-half", "v-min", "v-zb", "dualpipe-v")
"""Schedules in which the stages of a device are on a V (Controllable Memory, 2405.15362, section 4)."""


@dataclass(frozen=True)
class Strategy:
    """Degrees of parallelism of a job, and how a replica runs. `virtual`: stages on each device of the pipeline.

    `stage_layers`: layers of each stage in order, those of multi-token prediction last, without embedding and head;
    empty: as evenly as possible, first and last stage least.
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
    offload: Offload = "no"
    vocabulary: Vocabulary = "last"
    sequence_parallel: bool = True
    """Norms and residuals divide the tokens where tensor parallelism divides the rest (2205.05198, section 4.2.2)."""
    stage_layers: tuple[int, ...] = ()
    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts over the mean."""

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.gpus_of_replica * self.data

    @property
    def gpus_of_replica(self) -> int:
        """GPUs of one replica of the model."""
        return self.tensor * self.context * self.pipeline

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
        """Number of layers of each stage, without embedding and head.

        All layers of multi-token prediction are in one stage, and count as one. Where the head is there too, it has as
        few others as the longest stage leaves: each predicted token has a loss (layouts of Megatron Bridge for
        DeepSeek-V3).
        """
        if self.stage_layers or self.stages == 1:
            return self.stage_layers or (len(model.stack),)
        alone, predicted = self.vocabulary == "own", model.predicted_tokens
        stages, layers = self.stages - alone, len(model.layers) + (predicted > 0)
        sizes = [*even_stages(layers, stages)]
        if alone:
            sizes = [*sizes[::-1], 0]  # without the head, the stage of the embedding has least
        elif predicted:
            last = max(1, layers - max(sizes) * (stages - 1))
            if layers - last >= stages - 2:  # the first may have the embedding alone
                sizes = [*even_stages(layers - last, stages - 1)[::-1], last]
        if predicted:
            sizes[max(stage for stage, size in enumerate(sizes) if size)] += predicted - 1
        return tuple(sizes)


def layers_in_stages(strategy: Strategy, model: Model) -> NDArray[np.int64]:
    """How many layers of each distinct kind each stage has: shape (stages, kinds)."""
    ends = np.cumsum((0, *strategy.layers_of_stages(model)))
    return np.asarray(np.diff(model.layers_before[ends], axis=0))


def layers_on_devices(strategy: Strategy, model: Model) -> NDArray[np.int64]:
    """How many layers of each distinct kind each device of the pipeline has: shape (p, kinds)."""
    chunks = layers_in_stages(strategy, model).reshape(strategy.virtual, strategy.pipeline, -1)
    if strategy.is_v_shaped:
        chunks = np.stack([chunks[0], chunks[1, ::-1]])
    return np.asarray(chunks.sum(0))


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as can be; the last stage, which has the head, and the first have least."""
    base, more = divmod(layers, stages)
    order = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
    with_more = set(order[:more])
    return tuple(base + (stage in with_more) for stage in range(stages))
