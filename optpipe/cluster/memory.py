"""Memory of a rank, by kind: what the trainer holds throughout, and activations at the peak of a schedule.

Formulas are those of 2205.05198 (section 4) with what attention and experts of today keep. All ranks of a stage are
alike, so a rank is named by its device of the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.cluster.costs import BF16_BYTES
from optpipe.cluster.model import Layer, Model
from optpipe.cluster.software import MEGATRON, Software
from optpipe.cluster.strategy import Strategy, layers_in_stages, layers_on_devices

GIB = 2**30
OFFLOADED_CHUNKS = 3
"""Activations of a stage that are on a device while all are copied to the host: those that F or the backward works on,
those that leave, and those that come back."""
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
    """The larger of what the loss makes of the logits and what the backward of a layer needs for a moment; both where
    the output layer's rows lie on all devices."""

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


class StageBytes(NamedTuple):
    """Bytes of a microbatch on each stage: shape (stages,)."""

    kept: NDArray[np.float64]
    """From F to B."""
    operands: NDArray[np.float64]
    """From B to W, where they are apart."""
    gathered: NDArray[np.float64]
    """While an op runs."""
    backward: NDArray[np.float64]
    """While a backward runs."""


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
        return (self.model.on_ranks(layer, one.tensor).parameters - expert) / one.tensor, expert / (
            one.expert * one.expert_tensor
        )

    @property
    def head_parameters(self) -> float:
        """Parameters behind the last layer on one GPU; of tied ones a copy is there where the embedding is on another
        device."""
        return self.model.head_parameters / self.strategy.tensor + (self.embedding_copy if self.model.tied else 0)

    @property
    def embedding_copy(self) -> float:
        """Parameters on one GPU of the embedding of tokens where a stage behind the first needs it too."""
        model, one = self.model, self.strategy
        return model.vocabulary * model.hidden / one.tensor if one.pipeline > 1 else 0.0

    def layer(self, layer: Layer) -> float:
        """Bytes that a layer keeps of a microbatch from F to B."""
        if self.strategy.recompute == "full":
            return self._hidden_tokens * self.model.hidden * BF16_BYTES * (2 if layer.joining_products else 1)
        return self._kept(layer, self.strategy.recompute == "none")

    def _kept(self, layer: Layer, scores: bool) -> float:
        layer = self.model.on_ranks(layer, self.strategy.tensor)
        attention, feed_forward, h = layer.attention, layer.feed_forward, self.model.hidden
        tokens, tensor, hidden = self.tokens, self.strategy.tensor, self._hidden_tokens
        norm = BF16_BYTES + self.software.norm_bytes
        total = hidden * h * 2 * norm
        if layer.joining_products:  # inputs of three norms, and two that are joined
            total += hidden * h * 5 * BF16_BYTES
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
        layer = self.model.on_ranks(layer, self.strategy.tensor)
        attention, feed_forward, h = layer.attention, layer.feed_forward, self.model.hidden
        gates = 2 if feed_forward.products >= 3 * h * feed_forward.width or feed_forward.experts else 1
        inner = (1 + gates) * feed_forward.width
        chosen = feed_forward.chosen * self.strategy.expert_imbalance
        routed = chosen * (2 * h + inner) if feed_forward.experts else inner
        groups = attention.heads if attention.latent_width else attention.key_value_heads
        width = (attention.heads + groups) * (attention.query_key_width + attention.value_width)
        alike = 4 * h + (3 * h if layer.joining_products else 0)
        return BF16_BYTES * (self._hidden_tokens * alike + self.tokens / self.strategy.tensor * (width + routed))

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
        return again + 4 * max(matrix, layer.joining_products / tensor) + BF16_BYTES * rows

    def held_weight_operands(self, layer: Layer) -> float:
        """Bytes of `weight_operands` of which no more is there than the layer keeps."""
        return min(self.layer(layer), self.weight_operands(layer))

    @property
    def logits_bytes(self) -> float:
        """Bytes of a token's logits and of what the loss makes of them, in a microbatch."""
        elements = self.tokens * self.model.vocabulary
        elements /= self.strategy.tensor if self.software.logits_divided else 1
        return elements * (BF16_BYTES + self.software.loss_bytes)

    @property
    def message_bytes(self) -> int:
        """Bytes of the output of a layer."""
        return ceil(self._hidden_tokens * self.model.hidden * BF16_BYTES)

    @property
    def head(self) -> tuple[float, float]:
        """Bytes that the output layer keeps of a microbatch from F to B, with the loss, and from B to W."""
        tokens = 1 + self.model.predicted_tokens
        return tokens * (self.message_bytes + self.logits_bytes), tokens * self.message_bytes

    @property
    def spread_bytes(self) -> float:
        """Bytes that each device keeps of a microbatch from S to T where the output layer's rows lie on all."""
        return self.logits_bytes / self.strategy.pipeline + self.pass_operand_bytes

    def stages(self) -> StageBytes:
        """Bytes of each stage, as a profile of the layers has them: each layer's rounded up."""
        counts, layers = layers_in_stages(self.strategy, self.model), self.model.distinct_layers
        operands = np.array([self.held_weight_operands(layer) for layer in layers])
        gathered = np.array([self.gathered(layer) for layer in layers])
        backward = gathered + self._kinds.backward
        kept, operands = (np.asarray(counts @ np.ceil(sizes), np.float64) for sizes in (self._kinds.kept, operands))
        if self.strategy.vocabulary != "spread":
            for sizes, held in zip((kept, operands), self.head, strict=True):
                sizes[-1] += ceil(held)
        there = counts > 0
        most = (np.ceil(np.where(there, sizes, 0.0)).max(1) for sizes in (gathered, backward))
        return StageBytes(kept, operands, *most)

    @property
    def pass_operand_bytes(self) -> float:
        """Bytes that a device keeps of a microbatch from S to T in addition to its share of the logits.

        They are the last stage's output, and the product of exponentials and rows.
        """
        return 2 * self._hidden_tokens * self.model.hidden * BF16_BYTES

    def gathered(self, layer: Layer) -> float:
        """Bytes of weights that replicas gather layer by layer (FSDP): those of the layer that runs and of the next."""
        if self.strategy.sharding != "fsdp" or self.strategy.pipeline > 1:
            return 0.0
        return 2 * BF16_BYTES * sum(self.parameters(layer))

    @property
    def gathered_share(self) -> float:
        """Share of a device's weights that stay gathered (FSDP): in a pipeline those of one stage."""
        one = self.strategy
        return 1 / one.virtual if one.sharding == "fsdp" and one.pipeline > 1 else 0.0

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
            return min(m, p - device + (one.schedule == "vocab-2"))  # and one more behind its barrier
        return min(m * v, (v - 1) * p + 2 * (p - device - 1) + 1) / v

    def held(self, device: int) -> Held:
        """Bytes of a rank of a pipeline's device at its peak."""
        one, model = self.strategy, self.model
        on_all = one.vocabulary in ("spread-ends", "balanced")
        spread = on_all or one.vocabulary == "spread"
        first, last = device == 0, device == one.pipeline - 1
        if one.is_v_shaped:
            last = first
        counts = self._counts[device]
        kinds, here = self._kinds, counts > 0
        dense, expert = float(counts @ kinds.dense), float(counts @ kinds.expert)
        dense += model.embedding_parameters * (1 / one.pipeline if on_all else first) / one.tensor
        dense += self.head_parameters * (1 / one.pipeline if spread else last)
        if any(here[model.distinct_layers.index(layer)] for layer in model.prediction_layers):
            dense += self.embedding_copy
        share, expert_share = one.data * one.context, one.expert_data
        divide = one.sharding == "fsdp"
        weights = BF16_BYTES * (dense / (share if divide else 1) + expert / (expert_share if divide else 1))
        gradients = self.software.gradient_bytes * weights / BF16_BYTES
        weights += BF16_BYTES * (dense + expert) * self.gathered_share
        optimizer = OPTIMIZER_BYTES * (dense + expert)
        if one.sharding != "none":
            optimizer = OPTIMIZER_BYTES * (dense / share + expert / expert_share)
        in_flight = self.in_flight(device)
        if one.offload == "yes":
            in_flight = min(in_flight, OFFLOADED_CHUNKS / one.virtual)
        kept = float(counts @ kinds.kept) * in_flight
        if one.overlap == "yes":  # layer by layer, F of a block makes what its backward then frees
            kept += float(kinds.kept[here].max(initial=0))
        elements = 0.0
        if last or spread:
            divided = (one.tensor if self.software.logits_divided else 1) * (one.pipeline if spread else 1)
            elements = (1 + model.predicted_tokens) * self.tokens * model.vocabulary / divided
        backward = float(kinds.backward[here].max(initial=0))
        loss = elements * self.software.loss_bytes
        passes = one.vocabulary == "spread"  # logits are kept from S to T, between which backwards run
        present = (layer for layer, number in zip(model.distinct_layers, counts, strict=True) if number)
        gathered = max(map(self.gathered, present), default=0.0)
        transient = (loss + backward if passes else max(loss, backward)) + gathered
        logits = elements * BF16_BYTES
        if passes:
            logits += self.pass_operand_bytes
        return Held(weights, gradients, optimizer, kept, logits, transient)

    def activations(self) -> NDArray[np.float64]:
        """Bytes that the decoder layers of each device keep of a microbatch."""
        return np.asarray(self._counts @ self._kinds.kept)

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
