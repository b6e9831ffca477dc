"""Times of a layer under a strategy, and of a training step: what is done, at the rates of the data sheet, by kind.

A `Work` has an entry for each of `FEATURES`: the seconds that this kind of work takes at the peak of the machine (or a
count, for launches and steps). A prediction is its product with slowdowns, which are inverse efficiencies and come from
calibration. As long as the longest stage stays the longest, a step is linear in them, and measured steps give them by a
non-negative fit.

Operations are those of Megatron-LM (2104.04473, appendix; 2205.05198, section 4): F of a product takes two operations
for each element of the matrix and token, B and W as many; attention is halved where it is causal, and has no W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.cluster.machine import FEATURES, Facts
from optpipe.cluster.model import Layer, Model
from optpipe.cluster.strategy import Precision, Strategy, layers_on_devices
from optpipe.layers import SLOWED_BACKWARD, SLOWED_FORWARD

Work = NDArray[np.float64]
"""Seconds at peak, or a count, by kind: shape (len(FEATURES),)."""

INDEX = {name: k for k, name in enumerate(FEATURES)}
BF16_BYTES = 2
LOGIT_BYTES = 4
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 28
"""Read and written for a parameter in a step of Adam: gradient, master weight and two moments, the 16-bit weight."""
LEAST_EXPOSED, GATHER_SHARE = 0.05, 0.7
"""Share of gathers that never hides behind compute (the first of a step), and of the link's rate that they reach."""
FIGURE_BYTES = 12
"""Figures of a token that parts of a softmax exchange: maximum, sum and the logit of the label."""
SLOWED = np.array([[SLOWED_FORWARD], [SLOWED_BACKWARD], [SLOWED_BACKWARD]])
"""Times of each pass of a layer where devices also run spread passes, over those without: shape (3, 1)."""
NORM_ACCESSES, INNER_ACCESSES, JOINING_ACCESSES = 8, 3, 12
"""Elements read or written in F for each token and element of the hidden width (two norms, two sums, rotary positions),
of the inner width (activation function), and of the hidden width where two inputs are joined (row of the embedding,
three norms, one row behind the other). B takes twice as many."""
JOINING_TRANSFERS = 4
"""Gathers and scatters where two inputs are joined: of the embedding, of both inputs, and of the product."""


def ideal_seconds(model: Model, machine: Facts, sequence: int) -> float:
    """Seconds of one GPU at its 16-bit peak for the model's own operations on one sequence.

    Nothing is recomputed, and of causal attention half is counted. Divided by what a sequence took, this is the model
    FLOP/s utilization (MFU).
    """
    kinds = CostModel(model, machine, Strategy(), sequence).devices().sum((0, 1))
    return float(kinds @ work(products=1, attention=1, experts=1))


class Passes(NamedTuple):
    """Work of the passes of a layer, a stage or a device for one microbatch."""

    forward: Work
    backward_input: Work
    backward_weight: Work

    @property
    def backward(self) -> Work:
        """Both of the backward."""
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> Work:
        """All three."""
        return self.forward + self.backward_input + self.backward_weight

    def __add__(self, other: object) -> Passes:
        """Both, pass by pass."""
        assert isinstance(other, Passes)
        return Passes(*(mine + others for mine, others in zip(self, other, strict=True)))

    def times(self, factor: float | NDArray[np.float64]) -> Passes:
        """All passes `factor` times, or each with its own."""
        return Passes(*(factor * np.array(self)))


class LayerWork(NamedTuple):
    """Work of a layer in the four parts whose exchanges hide behind the compute of another microbatch.

    Dispatch and combine take `exchange` each, in F and again in B. Dense layers have none, and no `experts`.
    """

    attention: Passes
    exchange: Work
    experts: Passes
    """Routed experts. All else, shared experts among it, runs with attention, as in Megatron-LM."""

    @property
    def passes(self) -> Passes:
        """All parts, pass by pass."""
        moved = 2 * self.exchange
        return self.attention + self.experts + Passes(moved, moved, work())


class SpreadHead(NamedTuple):
    """Work of each device for its share of the output layer's rows, and seconds of the exchanges of a microbatch.

    Algorithm 2 of Vocabulary Parallelism (2411.05288): `logits` (pass S) also multiplies their exponentials by the
    rows, `weights` (T) makes the gradient of the rows.
    """

    logits: Work
    weights: Work
    broadcast_s: float
    """Time of the last stage's output to all devices."""
    reduce_s: float
    """Time to combine the figures of each token, and the parts of the output's gradient."""


def work(**parts: float) -> Work:
    """Work of the named kinds, and none of the others."""
    result = np.zeros(len(FEATURES))
    for name, value in parts.items():
        result[INDEX[name]] = value
    return result


@dataclass(frozen=True)
class Parts:
    """Work of the parts of a model for a microbatch, by pass.

    `layers` has the shape (kinds, 3, features), `first` and `last` (3, features). `computes` are attention and experts
    of each kind of layer in F and in the whole backward, (kinds, 4, features); `exchanges` (kinds, features).
    """

    layers: NDArray[np.float64]
    first: NDArray[np.float64]
    last: NDArray[np.float64]
    computes: NDArray[np.float64]
    exchanges: NDArray[np.float64]

    @classmethod
    def of(cls, costs: CostModel) -> Parts:
        """The parts of a model under a strategy."""
        first, last = costs.ends()
        layers = [costs.layer(layer) for layer in costs.model.distinct_layers]
        computes = [
            [done for part in (one.attention, one.experts) for done in (part.forward, part.backward)] for one in layers
        ]
        return cls(
            np.array([one.passes for one in layers]),
            np.array(first),
            np.array(last),
            np.array(computes),
            np.array([one.exchange for one in layers]),
        )

    def hidden(self, slowdowns: Work) -> NDArray[np.float64]:
        """Work that F and backward of each kind of layer save as one block: shape (kinds, features).

        Of each pair the longer part counts: attention of one pass and combine of the other, experts and dispatch
        (order of MindSpeed, and of `overlap_moe_expert_parallel_comm` in Megatron-LM).
        """
        moved = np.broadcast_to(self.exchanges[:, None], self.computes.shape)
        is_longer = self.computes @ slowdowns >= moved @ slowdowns
        return np.asarray(np.where(is_longer[..., None], moved, self.computes).sum(1))


class CostModels:
    """Cost models of many strategies of one model on one machine: those that share a layer alike share its work."""

    def __init__(self, model: Model, machine: Facts, sequence: int) -> None:
        self.model, self.machine, self.sequence = model, machine, sequence
        self._parts: dict[tuple[object, ...], Parts] = {}

    def of(self, strategy: Strategy) -> CostModel:
        """The cost model of a strategy."""
        costs = CostModel(self.model, self.machine, strategy, self.sequence)
        key = strategy.share_of_layer
        if key not in self._parts:
            self._parts[key] = costs.parts
        return replace(costs, known_parts=self._parts[key])


@dataclass(frozen=True)
class CostModel:
    """Costs of a model on a machine under a strategy, for sequences of `sequence` tokens."""

    model: Model
    machine: Facts
    strategy: Strategy
    sequence: int
    known_parts: Parts | None = field(default=None, compare=False, repr=False)
    """`parts` of another strategy with the same share of a layer."""

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one GPU before tensor parallelism divides anything."""
        return self.strategy.microbatch_size * self.sequence / self.strategy.context

    def _operations_per_s(self, precision: Precision | None = None) -> float:
        return self.machine.operations_per_s(precision or self.strategy.precision)

    def _rate(self, ranks: int) -> float:
        """Bytes a second between `ranks` neighbours."""
        return self.machine.bytes_per_s(ranks)

    def layer(self, layer: Layer) -> LayerWork:
        """Work of a decoder layer, with what the strategy recomputes in B."""
        return _layer(self, self.model.on_ranks(layer, self.strategy.tensor))

    def embedding(self) -> Passes:
        """Work of the embedding: rows are read, and their gradients are added."""
        read = self.tokens * self.model.hidden * BF16_BYTES / self.strategy.tensor / self.machine.memory_bytes_per_s
        return Passes(work(memory=2 * read), work(), work(memory=3 * read))

    def _of_rows(self, devices: int) -> tuple[float, float]:
        """Seconds of a product with the output layer's rows on one of so many devices, and of an access to logits."""
        elements = self.tokens * self.model.vocabulary / self.strategy.tensor / devices
        products = 2 * elements * self.model.hidden / self._operations_per_s("bf16")
        return products, elements * (BF16_BYTES + LOGIT_BYTES) / self.machine.memory_bytes_per_s

    @property
    def sent_bytes(self) -> float:
        """Bytes of a message between stages."""
        return self.tokens * self.model.hidden * BF16_BYTES / self.strategy.tensor

    def head(self) -> Passes:
        """Work of the output projection, in 16 bits, and of the loss on its logits."""
        (products, logits), gathered = self._of_rows(1), self._tensor_s(2)
        return Passes(
            work(products=products, memory=2 * logits, tensor=gathered, launch=1),
            work(products=products, memory=2 * logits, tensor=gathered, launch=1),
            work(products=products, launch=1),
        )

    def spread_head(self) -> SpreadHead:
        """Work of the output layer with its rows on all devices of the pipeline. Every product is divided by them."""
        (products, logits), gathered = self._of_rows(self.strategy.pipeline), self._tensor_s(2)
        rate, node = self._rate(self.strategy.gpus), self.strategy.gpus <= self.machine.gpus_per_node
        latency_s = (self.machine.link_latency_us if node else self.machine.network_latency_us) / 1e6
        hops_s = ceil(log2(self.strategy.pipeline)) * latency_s
        figures = 2 * self.tokens / self.strategy.tensor * FIGURE_BYTES
        return SpreadHead(
            work(products=2 * products, memory=2 * logits, tensor=2 * gathered, launch=2),
            work(products=products, memory=2 * logits, launch=1),
            hops_s + self.sent_bytes / rate,
            3 * hops_s + (self.sent_bytes + figures) / rate,
        )

    def _tensor_s(self, transfers: float) -> float:
        """Seconds of gathers and scatters of a microbatch's activation among the ranks that share a layer."""
        tensor = self.strategy.tensor
        if tensor == 1:
            return 0.0
        size = self.tokens * self.model.hidden * BF16_BYTES * (tensor - 1) / tensor
        return transfers * size / self._rate(tensor)

    def ends(self) -> tuple[Passes, Passes]:
        """Work in front of the first layer, and behind the last one: head and loss of each predicted token."""
        return self.embedding(), self.head().times(1 + self.model.predicted_tokens)

    @cached_property
    def parts(self) -> Parts:
        """Work of each kind of layer and of both ends."""
        return self.known_parts or Parts.of(self)

    def devices(self) -> NDArray[np.float64]:
        """Work of each device of the pipeline for a microbatch, by pass: shape (p, 3, features)."""
        one, parts, p = self.strategy, self.parts, self.strategy.pipeline
        devices = np.tensordot(layers_on_devices(one, self.model), parts.layers, 1)
        if one.vocabulary == "balanced":
            return np.broadcast_to((devices.sum(0) + parts.first + parts.last) / p, devices.shape)
        if one.vocabulary == "spread-ends":
            return np.asarray(devices + (parts.first + parts.last) / p)
        devices[0] += parts.first
        if one.vocabulary == "spread":
            return np.asarray(devices * SLOWED + self.passes)
        devices[0 if one.is_v_shaped else -1] += parts.last
        return np.asarray(devices)

    @cached_property
    def passes(self) -> Passes:
        """Work of the spread passes of each device, that of S among forwards and that of T among weight gradients."""
        if self.strategy.vocabulary != "spread":
            return Passes(work(), work(), work())
        head = self.spread_head()
        return Passes(head.logits, work(), head.weights)

    def hidden(self, slowdowns: Work) -> NDArray[np.float64]:
        """Work that blocks save on each device, where all passes of a microbatch are in blocks: shape (p, features)."""
        saved = self.parts.hidden(slowdowns) if self.strategy.overlap == "yes" else np.zeros_like(self.parts.exchanges)
        return np.asarray(np.tensordot(layers_on_devices(self.strategy, self.model), saved, 1))

    def step(self, global_batch: int, slowdowns: Work) -> Work:
        """Work of a step on its critical path: the busiest device's microbatches, warm-up and cool-down, messages,
        gradients and optimizer. `slowdowns` only say which device is the busiest, and what of a block is hidden."""
        one, devices, hidden = self.strategy, self.devices(), self.hidden(slowdowns)
        m, p, v = one.microbatches(global_batch), one.pipeline, one.virtual
        totals = devices.sum(1)
        busiest = int(np.argmax((totals - hidden) @ slowdowns))
        stages = devices - self.passes  # S and T fill no warm-up
        ramp = np.array(BUBBLES.get(one.schedule, _interleaved)(v)) @ (stages.sum(0) - stages[busiest])
        result = m * totals[busiest] - one.blocks(m) / v * hidden[busiest] + ramp
        if one.vocabulary == "spread":  # the last backward follows S, and not T
            head = self.spread_head()
            result += work(pipeline=head.broadcast_s + head.reduce_s) - head.weights
        if one.schedule == "dualpipe-v":  # its warm-up and cool-down have blocks
            result -= (hidden.sum(0) - hidden[busiest]) / 2
        if p > 1:
            apart = one.gpus // p  # ranks between neighbours of the pipeline
            result += work(pipeline=2 * (m * v + p - 1) * self.sent_bytes / self._rate(2 * apart))
        return np.asarray(result + self.replicas(m, float(result @ slowdowns)) + work(step=1))

    def replicas(self, microbatches: int, compute_s: float = 0.0) -> Work:
        """Work that replicas share in a step: gradients and weights sent, and the optimizer.

        Where weights are gathered for each microbatch (FSDP), what takes no longer than `compute_s` hides behind it.
        """
        one = self.strategy
        dense, expert = self.parameters_of_device()
        share = one.data * one.context
        sent = 0.0
        for count, ranks in ((dense, share), (expert, one.expert_data)):
            sent += count * (ranks - 1) / ranks / self._rate(one.gpus // one.pipeline)
        divided = one.sharding != "none"
        updated = dense / (share if divided else 1) + expert / (one.expert_data if divided else 1)
        optimizer = updated * OPTIMIZER_BYTES / self.machine.memory_bytes_per_s
        if one.sharding == "fsdp":  # weights are gathered for F and B of each microbatch, and gradients scattered
            gathered = sent * (2 * BF16_BYTES + GRADIENT_BYTES) * microbatches
            exposed = max(LEAST_EXPOSED * gathered, gathered / GATHER_SHARE - compute_s)
            return work(gather=exposed, optimizer=optimizer)
        return work(data=sent * (BF16_BYTES + GRADIENT_BYTES), optimizer=optimizer)

    def parameters_of_device(self) -> tuple[float, float]:
        """Parameters of a device of the pipeline in the mean: of all but experts, and of its experts."""
        one, model = self.strategy, self.model
        expert = copies = 0
        for layer, count in zip(model.distinct_layers, model.layers_before[-1].tolist(), strict=True):
            expert += count * layer.feed_forward.experts * layer.feed_forward.expert_parameters
            copies += count * (model.on_ranks(layer, one.tensor).parameters - layer.parameters)
        dense = model.parameters + model.prediction_parameters + copies - expert
        return dense / (one.tensor * one.pipeline), expert / (one.expert * one.expert_tensor * one.pipeline)


def _layer(costs: CostModel, layer: Layer) -> LayerWork:
    one, machine = costs.strategy, costs.machine
    attention, feed_forward, h = layer.attention, layer.feed_forward, costs.model.hidden
    n, s, tensor = costs.tokens, costs.sequence, one.tensor
    rate, exact = costs._operations_per_s(), costs._operations_per_s("bf16")
    memory = machine.memory_bytes_per_s

    matrices = attention.products + feed_forward.products + layer.joining_products
    products = 2 * n * matrices / tensor / rate
    window = min(attention.window or s, s)
    seen = s / 2 if window == s else window * (1 - window / (2 * s))
    scores = 2 * n * seen * attention.heads * (attention.query_key_width + attention.value_width) / tensor / exact
    routed = n / tensor * feed_forward.chosen * one.expert_imbalance
    experts = 2 * routed * feed_forward.expert_products / rate
    local = feed_forward.experts / (one.expert * one.expert_tensor)
    widths = 0.0 if feed_forward.experts else float(feed_forward.width)
    if feed_forward.experts:
        widths += feed_forward.products / (3 * h)  # shared experts
    alike = n / (tensor if one.sequence_parallel else 1)
    heads = attention.heads * (attention.query_key_width + attention.value_width)
    heads += 2 * attention.key_value_heads * attention.query_key_width if not attention.latent_width else 0
    of_hidden = NORM_ACCESSES + (JOINING_ACCESSES if layer.joining_products else 0)
    accessed = alike * of_hidden * h + n / tensor * (INNER_ACCESSES * widths + 2 * heads)
    read = accessed * BF16_BYTES / memory
    of_experts = routed * (INNER_ACCESSES * feed_forward.width + 2 * h if feed_forward.experts else 0)
    read_by_experts = of_experts * BF16_BYTES / memory

    transfers = (4 if not feed_forward.experts else 2) + (JOINING_TRANSFERS if layer.joining_products else 0)
    tensor_s = costs._tensor_s(transfers)
    exchange_s = _exchange_s(costs, routed, feed_forward.chosen) if feed_forward.experts else 0.0
    context_s = 0.0
    if one.context > 1:
        width = attention.latent_width or 2 * attention.key_value_heads * attention.value_width
        hops = (one.context - 1) * n * width * BF16_BYTES
        context_s = hops / (tensor if not attention.latent_width else 1) / costs._rate(tensor * one.context)
    forward = work(products=products, attention=scores, memory=read, tensor=tensor_s, context=context_s, launch=1)
    exchange = work(expert=exchange_s)
    by_experts = work(experts=experts, memory=read_by_experts, launch=feed_forward.experts > 0)
    again, again_by_experts = work(), work()
    if one.recompute == "full":
        again, again_by_experts = forward + 2 * exchange, by_experts
    elif one.recompute == "selective":
        again = work(attention=scores)
    twice = work(attention=scores, memory=read, context=context_s)
    added_s = 2 * GRADIENT_BYTES / memory  # a gradient is read, added to and written
    added = matrices / tensor * added_s
    added_by_experts = local * feed_forward.expert_products * added_s
    weight = work(products=products, memory=added, tensor=tensor_s / 2, launch=1)
    return LayerWork(
        Passes(forward, forward + twice + again, weight),
        exchange,
        Passes(
            by_experts,
            by_experts + work(memory=read_by_experts) + again_by_experts,
            work(experts=experts, memory=added_by_experts),
        ),
    )


def _exchange_s(costs: CostModel, routed: float, chosen: int) -> float:
    """Seconds of dispatch, or of combine. Between nodes a token is sent once to each node that needs it."""
    one, machine = costs.strategy, costs.machine
    if one.expert == 1:
        return 0.0
    node = min(one.expert, machine.gpus_per_node)
    nodes = one.expert / node
    size = routed * costs.model.hidden * BF16_BYTES
    seconds = size * (node - 1) / node / machine.link_bytes_per_s
    if nodes > 1:
        seconds += size * min(1.0, nodes / chosen) * (nodes - 1) / nodes / machine.bytes_per_s(one.expert)
    return seconds


def _interleaved(virtual: int) -> tuple[float, float, float]:
    return (1 / virtual,) * 3


BUBBLES: Mapping[str, Callable[[int], tuple[float, float, float]]] = {
    "zb-1p": lambda _: (1, 1, -1),
    "zb-h1": lambda _: (1, 1, -1),
    "zb-2p": lambda _: (0, 0, 0),
    "zb-v": lambda _: (0, 0, 0),
    "v-half": lambda _: (0.5, 0.5, 0),
    "v-min": lambda _: (1, 1, -0.5),
    "dualpipe-v": lambda _: (0.5, 1, -0.5),
}
"""Warm-up and cool-down of a schedule: how many F, B and W of the other devices the busiest waits for (Zero Bubble,
table 2; Controllable Memory, table 2; the formula of DualPipeV's open source, less what its blocks hide). Others are
1F1B, which `vocab-2` is too, or interleaved by the number of virtual stages."""
