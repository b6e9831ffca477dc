"""Layers of a strategy: costs of one GPU with its share of tensor, context and expert parallelism (`optpipe.layers/1`).

What cuts, schedules and runs a pipeline sees layers, and no parallelism but its own: so whatever holds for measured
layers holds for these.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from optpipe.cluster.costs import BF16_BYTES, INDEX, SLOWED, CostModel, Passes, Work, work
from optpipe.cluster.machine import Efficiencies, Facts, Machine
from optpipe.cluster.memory import OPTIMIZER_BYTES, MemoryModel
from optpipe.cluster.model import Layer as ModelLayer
from optpipe.cluster.model import Model
from optpipe.cluster.software import MEGATRON, Software
from optpipe.cluster.strategy import Strategy
from optpipe.layers import Layer, LayerProfile, ParallelSizes, SpreadHead
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
    """Build the layers of a model under a strategy, for one microbatch: embedding, decoder layers, those of multi-token
    prediction, and head. Losses and logits of all predicted tokens are the head's, as in Megatron-Core.

    Where the strategy has the rows of the head on all devices, it is `spread` and no layer.

    `efficiencies`: None for those of the machine in the strategy's precision. Data parallelism, the optimizer's step
    and a step's constant are no costs of layers (`CostModel.replicas`).
    """
    found = efficiencies or machine.efficiencies_of(strategy.precision)
    return _Builder(model, machine, strategy, sequence, software, found).profile()


def strategy_partition(model: Model, strategy: Strategy) -> Partition:
    """Stages of a strategy in the layers of `strategy_layers`: the first has the embedding too, the last the head."""
    sizes = list(strategy.layers_of_stages(model))
    sizes[0] += 1
    sizes[-1] += strategy.vocabulary != "spread"
    return Partition(
        tuple(sizes), placement("v" if strategy.is_v_shaped else "interleaved", strategy.pipeline, strategy.virtual)
    )


def strategy_cut(model: Model, strategy: Strategy) -> list[int]:
    """Layers of each stage; a head whose rows lie on all devices counts in the last."""
    *sizes, last = strategy_partition(model, strategy).sizes
    return [*sizes, last + (strategy.vocabulary == "spread")]


def host_copies(facts: Facts) -> dict[str, Any] | None:
    """Copies to and from the host, for a layer profile; None where their rate is not known."""
    if not facts.host_rate:
        return None
    return dict.fromkeys(("offload_bytes_per_us", "reload_bytes_per_us"), facts.host_rate / 1e6)


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
        self.message_bytes = self.memory.message_bytes

    def profile(self) -> LayerProfile:
        """The profile."""
        one, facts, model = self.strategy, self.machine.facts, self.model
        apart = 2 * one.gpus // one.pipeline
        between = facts.bytes_per_s(apart) != facts.link_bytes_per_s
        embedding, head = self.costs.ends()
        layers = [
            self._layer("embedding", 1, embedding, 0, 0, model.embedding_parameters / one.tensor, 0),
            *(self._decoder(layer, count) for layer, count in model.kinds),
            *(self._prediction(layer, token) for token, layer in enumerate(model.prediction_layers, 1)),
        ]
        spread = self._spread_head() if one.vocabulary == "spread" else None
        layers += [] if spread else [self._head(head)]
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
                "spread": spread,
            },
            f"layers on {self.machine.name}",
        )

    def _prediction(self, layer: ModelLayer, token: int) -> Layer:
        """A layer of multi-token prediction. It passes on what it received, for the head.

        The embedding of tokens is there too, once: trainers have all these layers in one stage.
        """
        made = self._decoder(layer, 1, self.memory.embedding_copy if token == 1 else 0.0)
        return made.replaced(name="multi-token prediction", output_bytes=(1 + token) * self.message_bytes)

    def _decoder(self, layer: ModelLayer, count: int, copied: float = 0.0) -> Layer:
        parts = self.costs.layer(layer)
        passes = parts.passes.times(SLOWED) if self.strategy.vocabulary == "spread" else parts.passes
        held = self.memory.layer(layer)
        operands = self.memory.held_weight_operands(layer)
        dense, expert = self.memory.parameters(layer)
        one = self.strategy
        own: dict[str, object] = {"offload_bytes": ceil(held)}
        kept = self.message_bytes * (2 if layer.joining_products else 1)
        if one.recompute == "none" and held > kept:
            own["recomputation"] = {"kept_bytes": kept, "offload_bytes": kept}
        held_attention = self.model.on_ranks(layer, self.strategy.tensor).attention
        groups = held_attention.latent_width or 2 * held_attention.key_value_heads * held_attention.query_key_width
        attention = {
            "forward_us": self._us(passes.forward, "attention"),
            "backward_input_us": self._us(passes.backward_input, "attention"),
            "key_value_bytes": min(ceil(held), ceil(self.costs.tokens / one.tensor * groups * BF16_BYTES)),
        }
        if one.recompute == "none":
            own["attention"] = attention
        if one.overlap == "yes" and layer.feed_forward.experts:
            own["parts"] = {
                name: [self._us(done) for done in (first, parts.exchange, second, parts.exchange)]
                for name, first, second in (
                    ("forward_us", parts.attention.forward, parts.experts.forward),
                    ("backward_us", parts.attention.backward, parts.experts.backward),
                )
            }
        gathered, backward = self.memory.gathered(layer), self.memory.backward(layer)
        own["workspace_bytes"] = {
            "F": ceil(gathered),
            "B": ceil(backward + gathered),
            "W": ceil(gathered),
            "BW": ceil(backward + gathered),
        }
        return self._layer("decoder layer", count, passes, held, operands, dense + copied, expert, **own)

    def _spread_head(self) -> SpreadHead:
        costs, devices = self.costs.spread_head(), self.strategy.pipeline
        return SpreadHead(
            devices=devices,
            logits_us=self._us(costs.logits),
            weights_us=self._us(costs.weights),
            fixed_us=self._us(costs.weights, "launch"),
            broadcast_us=self._us(work(pipeline=costs.broadcast_s)),
            reduce_us=self._us(work(pipeline=costs.reduce_s)),
            kept_bytes=ceil(self.memory.spread_bytes),
            parameter_bytes=ceil(self._state_bytes(self.memory.head_parameters / devices, 0)),
        )

    def _head(self, passes: Passes) -> Layer:
        return self._layer("head and loss", 1, passes, *self.memory.head, self.memory.head_parameters, 0)

    def _us(self, done: Work, only: str | None = None) -> float:
        terms = done * self.slowdowns
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
        **own: object,
    ) -> Layer:
        launch_us = min(self._us(one, "launch") for one in passes)
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
            kept = BF16_BYTES * self.memory.gathered_share * (dense + expert)
            return (trained + OPTIMIZER_BYTES) * (dense / share + expert / expert_share) + kept
        if one.sharding == "none":
            return (trained + OPTIMIZER_BYTES) * (dense + expert)
        return trained * (dense + expert) + OPTIMIZER_BYTES * (dense / share + expert / expert_share)


def _name(strategy: Strategy) -> str:
    """Degrees above one, as in ``tp4 pp8``."""
    one = strategy
    degrees = {"tp": one.tensor, "cp": one.context, "ep": one.expert, "pp": one.pipeline, "dp": one.data}
    return " ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1) or "one GPU"
