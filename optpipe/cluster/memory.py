"""Memory of a rank, by kind: what the trainer holds throughout, and activations at the peak of a schedule.

Formulas are those of 2205.05198 (section 4) with what attention and experts of today keep. All ranks of a stage are
alike, so a rank is named by its device of the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.cluster.costs import BF16_BYTES
from optpipe.cluster.model import Layer, Model
from optpipe.cluster.software import MEGATRON, Software
from optpipe.cluster.strategy import Strategy, layers_on_devices

GIB = 2**30
OPTIMIZER_BYTES = 12
"""Bytes of a parameter: a master weight and two moments of Adam, in 32 bits."""


@dataclass(frozen=True)
class Held:
    """Bytes on a rank at its peak, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    """As the head makes them, in 16 bits."""
    transient: float
    """The larger of what the loss makes of the logits and what the backward of a layer needs for a moment."""

    @property
    def total(self) -> float:
        """All kinds."""
        return float(sum(vars(self).values()))


class _Kinds(NamedTuple):
    """Parameters of one GPU and bytes of each distinct layer."""

    dense: NDArray[np.float64]
    expert: NDArray[np.float64]
    kept: NDArray[np.float64]
    backward: NDArray[np.float64]


@dataclass(frozen=True)
class MemoryModel:
    """Memory of a model under a strategy."""

    model: Model
    strategy: Strategy
    sequence: int
    microbatches: int
    software: Software = MEGATRON

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one GPU before tensor parallelism divides anything."""
        return self.strategy.microbatch_size * self.sequence / self.strategy.context

    @property
    def _hidden_tokens(self) -> float:
        """Tokens of the parts that only sequence parallelism divides."""
        return self.tokens / (self.strategy.tensor if self.strategy.sequence_parallel else 1)

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return layers_on_devices(self.strategy, self.model)

    @cached_property
    def _kinds(self) -> _Kinds:
        layers = self.model.distinct_layers
        dense, expert = np.array([self.parameters(layer) for layer in layers]).T
        kept, backward = np.array([(self.layer(layer), self.backward(layer)) for layer in layers]).T
        return _Kinds(dense, expert, kept, backward)

    def parameters(self, layer: Layer) -> tuple[float, float]:
        """Parameters of a layer on one GPU: all but experts, and experts."""
        one, expert = self.strategy, layer.feed_forward.experts * layer.feed_forward.expert_parameters
        return (layer.parameters - expert) / one.tensor, expert / (one.expert * one.expert_tensor)

    def layer(self, layer: Layer) -> float:
        """Bytes that a layer keeps of a microbatch from F to B."""
        if self.strategy.recompute == "full":
            return self._hidden_tokens * self.model.hidden * BF16_BYTES
        return self._kept(layer, self.strategy.recompute == "none")

    def _kept(self, layer: Layer, scores: bool) -> float:
        attention, feed_forward, h = layer.attention, layer.feed_forward, self.model.hidden
        tokens, tensor, hidden = self.tokens, self.strategy.tensor, self._hidden_tokens
        norm = BF16_BYTES + self.software.norm_bytes
        total = hidden * h * 2 * norm
        width = attention.heads * (attention.query_key_width + attention.value_width)
        groups = attention.heads if attention.latent_width else attention.key_value_heads
        width += groups * (attention.query_key_width + attention.value_width)
        total += tokens / tensor * BF16_BYTES * width
        if attention.latent_width:
            total += tokens * BF16_BYTES * 2 * attention.latent_width
        if scores:
            total += tokens / tensor * attention.heads * self.sequence * self.software.score_bytes
        gated = feed_forward.products >= 3 * h * feed_forward.width
        inner = (3 if gated else 2) - self.software.inner_recomputed
        if not feed_forward.experts:
            return total + tokens / tensor * BF16_BYTES * inner * feed_forward.width
        shared = max(0.0, feed_forward.products - h * feed_forward.experts) / (3 * h)
        total += tokens / tensor * BF16_BYTES * 3 * shared
        routed = self.tokens / tensor * feed_forward.chosen * self.strategy.expert_imbalance
        return total + routed * BF16_BYTES * (3 * feed_forward.width + 2 * h)

    def weight_operands(self, layer: Layer) -> float:
        """Bytes of the operands of weight gradients, from B to W: what products read, and gradients of what they
        returned."""
        attention, feed_forward, h = layer.attention, layer.feed_forward, self.model.hidden
        gates = 2 if feed_forward.products >= 3 * h * feed_forward.width or feed_forward.experts else 1
        inner = (1 + gates) * feed_forward.width
        chosen = feed_forward.chosen * self.strategy.expert_imbalance
        routed = chosen * (2 * h + inner) if feed_forward.experts else inner
        groups = attention.heads if attention.latent_width else attention.key_value_heads
        width = (attention.heads + groups) * (attention.query_key_width + attention.value_width)
        return BF16_BYTES * (self._hidden_tokens * 4 * h + self.tokens / self.strategy.tensor * (width + routed))

    def backward(self, layer: Layer) -> float:
        """Bytes that the backward of a layer needs for a moment: its forward again where it is recomputed, gradients of
        the inner width, and that of its largest matrix in 32 bits before it is added."""
        feed_forward, h, tensor = layer.feed_forward, self.model.hidden, self.strategy.tensor
        inner = 3 if feed_forward.products >= 3 * h * feed_forward.width else 2
        if feed_forward.experts:
            local = feed_forward.experts / (self.strategy.expert * self.strategy.expert_tensor)
            matrix = local * feed_forward.expert_products * 2 / 3
            rows = self.tokens / tensor * feed_forward.chosen * self.strategy.expert_imbalance * 3 * feed_forward.width
        else:
            matrix = (inner - 1) * h * feed_forward.width / tensor
            rows = self.tokens / tensor * inner * feed_forward.width
        again = self._kept(layer, True) if self.strategy.recompute == "full" else 0.0
        return again + 4 * matrix + BF16_BYTES * rows

    def in_flight(self, device: int) -> float:
        """Microbatches whose activations a device holds at its peak, in whole microbatches of all its layers."""
        one = self.strategy
        p, v, m = one.pipeline, one.virtual, self.microbatches
        if p == 1:
            return 1.0
        if one.schedule in IN_FLIGHT:
            each, more = IN_FLIGHT[one.schedule]
            return min(m, each * p + more)
        if v == 1:
            return min(m, p - device)
        return min(m * v, (v - 1) * p + 2 * (p - device - 1) + 1) / v

    def held(self, device: int) -> Held:
        """Bytes of a rank of a pipeline's device at its peak."""
        one, model = self.strategy, self.model
        spread = one.vocabulary != "ends"
        first, last = device == 0, device == one.pipeline - 1
        if one.is_v_shaped:
            last = first
        counts = self._counts[device].copy()
        if last and not spread:
            counts[model.distinct_layers.index(model.layers[-1])] += model.predicted_tokens
        kinds, here = self._kinds, counts > 0
        dense, expert = float(counts @ kinds.dense), float(counts @ kinds.expert)
        ends = model.embedding_parameters, model.head_parameters + model.joining_parameters
        if model.tied and one.pipeline > 1:
            ends = ends[0], ends[1] + model.vocabulary * model.hidden
        if spread:
            dense += sum(ends) / one.pipeline / one.tensor
        else:
            dense += (ends[0] * first + ends[1] * last) / one.tensor
        share, expert_share = one.data * one.context, one.expert_data
        divide = one.sharding == "fsdp"
        weights = BF16_BYTES * (dense / (share if divide else 1) + expert / (expert_share if divide else 1))
        gradients = self.software.gradient_bytes * weights / BF16_BYTES
        optimizer = OPTIMIZER_BYTES * (dense + expert)
        if one.sharding != "none":
            optimizer = OPTIMIZER_BYTES * (dense / share + expert / expert_share)
        kept = float(counts @ kinds.kept) * self.in_flight(device)
        if one.overlap == "yes":  # layer by layer, F of a block makes what its backward then frees
            kept += float(kinds.kept[here].max(initial=0))
        elements = 0.0
        if last or spread:
            divided = (one.tensor if self.software.logits_divided else 1) * (one.pipeline if spread else 1)
            elements = self.tokens * model.vocabulary / divided
        backward = float(kinds.backward[here].max(initial=0))
        gathered = 2 * BF16_BYTES * float((kinds.dense + kinds.expert)[here].max(initial=0))
        loss = elements * self.software.loss_bytes
        transient = max(loss, backward) + (gathered if divide else 0.0)
        logits = elements * BF16_BYTES
        return Held(weights, gradients, optimizer, kept, logits, transient)

    def devices(self) -> list[Held]:
        """Bytes of a rank of each device of the pipeline."""
        return [self.held(device) for device in range(self.strategy.pipeline)]


IN_FLIGHT: Mapping[str, tuple[float, float]] = {
    "gpipe": (inf, 0),
    "zb-1p": (1, 0),
    "zb-2p": (2, -1),
    "zb-v": (1, 0),
    "v-half": (1 / 2, 1),
    "v-min": (1 / 3, 2),
    "dualpipe-v": (1, 1 / 2),
}
"""Microbatches in flight on each device of schedules other than 1F1B: so many a device of the pipeline, and so many
more (Zero Bubble, table 2; Controllable Memory, table 1; DualPipeV holds 2p + 1 chunks)."""
