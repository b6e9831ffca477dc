"""Layers of a strategy: costs of one GPU with its share of tensor, context and expert parallelism (`optpipe.layers/1`).

What cuts, schedules and runs a pipeline sees layers, and no parallelism but its own: so whatever holds for measured
layers holds for these.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from optpipe.cluster.costs import BF16_BYTES, INDEX, CostModel, Passes, Work
from optpipe.cluster.machine import Efficiencies, Facts, Machine
from optpipe.cluster.memory import OPTIMIZER_BYTES, MemoryModel
from optpipe.cluster.model import Layer as ModelLayer
from optpipe.cluster.model import Model
from optpipe.cluster.software import MEGATRON, Software
from optpipe.cluster.strategy import Strategy
from optpipe.layers import Layer, LayerProfile, ParallelSizes
from optpipe.partition import Partition, name_with_predicted
from optpipe.placement import placement


def strategy_layers(
    model: Model,
    machine: Machine,
    strategy: Strategy,
    sequence: int,
    software: Software = MEGATRON,
    efficiencies: Efficiencies | None = None,
) -> LayerProfile:
    """Build the layers of a model under a strategy: embedding, decoder layers and head, for one microbatch.

    `efficiencies`: None for those of the machine in the strategy's precision. Data parallelism, the optimizer's step
    and a step's constant are no costs of layers (`CostModel.replicas`).
    """
    found = efficiencies or machine.efficiencies_of(strategy.precision)
    return _Builder(model, machine, strategy, sequence, software, found).profile()


def strategy_partition(model: Model, strategy: Strategy) -> Partition:
    """Stages of a strategy in the layers of `strategy_layers`: the first has the embedding too, the last the head."""
    sizes = list(strategy.layers_of_stages(model))
    sizes[0] += 1
    sizes[-1] += 1
    return Partition(
        tuple(sizes), placement("v" if strategy.is_v_shaped else "interleaved", strategy.pipeline, strategy.virtual)
    )


def host_copies(facts: Facts) -> dict[str, Any] | None:
    """Copies to and from the host, for a layer profile; None where their rate is not known."""
    if facts.host_bytes_per_s is None:
        return None
    return dict.fromkeys(
        ("offload_bytes_per_us", "reload_bytes_per_us"), facts.host_bytes_per_s / facts.host_shared_by / 1e6
    )


class _Builder:
    """Builds one profile."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        strategy: Strategy,
        sequence: int,
        software: Software,
        efficiencies: Efficiencies,
    ) -> None:
        self.model, self.machine, self.strategy, self.sequence = model, machine, strategy, sequence
        self.slowdowns = efficiencies.slowdowns
        self.costs = CostModel(model, machine.facts, strategy, sequence)
        self.memory = MemoryModel(model, strategy, sequence, 1, software)
        self.software = software
        tokens = self.costs.tokens / (strategy.tensor if strategy.sequence_parallel else 1)
        self.message_bytes = ceil(tokens * model.hidden * BF16_BYTES)

    def profile(self) -> LayerProfile:
        """The profile."""
        one, facts, model = self.strategy, self.machine.facts, self.model
        apart = 2 * one.gpus // one.pipeline
        between = facts.bytes_per_s(apart) != facts.link_bytes_per_s
        embedding, head = self.costs.ends()
        layers = [
            self._layer("embedding", 1, embedding, 0, 0, model.embedding_parameters / one.tensor, 0),
            *(self._decoder(layer, count) for layer, count in model.kinds),
            self._head(head),
        ]
        return LayerProfile.from_data(
            {
                "format": "optpipe.layers/1",
                "name": name_with_predicted(f"{model.name}, {_name(one)}", model.predicted_tokens),
                "microbatch_size": one.microbatch_size,
                "layers": layers,
                "memory_bytes": self.software.usable_bytes(facts.memory_bytes),
                "link": {
                    "latency_us": facts.network_latency_us if between else facts.link_latency_us,
                    "bytes_per_us": facts.bytes_per_s(apart) / 1e6,
                },
                "copies": host_copies(facts),
                "source": f"By formula for {self.machine.name}, nothing measured.",
                "sequence": self.sequence,
                "parallel": ParallelSizes(tensor=one.tensor * one.context, data=one.data),
            },
            f"layers on {self.machine.name}",
        )

    def _decoder(self, layer: ModelLayer, count: int) -> Layer:
        work = self.costs.layer(layer)
        passes = work.passes
        held = self.memory.layer(layer)
        operands = min(held, self.memory.weight_operands(layer))
        dense, expert = self.memory.parameters(layer)
        one = self.strategy
        own: dict[str, object] = {}
        if one.recompute == "none" and held > self.message_bytes:
            own["recomputation"] = {"kept_bytes": self.message_bytes, "offload_bytes": self.message_bytes}
        groups = layer.attention.latent_width or 2 * layer.attention.key_value_heads * layer.attention.query_key_width
        attention = {
            "forward_us": self._us(passes.forward, "attention"),
            "backward_input_us": self._us(passes.backward_input, "attention"),
            "key_value_bytes": min(ceil(held), ceil(self.costs.tokens / one.tensor * groups * BF16_BYTES)),
        }
        if one.recompute == "none":
            own["attention"] = attention
        if one.overlap == "yes" and layer.feed_forward.experts:
            own["parts"] = {
                name: [self._us(done) for done in (first, work.exchange, second, work.exchange)]
                for name, first, second in (
                    ("forward_us", work.attention.forward, work.experts.forward),
                    ("backward_us", work.attention.backward, work.experts.backward),
                )
            }
        workspace = self.memory.backward(layer)
        return self._layer("decoder layer", count, passes, held, operands, dense, expert, workspace, **own)

    def _head(self, passes: Passes) -> Layer:
        elements = self.costs.tokens * self.model.vocabulary
        elements /= self.strategy.tensor if self.software.logits_divided else 1
        dense = (self.model.head_parameters + self.model.joining_parameters) / self.strategy.tensor
        expert, predicted = 0.0, self.model.predicted_tokens
        logits = elements * (BF16_BYTES + self.software.loss_bytes)
        held = self.message_bytes + logits
        if predicted:
            layer = self.model.layers[-1]
            more = self.memory.parameters(layer)
            dense, expert = dense + predicted * more[0], predicted * more[1]
            held += predicted * (self.memory.layer(layer) + logits)
        return self._layer("head and loss", 1, passes, held, self.message_bytes, dense, expert)

    def _us(self, work: Work, only: str | None = None) -> float:
        terms = work * self.slowdowns
        return float(terms[INDEX[only]] if only else terms.sum()) * 1e6

    def _layer(
        self,
        name: str,
        count: int,
        passes: Passes,
        held: float,
        operands: float,
        dense: float,
        expert: float,
        workspace: float = 0,
        **own: object,
    ) -> Layer:
        launch_us = min(self._us(work, "launch") for work in passes)
        return Layer.from_data(
            {
                "name": name,
                "repeat": count,
                "forward_us": self._us(passes.forward),
                "backward_input_us": self._us(passes.backward_input),
                "backward_weight_us": self._us(passes.backward_weight),
                "fixed_us": launch_us,
                "activation_bytes": ceil(held),
                "backward_weight_bytes": ceil(operands),
                "offload_bytes": ceil(held) if name == "decoder layer" else 0,
                "workspace_bytes": {"F": 0, "B": ceil(workspace), "W": 0, "BW": ceil(workspace)},
                "parameter_bytes": ceil(self._state_bytes(dense, expert)),
                "output_bytes": self.message_bytes,
            }
            | own,
            f"{name} by formula",
        )

    def _state_bytes(self, dense: float, expert: float) -> float:
        """Bytes of weights, gradients and optimizer of so many parameters of one GPU."""
        one = self.strategy
        share, expert_share = one.data * one.context, one.expert_data
        trained = BF16_BYTES + self.software.gradient_bytes
        if one.sharding == "fsdp":
            return (trained + OPTIMIZER_BYTES) * (dense / share + expert / expert_share)
        if one.sharding == "none":
            return (trained + OPTIMIZER_BYTES) * (dense + expert)
        return trained * (dense + expert) + OPTIMIZER_BYTES * (dense / share + expert / expert_share)


def _name(strategy: Strategy) -> str:
    """Degrees above one, as in ``tp4 pp8``."""
    one = strategy
    degrees = {"tp": one.tensor, "cp": one.context, "ep": one.expert, "pp": one.pipeline, "dp": one.data}
    return " ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1) or "one GPU"
