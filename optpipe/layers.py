"""Costs of a model layer by layer, before it is cut into stages (document `optpipe.layers/1`).

Times are microseconds and memory is bytes, both for one microbatch of `microbatch_size` sequences. `optpipe profile`
writes the document, from measurements or from a table of sizes; `optpipe plan` partitions the layers.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, log2
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from optpipe.display import Displayed
from optpipe.document import Document, read_document
from optpipe.errors import InputError, Issue
from optpipe.fields import Bytes, Count, TimeUs, reject
from optpipe.problem import CopyChannels
from optpipe.stage import Workspace

MAX_PROFILE_BYTES = 2**20
"""A layer takes about 300 bytes; a larger file is some other kind of file."""

MAX_LAYERS = 2000
"""Most layers, repeated ones counted one by one."""

ROUNDING = 1e-9
"""Share by which a sum of rounded times may exceed their whole."""

SLOWED_FORWARD, SLOWED_BACKWARD = 1.09, 1.07
"""Times of a layer where devices also run spread passes, over those without: of 32 layers on 8 A100, where collectives
took a share of the device (Vocabulary Parallelism, 2411.05288, per-device times of its repository)."""

Rate = Annotated[int | float, Field(gt=0, le=1e9)]
"""Bytes per microsecond, that is MB/s; at most 1e9 (1000 TB/s)."""


class LayerRecomputation(Document):
    """A layer run again from its own input, as the modes `selective` of a stage do it.

    `kept_bytes` stay from F on, of which `offload_bytes` may be offloaded; `recompute_us` is the time of the second
    forward, None: that of the first.
    """

    kept_bytes: Bytes
    recompute_us: TimeUs | None = None
    offload_bytes: Bytes = 0

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.offload_bytes > self.kept_bytes:
            detail = f"has offload_bytes {self.offload_bytes} but kept_bytes is {self.kept_bytes}"
            raise reject("offload_too_large", f"{detail}. Maybe what is recomputed is counted: it cannot leave")
        return self


class LayerAttention(Document):
    """Causal attention in a layer: the parts of its times that grow with the square of a sequence, and its memory.

    `key_value_bytes` are the keys and values of the microbatch, which later slices of a sequence read; the gradients
    of them take as much. `forward_slice_us` and so on are what each slice takes beyond its share of the time: more
    launches, joining keys and values, and a mask over all of the earlier positions.
    """

    forward_us: TimeUs
    backward_input_us: TimeUs
    backward_weight_us: TimeUs = 0
    key_value_bytes: Bytes = 0
    forward_slice_us: TimeUs = 0
    backward_input_slice_us: TimeUs = 0
    backward_weight_slice_us: TimeUs = 0


FourTimes = Annotated[list[TimeUs], Field(min_length=4, max_length=4)]


class LayerParts(Document):
    """Parts of a layer with experts: times of attention, dispatch, experts and combine, in F and in B and W together.

    Dispatch and combine are exchanges, behind which the device computes nothing. In a block of a forward and a backward
    (`Problem.overlaps`) each may hide behind a part of the other pass.
    """

    forward_us: FourTimes
    backward_us: FourTimes


class Layer(Document):
    """A layer, or `repeat` equal ones in a row.

    Memory is counted as for a stage: `activation_bytes` from F to B, `backward_weight_bytes` of it from B to
    W, of which `offload_bytes` may be offloaded. `parameter_bytes` stays on the device throughout: weights,
    gradients and the optimizer's state. `output_bytes` crosses to the next layer's device, and back as a gradient.
    `fixed_us` is the part of each of the three times that does not grow with the microbatch. `recomputation`: what it
    keeps if it is recomputed by itself; None where it is no block that the runtime runs again (embedding, head).
    `attention`: what of its costs is causal attention; None: its times grow with the tokens. `parts`: what of it may
    hide in blocks; None: nothing.
    """

    name: str = Field(default="", max_length=200)
    repeat: Count = 1
    forward_us: TimeUs
    backward_input_us: TimeUs
    backward_weight_us: TimeUs
    fixed_us: TimeUs = 0
    activation_bytes: Bytes
    backward_weight_bytes: Bytes
    offload_bytes: Bytes = 0
    workspace_bytes: Workspace = Workspace()
    parameter_bytes: Bytes = 0
    output_bytes: Bytes = 0
    recomputation: LayerRecomputation | None = None
    attention: LayerAttention | None = None
    parts: LayerParts | None = None

    @property
    def backward_us(self) -> float:
        """Time of B and W."""
        return self.backward_input_us + self.backward_weight_us

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for name in ("forward_us", "backward_us") if self.parts else ():
            parts_us, whole_us = sum(getattr(self.parts, name)), getattr(self, name)
            if parts_us > whole_us * (1 + ROUNDING):
                raise reject(
                    "parts_too_large",
                    f"has parts.{name} of {parts_us} in all, but its {name.split('_')[0]} takes {whole_us}. Maybe the "
                    "parts are of several layers",
                )
        for name in ("forward_us", "backward_input_us", "backward_weight_us") if self.attention else ():
            part_us, whole_us = getattr(self.attention, name), getattr(self, name)
            if part_us > whole_us - min(self.fixed_us, whole_us):
                raise reject(
                    "attention_too_large",
                    f"has attention.{name} {part_us}, but {name} is {whole_us}, of which {self.fixed_us} are fixed_us. "
                    "Maybe attention counts all layers",
                )
        if self.attention and self.attention.key_value_bytes > self.activation_bytes:
            raise reject(
                "attention_too_large",
                f"has attention.key_value_bytes {self.attention.key_value_bytes} but activation_bytes is "
                f"{self.activation_bytes}. Maybe keys and values are not counted in the activation",
            )
        if self.recomputation and self.recomputation.kept_bytes > self.activation_bytes:
            raise reject(
                "recomputation_too_large",
                f"has recomputation.kept_bytes {self.recomputation.kept_bytes} but activation_bytes is "
                f"{self.activation_bytes}. Maybe one of them counts all microbatches",
            )
        if self.offload_bytes > self.activation_bytes:
            raise reject(
                "offload_too_large",
                f"has offload_bytes {self.offload_bytes} but activation_bytes is {self.activation_bytes}. "
                "Maybe one of them counts all microbatches",
            )
        return self


class Link(Document):
    """Link between devices: a message takes `latency_us`, plus its bytes over `bytes_per_us` if given."""

    latency_us: TimeUs = 0
    bytes_per_us: Rate | None = None


class HostCopies(Document):
    """Copies between a device and the host: rate in each direction, shared channels, and host memory."""

    offload_bytes_per_us: Rate
    reload_bytes_per_us: Rate
    channels: CopyChannels = CopyChannels()
    host_memory_bytes: Bytes | None = None


class SpreadHead(Document):
    """A head whose rows lie on all devices of a pipeline, behind the last layer (Vocabulary Parallelism, 2411.05288).

    For each microbatch every device runs two spread passes, S of `logits_us` and T of `weights_us`, of which `fixed_us`
    does not grow with it. What the last stage returns takes `broadcast_us` to the devices. Behind the last S it takes
    `reduce_us` until T may begin, and with the gradient of it the last stage's backward (Algorithm 2). `kept_bytes` are
    held from S to T, `parameter_bytes` throughout. All of this is for a pipeline of so many `devices`.
    """

    devices: Count
    logits_us: TimeUs
    weights_us: TimeUs
    fixed_us: TimeUs = 0
    broadcast_us: TimeUs = 0
    reduce_us: TimeUs = 0
    kept_bytes: Bytes = 0
    parameter_bytes: Bytes = 0


class ParallelSizes(Document):
    """Devices among which a layer is divided (`tensor`), and replicas of the whole pipeline (`data`)."""

    tensor: Count = 1
    data: Count = 1


class LayerProfile(Displayed, Document):
    """The layers of a model in order, and the memory, link and copy channels of the machine.

    `memory_bytes` is the whole memory of a device that the model may use, parameters included (None: no limit).
    Without `copies` nothing can be offloaded. `parallel`: the costs are those of one of so many devices a layer, and
    so many replicas of the pipeline share a step. `sequence` is the number of tokens in a sequence, if it is known.
    `spread`: the head where its rows lie on all devices; None: it is one of the layers, the last. `output_layer_alone`:
    there is nothing else in that one but a norm.
    """

    format: Literal["optpipe.layers/1"]
    name: str = Field(default="", max_length=200)
    microbatch_size: Count = 1
    layers: Annotated[list[Layer], Field(min_length=1)]
    memory_bytes: Bytes | None = None
    link: Link = Link()
    copies: HostCopies | None = None
    source: str = Field(default="", max_length=2000)
    sequence: Count | None = None
    parallel: ParallelSizes = ParallelSizes()
    spread: SpreadHead | None = None
    output_layer_alone: bool = True

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a layer profile. Raises InputError naming the field, the value and the limit."""
        return cls.from_data(read_document(path, MAX_PROFILE_BYTES, "layers"), str(path))

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        count = sum(layer.repeat for layer in self.layers)
        if count > MAX_LAYERS:
            raise reject("too_many_layers", f"layers hold {count} with repeats, but at most {MAX_LAYERS} are cut")
        return self

    def with_spread_head(self, devices: int) -> Self:
        """The profile with the rows of its last layer on so many devices, by estimate: no passes were measured.

        Each takes an equal share of the layer's times without its fixed part, of its activation without its input, and
        of its parameters. Exchanges take the bytes of the input and the latencies of a tree. All other layers are
        slower, by `SLOWED_FORWARD` and `SLOWED_BACKWARD`. Raises InputError for a profile of one layer, or whose last
        layer holds others than the head.
        """
        *others, head = self.each_layer
        if not others:
            raise InputError([Issue("layers", "too_few", "is one layer, whose rows alone make no stages.")])
        if not self.output_layer_alone:
            detail = (
                "is false: the last layer holds more than the output layer, so what its rows take is not known. Maybe "
                "profile a model whose output layer is one of its layers, as those of transformers have it."
            )
            raise InputError([Issue("output_layer_alone", "not_alone", detail)])

        def share_us(us: float) -> float:
            fixed_us = min(head.fixed_us, us)
            return fixed_us + (us - fixed_us) / devices

        sent_bytes, link = others[-1].output_bytes, self.link
        hops_us = ceil(log2(devices)) * link.latency_us
        sent_us = sent_bytes / link.bytes_per_us if link.bytes_per_us else 0.0
        spread = SpreadHead(
            devices=devices,
            logits_us=share_us(head.forward_us) + share_us(head.backward_input_us),
            weights_us=share_us(head.backward_weight_us),
            fixed_us=min(head.fixed_us, head.backward_weight_us),
            broadcast_us=hops_us + sent_us,
            reduce_us=3 * hops_us + sent_us,
            kept_bytes=2 * sent_bytes + ceil(max(0, head.activation_bytes - sent_bytes) / devices),
            parameter_bytes=ceil(head.parameter_bytes / devices),
        )
        last = self.layers[-1]
        layers = [*self.layers[:-1], *([last.replaced(repeat=last.repeat - 1)] if last.repeat > 1 else [])]
        slower = [
            one.replaced(
                forward_us=SLOWED_FORWARD * one.forward_us,
                backward_input_us=SLOWED_BACKWARD * one.backward_input_us,
                backward_weight_us=SLOWED_BACKWARD * one.backward_weight_us,
            )
            for one in layers
        ]
        return self.replaced(layers=slower, spread=spread)

    @cached_property
    def each_layer(self) -> tuple[Layer, ...]:
        """All layers one by one, with repeated layers expanded."""
        return tuple(layer for layer in self.layers for _ in range(layer.repeat))
