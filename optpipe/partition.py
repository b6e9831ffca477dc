"""Layouts: where a model is cut into stages, and on which device each stage sits; and the Problem that this gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from optpipe.layers import Layer, LayerProfile
from optpipe.problem import Objective, Problem


@dataclass(frozen=True)
class Layout:
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


def parameter_bytes(profile: LayerProfile, layout: Layout) -> list[int]:
    """What stays on each device for good."""
    held = [0] * layout.devices
    for device, layers in zip(layout.placement, layout.cut(profile.each_layer), strict=True):
        held[device] += sum(layer.parameter_bytes for layer in layers)
    return held


def problem_of(
    profile: LayerProfile,
    layout: Layout,
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


def _budgets_bytes(profile: LayerProfile, layout: Layout) -> list[int | None]:
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
