"""Tables of sizes and rates, as papers and data sheets have them, read as a model on a machine (`optpipe.cluster`).

The rate of products is what they reach, with the messages of tensor parallelism in it, so nothing but products,
attention and launches takes time. Activations are those of 2205.05198, section 4: bs(34h + 5as) in 16 bits, without the
5as where attention is fused, and 20h where norms, activation functions and dropout are computed again (PipeOffload,
section 3).
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from optpipe.cluster.layers import strategy_layers
from optpipe.cluster.machine import SHARES, Efficiencies, Facts
from optpipe.cluster.machine import Machine as ClusterMachine
from optpipe.cluster.model import read_model
from optpipe.cluster.software import Software
from optpipe.cluster.strategy import Strategy
from optpipe.document import Document, read_toml
from optpipe.document_kinds import SIZE_TABLE
from optpipe.fields import Count, reject
from optpipe.layers import LayerProfile, ParallelSizes
from optpipe.problem import CopyChannels
from optpipe.units import time_text

SCORE_BYTES = 5
"""Bytes of the attention matrix per token, head and token of the sequence, where it is kept."""
FREE = 1e20
"""Rate of what takes no time: memory, and the messages of tensor parallelism."""


def build_profile(table: SizeTable) -> LayerProfile:
    """Compute the profile of a transformer: an embedding, its layers, and the output head with the loss.

    Raises InputError if a time or a size exceeds the limits of a profile.
    """
    model, machine, kept, precision, parallel = table.model, table.machine, table.kept, table.precision, table.parallel
    source = f"by formula from {table.name or 'the table'}"
    facts: dict[str, Any] = {"gpus_per_node": parallel.tensor, "memory_bytes": int(machine.memory_gb * 1e9)}
    facts |= {"memory_bytes_per_s": FREE, "link_bytes_per_s": FREE, "operations_bf16_per_s": machine.teraflops * 1e12}
    facts |= {"network_bytes_per_s": machine.link_gb_per_s * 1e9, "network_latency_us": machine.link_latency_us}
    if machine.copy_gb_per_s is not None:
        facts["host_bytes_per_s"] = machine.copy_gb_per_s * 1e9
    shares: dict[str, float] = dict.fromkeys(SHARES, 1.0)
    layers = strategy_layers(
        read_model(model.config(), table.name or "table", source),
        ClusterMachine(format="optpipe.machine/1", name="table", facts=Facts.from_data(facts, source)),
        Strategy(
            tensor=parallel.tensor,
            data=parallel.data,
            microbatch_size=model.microbatch_size,
            sharding="optimizer" if parallel.sharded_optimizer else "none",
        ),
        model.sequence,
        Software(
            norm_bytes=0 if kept.recomputed else 2 if model.gated else 3,  # with the masks of dropout
            score_bytes=SCORE_BYTES * kept.attention_scores,
            inner_recomputed=kept.recomputed,
            reserved=1,
            context_bytes=0,
        ),
        Efficiencies.from_data(shares | {"launch_us": machine.launch_us, "step_us": 0}),
    ).to_data()
    share = parallel.data if parallel.sharded_optimizer else 1
    default, own = (one.bytes_of_parameter(share) for one in (Precision(), precision))
    for layer in layers["layers"]:
        parameter_bytes = layer.pop("parameter_bytes")
        _scale(layer, precision.activation_bytes / 2)
        layer["parameter_bytes"] = ceil(parameter_bytes * own / default)
    layers |= {"name": table.name, "source": " ".join(filter(None, (table.source, _SOURCE)))}
    if layers["copies"]:
        layers["copies"]["channels"] = machine.channels.to_data()
    return LayerProfile.from_data(layers, source)


_SOURCE = "By formula from a table of sizes, nothing measured."


def _scale(layer: dict[str, Any], factor: float) -> None:
    """Scale the bytes of activations, here and in the parts of a layer."""
    for name, value in layer.items():
        if isinstance(value, dict):
            _scale(value, factor)
        elif value and (name.endswith("_bytes") or name in ("F", "B", "W", "BW")):
            layer[name] = ceil(value * factor)


def assumptions(table: SizeTable) -> list[str]:
    """Assumptions behind the figures of a table, a sentence each, with the table's numbers."""
    machine, precision, parallel, kept = table.machine, table.precision, table.parallel, table.kept
    optimizer_bytes = precision.optimizer_bytes / (parallel.data if parallel.sharded_optimizer else 1)
    scores = (
        "with the attention matrix" if kept.attention_scores else "attention fused, so that no matrix of it is kept"
    )
    copies = "No copy_gb_per_s is given, so nothing can be offloaded."
    if machine.copy_gb_per_s is not None:
        copies = (
            f"Copies to and from the host run at {machine.copy_gb_per_s:g} GB/s each way and do not slow compute; all "
            "that a layer keeps may leave."
        )
    return [
        f"Matrix products run at {machine.teraflops:g} TFLOP/s, the same for every layer; nothing else takes time but "
        f"{time_text(machine.launch_us)} a layer and pass.",
        "Attention is causal: half of all pairs of tokens are counted. B takes twice as long for it, W nothing.",
        f"A layer keeps what its products and attention read, {scores}; norms and activation functions "
        f"{'are computed again in B' if kept.recomputed else 'are kept'}.",
        "A layer that is recomputed keeps its input alone, and its second forward takes as long as the first.",
        f"A parameter takes {precision.weight_bytes} bytes for its weight, {precision.gradient_bytes} for its gradient "
        f"and {optimizer_bytes:g} for the optimizer.",
        f"All of a layer is divided by {parallel.tensor} (tensor and sequence parallelism), whose communication is "
        "free unless teraflops says otherwise.",
        copies,
    ]


def copy_to_compute_ratio(profile: LayerProfile) -> float | None:
    """k of PipeOffload (section 3): time of a layer's offload and reload over its F, B and W. Up to 1 it can be hidden.

    None if nothing can be offloaded.
    """
    block = profile.layers[1]
    if profile.copies is None:
        return None
    copies_us = 2 * block.offload_bytes / profile.copies.offload_bytes_per_us
    return copies_us / (block.forward_us + block.backward_input_us + block.backward_weight_us)


MAX_TABLE_BYTES = 2**16

Positive = Annotated[int | float, Field(gt=0, le=1e12)]


class Model(Document):
    """Decoder-only transformer. `feed_forward`: width of the inner layer; default: 4 times `hidden`.

    `key_value_heads` are those of grouped queries; default: `heads`. `gated`: the inner layer has two matrices in
    front, and neither biases nor dropout, as in a Llama.
    """

    layers: Count
    hidden: Count
    heads: Count
    sequence: Count
    vocabulary: Count
    feed_forward: Count | None = None
    key_value_heads: Count | None = None
    gated: bool = False
    microbatch_size: Count = 1

    def config(self) -> dict[str, Any]:
        """Fields of a `config.json`."""
        sizes = {"hidden_size": self.hidden, "num_hidden_layers": self.layers, "vocab_size": self.vocabulary}
        sizes |= {"intermediate_size": self.feed_forward or 4 * self.hidden, "num_attention_heads": self.heads}
        sizes["num_key_value_heads"] = self.key_value_heads or self.heads
        return {"model_type": "llama" if self.gated else "gpt_neox"} | sizes

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            detail = f"has heads {self.heads}, which does not divide hidden {self.hidden}. Maybe the two are swapped"
            raise reject("no_divisor", detail)
        if self.key_value_heads and self.heads % self.key_value_heads:
            raise reject(
                "no_divisor", f"has key_value_heads {self.key_value_heads}, which does not divide heads {self.heads}"
            )
        return self


class Machine(Document):
    """Device and its links.

    `teraflops` is the rate that matrix products achieve, not the peak of a data sheet. `memory_gb` is the memory that
    the model may use, in 1e9 bytes. `link_gb_per_s` and `copy_gb_per_s` are the rates between devices and to the host,
    in one direction, in 1e9 bytes per second.
    """

    teraflops: Annotated[int | float, Field(gt=0, le=1e8)]
    memory_gb: Positive
    link_gb_per_s: Positive
    link_latency_us: Annotated[int | float, Field(ge=0, le=1e9)] = 10
    copy_gb_per_s: Positive | None = None
    channels: CopyChannels = CopyChannels()
    launch_us: Annotated[int | float, Field(ge=0, le=1e6)] = 0


class Precision(Document):
    """Bytes per element of an activation, and per parameter for weight, gradient and optimizer state.

    The defaults make 18 bytes per parameter: 2 for the weight, 4 for its gradient, 12 for a float32 copy and Adam's two
    moments. The last 12 are divided by `parallel.data` if `parallel.sharded_optimizer` is set.
    """

    activation_bytes: Annotated[int, Field(ge=1, le=8)] = 2
    weight_bytes: Annotated[int, Field(ge=1, le=8)] = 2
    gradient_bytes: Annotated[int, Field(ge=1, le=8)] = 4
    optimizer_bytes: Annotated[int, Field(ge=0, le=64)] = 12

    def bytes_of_parameter(self, share: int) -> float:
        """Bytes of a parameter whose optimizer state is divided by so many."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes / share


class Parallel(ParallelSizes):
    """Parallelism other than the pipeline: `tensor` devices (with sequence parallelism) a layer, `data` replicas."""

    sharded_optimizer: bool = False


class Kept(Document):
    """Activations of a layer kept from F to B.

    `attention_scores`: the attention matrix is kept, as without fused attention. `recomputed`: norms, GeLU and dropout
    are recomputed in B, which keeps 20 of 34 bytes per token and hidden unit (PipeOffload, section 3).
    """

    attention_scores: bool = False
    recomputed: bool = False


class SizeTable(Document):
    """Sizes of a model and rates of a machine, as found in papers and data sheets; `source` names their origin."""

    name: str = Field(default="", max_length=200)
    source: str = Field(default="", max_length=1000)
    model: Model
    machine: Machine
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    kept: Kept = Kept()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a TOML file. Raises InputError naming the field, the value and the limit."""
        return cls.from_data(read_toml(Path(path), MAX_TABLE_BYTES, SIZE_TABLE), str(path))
