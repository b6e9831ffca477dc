"""Analytic cost model: a table of model and machine sizes to a LayerProfile.

With b sequences of s tokens, hidden size h, feed-forward width f, a heads, and matrix products at the table's rate,
a transformer layer takes (Zero Bubble, table 1, where f = 4h; a multiply and an add are two operations)

    F: bs (8h^2 + 4hf + 4sh)    B: bs (8h^2 + 4hf + 8sh)    W: bs (8h^2 + 4hf)

operations, and the output head 2bshV for each of F, B and W. Operations other than matrix products count as free, and
so does the embedding except for its memory. Attention is counted in full (no gain from the causal mask).

Memory for 16-bit activations (Zero Bubble, section 2; PipeOffload, section 3): F takes bs(34h + 5as), without the
5as where attention is fused, and 20h instead of 34h where norms, GeLU and dropout are recomputed; W still needs
bs(32h) of it, or the same share of the rest after recomputing; 20bsh of it can be offloaded. Other element sizes scale
these. The head keeps its input and the float32 logits, 4bsV bytes, until B, and the input and the gradient of the
logits until W. Tensor parallelism with sequence parallelism divides all of this, including the bytes of messages. The
message of a microbatch is its activation, bsh elements, and that is what a recomputed layer keeps; recomputing it takes
as long as F. Keys and values are twice that, with as many heads as queries have.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from optpipe.document import Document, read_toml
from optpipe.document_kinds import SIZE_TABLE
from optpipe.fields import Count, reject
from optpipe.layers import HostCopies, Layer, LayerProfile, Link, ParallelSizes
from optpipe.problem import CopyChannels

HELD, HELD_RECOMPUTED, HELD_FOR_WEIGHT, MOVED = 34, 20, 32, 20
"""Bytes per token and hidden unit with 16-bit activations: kept, kept with recomputing, kept until W, offloadable."""

SCORES = 5
"""Bytes of the attention matrix per token, head and token of the sequence, where it is kept."""


def build_profile(table: SizeTable) -> LayerProfile:
    """Compute the profile of a transformer: an embedding, its layers, and the output head with the loss.

    Raises InputError if a time or a size exceeds the limits of a profile.
    """
    costs = _Costs(table)
    machine = table.machine
    copies = None
    if machine.copy_gb_per_s is not None:
        rate = machine.copy_gb_per_s * 1e3
        copies = HostCopies(offload_bytes_per_us=rate, reload_bytes_per_us=rate, channels=machine.channels)
    tensor, data = table.parallel.tensor, table.parallel.data
    return LayerProfile.from_data(
        {
            "format": "optpipe.layers/1",
            "name": table.name,
            "microbatch_size": table.model.microbatch_size,
            "layers": [costs.embedding(), costs.block(), costs.head()],
            "memory_bytes": int(machine.memory_gb * 1e9),
            "link": Link(latency_us=machine.link_latency_us, bytes_per_us=machine.link_gb_per_s * 1e3),
            "copies": copies,
            "source": " ".join(filter(None, (table.source, "By formula from a table of sizes, nothing measured."))),
            "sequence": table.model.sequence,
        }
        | ({"parallel": {"tensor": tensor, "data": data}} if tensor * data > 1 else {}),
        f"by formula from {table.name or 'the table'}",
    )


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
            f"Copies to and from the host run at {machine.copy_gb_per_s:g} GB/s each way and do not slow compute; "
            f"{MOVED} of the bytes of a token and hidden unit may leave."
        )
    units = f"{HELD_RECOMPUTED if kept.recomputed else HELD} bytes at 16 bit a token and hidden unit"
    return [
        f"Matrix products run at {machine.teraflops:g} TFLOP/s, the same for every layer; nothing else takes time but "
        f"{machine.launch_us:g} us a layer and pass.",
        "Attention is counted in full: nothing is saved for a causal mask. Slices of a sequence share this time as a "
        "causal mask would, by the pairs of tokens.",
        f"A layer keeps {units}, {scores}; norms and GeLU "
        f"{'are computed again in B' if kept.recomputed else 'are kept'}.",
        "A layer that is recomputed keeps its input alone, and its second forward takes as long as the first.",
        f"A parameter takes {precision.weight_bytes} bytes for its weight, {precision.gradient_bytes} for its gradient "
        f"and {optimizer_bytes:g} for the optimizer.",
        f"All of a layer is divided by {parallel.tensor} (tensor and sequence parallelism), whose communication is "
        "free unless teraflops says otherwise.",
        copies,
    ]


def copy_to_compute_ratio(table: SizeTable) -> float:
    """k of PipeOffload (section 3): time of a layer's offload and reload over its F, B and W. Up to 1 it can be hidden.

    Raises ValueError if the table has no `copy_gb_per_s`.
    """
    if table.machine.copy_gb_per_s is None:
        raise ValueError("machine.copy_gb_per_s is missing")
    block = _Costs(table).block()
    copies_us = 2 * block.offload_bytes / (table.machine.copy_gb_per_s * 1e3)
    return copies_us / (block.forward_us + block.backward_input_us + block.backward_weight_us)


class _Costs:
    """Costs of the layers of a table, divided by tensor parallelism."""

    def __init__(self, table: SizeTable) -> None:
        model, self.table = table.model, table
        self.tokens = model.microbatch_size * model.sequence
        self.hidden, self.model = model.hidden, model
        self.inner = model.feed_forward or 4 * model.hidden
        self.elements = table.precision.activation_bytes / 2

    def embedding(self) -> Layer:
        """Embedding lookup: no compute, but parameters, and the tokens' indices are kept (8 bytes each)."""
        kept = self._bytes(8 * self.tokens)
        return self._layer("embedding", 0, 0, 0, kept, kept, 0, self.model.vocabulary * self.hidden)

    def block(self) -> Layer:
        """Transformer layer, repeated as in the model."""
        tokens, h, model, kept = self.tokens, self.hidden, self.model, self.table.kept
        matrices = tokens * (8 * h * h + 4 * h * self.inner)
        scores = tokens * model.sequence * h
        held_per_unit = HELD_RECOMPUTED if kept.recomputed else HELD
        held = tokens * (held_per_unit * h + SCORES * model.heads * model.sequence * kept.attention_scores)
        for_weight = tokens * h * HELD_FOR_WEIGHT * held_per_unit / HELD
        return self._layer(
            "transformer layer",
            matrices + 4 * scores,
            matrices + 8 * scores,
            matrices,
            self._bytes(self.elements * held),
            self._bytes(self.elements * for_weight),
            self._bytes(self.elements * tokens * h * MOVED),
            4 * h * h + 2 * h * self.inner + 9 * h + self.inner,
            repeat=model.layers,
            recomputed=True,
            attention=scores,
        )

    def head(self) -> Layer:
        """Output projection and loss, whose time grows with the vocabulary."""
        products = 2 * self.tokens * self.hidden * self.model.vocabulary
        read = self._bytes(self.elements * 2 * self.tokens * self.hidden)
        logits = self._bytes(4 * self.tokens * self.model.vocabulary)
        parameters = self.model.vocabulary * self.hidden
        return self._layer("head and loss", *(products,) * 3, read + logits, read + logits, 0, parameters)

    def _layer(
        self,
        name: str,
        forward: float,
        backward_input: float,
        backward_weight: float,
        activation_bytes: int,
        backward_weight_bytes: int,
        offload_bytes: int,
        parameters: int,
        repeat: int = 1,
        *,
        recomputed: bool = False,
        attention: float = 0,
    ) -> Layer:
        precision, parallel, launch_us = self.table.precision, self.table.parallel, self.table.machine.launch_us
        shared_by = parallel.data if parallel.sharded_optimizer else 1
        parameter_bytes = precision.weight_bytes + precision.gradient_bytes + precision.optimizer_bytes / shared_by
        message = self._bytes(2 * self.elements * self.tokens * self.hidden)
        own: dict[str, object] = {}
        if recomputed:
            own["recomputation"] = {"kept_bytes": message, "offload_bytes": message}
        if attention:
            own["attention"] = {
                "forward_us": self._us(4 * attention),
                "backward_input_us": self._us(8 * attention),
                "key_value_bytes": 2 * message,
            }
        return Layer.from_data(
            {
                "name": name,
                "repeat": repeat,
                "forward_us": self._us(forward) + launch_us,
                "backward_input_us": self._us(backward_input) + launch_us,
                "backward_weight_us": self._us(backward_weight) + launch_us,
                "fixed_us": launch_us,
                "activation_bytes": activation_bytes,
                "backward_weight_bytes": backward_weight_bytes,
                "offload_bytes": min(offload_bytes, activation_bytes),
                "parameter_bytes": self._bytes(parameters * parameter_bytes),
                "output_bytes": message,
            }
            | own,
            f"{name}, by formula from {self.table.name or 'the table'}",
        )

    def _us(self, operations: float) -> float:
        return operations / self.table.parallel.tensor / (self.table.machine.teraflops * 1e6)

    def _bytes(self, size: float) -> int:
        return ceil(size / self.table.parallel.tensor)


MAX_TABLE_BYTES = 2**16

Positive = Annotated[int | float, Field(gt=0, le=1e12)]


class Model(Document):
    """Decoder-only transformer. `feed_forward`: width of the inner layer; default: 4 times `hidden`."""

    layers: Count
    hidden: Count
    heads: Count
    sequence: Count
    vocabulary: Count
    feed_forward: Count | None = None
    microbatch_size: Count = 1

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            detail = f"has heads {self.heads}, which does not divide hidden {self.hidden}. Maybe the two are swapped"
            raise reject("no_divisor", detail)
        return self


class Machine(Document):
    """Device and its links.

    `teraflops` is the rate that matrix products achieve, not the peak of a data sheet. `memory_gb` is the memory that
    the model may use, in 1e9 bytes. `link_gb_per_s` and `copy_gb_per_s` are the rates between devices and to the host,
    in one direction, in 1e9 bytes per second.
    """

    teraflops: Positive
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
