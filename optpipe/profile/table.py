"""A table of a model's sizes and a machine's rates, written by hand (TOML): a profile without a GPU begins here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from optpipe.document import Document
from optpipe.fields import Count, reject
from optpipe.problem import CopyChannels
from optpipe.toml_file import read_toml

MAX_TABLE_BYTES = 2**16

Positive = Annotated[int | float, Field(gt=0, le=1e12)]


class Model(Document):
    """A decoder-only transformer. `feed_forward`: width of its inner layer, 4 times `hidden` unless given."""

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
            raise reject("no_divisor", f"has heads {self.heads}, which does not divide hidden {self.hidden}")
        return self


class Machine(Document):
    """One device and its links.

    `teraflops` is what matrix products really reach, not the peak of a data sheet. `memory_gb` counts 1e9 bytes and
    is what the model may use. `link_gb_per_s` and `copy_gb_per_s` are 1e9 bytes a second between devices and to the
    host, one way.
    """

    teraflops: Positive
    memory_gb: Positive
    link_gb_per_s: Positive
    link_latency_us: Annotated[int | float, Field(ge=0, le=1e9)] = 10
    copy_gb_per_s: Positive | None = None
    channels: CopyChannels = CopyChannels()
    launch_us: Annotated[int | float, Field(ge=0, le=1e6)] = 0


class Precision(Document):
    """Bytes of what is held: an activation's element, and a parameter with gradient and optimizer state.

    18 bytes a parameter: 2 for the weight, 4 for its gradient, 12 for a float32 copy and Adam's two moments. The last
    12 are shared among `data_parallel` devices where `sharded_optimizer` is on.
    """

    activation_bytes: Annotated[int, Field(ge=1, le=8)] = 2
    weight_bytes: Annotated[int, Field(ge=1, le=8)] = 2
    gradient_bytes: Annotated[int, Field(ge=1, le=8)] = 4
    optimizer_bytes: Annotated[int, Field(ge=0, le=64)] = 12


class Parallel(Document):
    """What divides a layer beside the pipeline: `tensor` devices (with sequence parallelism), `data` replicas."""

    tensor: Count = 1
    data: Count = 1
    sharded_optimizer: bool = False


class Kept(Document):
    """What of a layer's activations is kept from F to B.

    `attention_scores`: whether the attention matrix is (without a fused attention it is). `recomputed`: norms, GeLU
    and dropout are computed again in B, which leaves 20 of 34 bytes a token and hidden unit (PipeOffload, section 3).
    """

    attention_scores: bool = False
    recomputed: bool = False


class SizeTable(Document):
    """A model and a machine in numbers that people have at hand; `source` says where they come from."""

    name: str = Field(default="", max_length=200)
    source: str = Field(default="", max_length=1000)
    model: Model
    machine: Machine
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    kept: Kept = Kept()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML file. Raises InputError naming the field, the value and the limit."""
        return cls.from_data(read_toml(Path(path), MAX_TABLE_BYTES), str(path))
