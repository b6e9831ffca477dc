"""Partition of a model: cut into stages, placed on devices, batched; and the Problem it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from optpipe.errors import InputError, Issue
from optpipe.layers import Layer, LayerProfile
from optpipe.problem import Objective, Problem

Kind = Literal["linear", "interleaved", "v"]


def placement(kind: Kind, devices: int, chunks: int) -> tuple[int, ...]:
    """The device of each stage, with `chunks` stages a device.

    `interleaved` goes round the devices; `v` goes along them and back, which puts the first and the last stage on one
    device and evens out memory (Controllable Memory, section 3). `linear` is the round with one chunk.
    """
    there, back = tuple(range(devices)), tuple(reversed(range(devices)))
    if kind == "v":
        return tuple(device for chunk in range(chunks) for device in (back if chunk % 2 else there))
    return there * chunks


def placement_name(kind: Kind, chunks: int) -> str:
    """`linear`, `interleaved-2`, `v`, `v-4`."""
    if kind == "linear" or (kind == "v" and chunks == 2):
        return kind
    return f"{kind}-{chunks}"


def placement_named(name: str) -> tuple[Kind, int]:
    """The kind and the chunks a device of a name. Raises ValueError that says what names there are."""
    kind, _, chunks = name.partition("-")
    if kind == "linear" and not chunks:
        return "linear", 1
    if kind == "v" and not chunks:
        return "v", 2
    if kind in ("interleaved", "v") and chunks.isdecimal() and 2 <= int(chunks) <= 64:
        return ("v" if kind == "v" else "interleaved"), int(chunks)
    raise ValueError(f"{name!r} is not a placement. Maybe one of {', '.join(USUAL)} (any number from 2 to 64).")


USUAL: Sequence[str] = ("linear", "interleaved-2", "interleaved-4", "v")
"""What is tried unless the caller says otherwise."""


def devices_of_stages(name: str, devices: int | None, stages: int | None, prefix: str = "--") -> tuple[int, ...]:
    """The device of each stage in the placement of that name. One of both numbers is enough.

    Raises InputError where the name is none or the numbers do not go together; it names the fields after `prefix`.
    """
    try:
        kind, chunks = placement_named(name)
    except ValueError as error:
        raise InputError([Issue(f"{prefix}placement", "unknown", str(error))]) from None
    if stages is None and devices is None:
        detail = f"is missing. Maybe {prefix}devices 4, or {prefix}stages."
        raise InputError([Issue(f"{prefix}devices", "missing", detail)])
    found = (stages or 0) // chunks if devices is None else devices
    if stages is not None and stages != found * chunks:
        of = f"{devices} devices" if devices is not None else "each device"
        detail = f"is {stages}, but placement {name} puts {chunks} on {'each of ' if devices is not None else ''}{of}."
        raise InputError([Issue(f"{prefix}stages", "wrong_count", detail)])
    return placement(kind, found, chunks)


@dataclass(frozen=True)
class Partition:
    """`sizes[s]` layers in a row make stage s, which sits on device `placement[s]`. Every stage has a layer."""

    sizes: tuple[int, ...]
    placement: tuple[int, ...]

    @property
    def devices(self) -> int:
        """How many devices the stages sit on."""
        return max(self.placement) + 1

    def cut(self, layers: Sequence[Layer]) -> list[Sequence[Layer]]:
        """The layers of each stage."""
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        return [layers[begin:end] for begin, end in pairwise(ends)]


@dataclass(frozen=True)
class Batching:
    """A global batch of `microbatches * microbatch_size` sequences."""

    microbatch_size: int
    microbatches: int


def scaled_us(layer: Layer, kind_us: float, scale: float) -> float:
    """A layer's time for a microbatch `scale` times the measured one: all but its fixed part grows."""
    fixed_us = min(layer.fixed_us, kind_us)
    return fixed_us + scale * (kind_us - fixed_us)


def work_us(layer: Layer, scale: float = 1.0) -> float:
    """F, B and W of a layer for one microbatch."""
    kinds = (layer.forward_us, layer.backward_input_us, layer.backward_weight_us)
    return sum(scaled_us(layer, kind_us, scale) for kind_us in kinds)


def parameter_bytes(profile: LayerProfile, layout: Partition) -> list[int]:
    """What stays on each device for good."""
    held = [0] * layout.devices
    for device, layers in zip(layout.placement, layout.cut(profile.each_layer), strict=True):
        held[device] += sum(layer.parameter_bytes for layer in layers)
    return held


def build_problem(
    profile: LayerProfile,
    layout: Partition,
    batching: Batching,
    *,
    offload: bool = False,
    objective: Objective = "makespan",
    name: str = "",
) -> Problem | None:
    """The scheduling problem of a layout, or None where parameters alone overfill a device.

    A stage's times and activations are the sums over its layers, its workspace the largest of theirs. Its activations
    may leave if `offload` is asked for, the profile says how fast the host's link is, and any of them can.
    """
    budgets = _budgets_bytes(profile, layout)
    if any(budget is not None and budget < 0 for budget in budgets):
        return None
    stages = layout.cut(profile.each_layer)
    data = {
        "format": "optpipe.problem/1",
        "name": name or profile.name,
        "microbatches": batching.microbatches,
        "objective": objective,
        "transfer_us": [_transfer_us(profile, layers[-1], batching) for layers in stages[:-1]] or 0,
        "devices": [{"memory_bytes": budget} for budget in budgets],
        "stages": [
            {"device": device} | _stage(profile, layers, batching, offload)
            for device, layers in zip(layout.placement, stages, strict=True)
        ],
        "source": profile.source,
    }
    if profile.copies:
        data |= {
            "copy_channels": profile.copies.channels.to_data(),
            "host_memory_bytes": profile.copies.host_memory_bytes,
        }
    return Problem.from_data(data)


def _budgets_bytes(profile: LayerProfile, layout: Partition) -> list[int | None]:
    if profile.memory_bytes is None:
        return [None] * layout.devices
    return [profile.memory_bytes - held for held in parameter_bytes(profile, layout)]


def _transfer_us(profile: LayerProfile, last: Layer, batching: Batching) -> float:
    link = profile.link
    if link.bytes_per_us is None:
        return link.latency_us
    return link.latency_us + last.output_bytes * _scale(profile, batching) / link.bytes_per_us


def _scale(profile: LayerProfile, batching: Batching) -> float:
    return batching.microbatch_size / profile.microbatch_size


def _stage(profile: LayerProfile, layers: Sequence[Layer], batching: Batching, offload: bool) -> dict[str, object]:
    """The fields of a stage but for its device."""
    scale = _scale(profile, batching)
    stage: dict[str, object] = {
        f"{kind}_us": sum(scaled_us(layer, getattr(layer, f"{kind}_us"), scale) for layer in layers)
        for kind in ("forward", "backward_input", "backward_weight")
    }
    # Rounded up layer by layer: each is a tensor of its own, and no sum of parts exceeds the sum of wholes.
    for field in ("activation_bytes", "backward_weight_bytes"):
        stage[field] = sum(_rounded_up(getattr(layer, field) * scale) for layer in layers)
    stage["workspace_bytes"] = {
        kind: max(_rounded_up(getattr(layer.workspace_bytes, kind) * scale) for layer in layers)
        for kind in ("F", "B", "W", "BW")
    }
    moved = sum(_rounded_up(layer.offload_bytes * scale) for layer in layers)
    if offload and moved and profile.copies:
        stage["offload"] = {
            "bytes": moved,
            "offload_us": moved / profile.copies.offload_bytes_per_us,
            "reload_us": moved / profile.copies.reload_bytes_per_us,
        }
    return stage


def _rounded_up(size: float) -> int:
    return -int(-size // 1)
