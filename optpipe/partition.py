"""Partition of a model into stages on devices, its batching, and the resulting Problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from optpipe.errors import InputError, Issue
from optpipe.fields import MAX_NAME
from optpipe.layers import HostCopies, Layer, LayerProfile, SpreadHead
from optpipe.mode_names import (
    WITH_OFFLOAD,
    Recomputed,
    is_shorthand,
    parse_recomputed,
    without_shorthand,
)
from optpipe.problem import Objective, Problem
from optpipe.sequences import DECIMALS, slice_times_us
from optpipe.stage import Workspace
from optpipe.units import count_text


@dataclass(frozen=True)
class Partition:
    """Consecutive layers as stages: stage s has `sizes[s]` (at least 1) layers and is on device `placement[s]`."""

    sizes: tuple[int, ...]
    placement: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return max(self.placement) + 1

    def cut(self, layers: Sequence[Layer]) -> list[Sequence[Layer]]:
        """Split the layers into those of each stage."""
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        return [layers[begin:end] for begin, end in pairwise(ends)]


@dataclass(frozen=True)
class Batching:
    """A global batch of `microbatches * microbatch_size` sequences."""

    microbatch_size: int
    microbatches: int


def scaled_us(layer: Layer | SpreadHead, kind_us: float, scale: float) -> float:
    """Time of a layer for a microbatch `scale` times the measured one: all but its fixed part is proportional."""
    fixed_us = min(layer.fixed_us, kind_us)
    return fixed_us + scale * (kind_us - fixed_us)


def work_us(layer: Layer, scale: float = 1.0) -> float:
    """Time of F, B and W of a layer for one microbatch."""
    kinds = (layer.forward_us, layer.backward_input_us, layer.backward_weight_us)
    return sum(scaled_us(layer, kind_us, scale) for kind_us in kinds)


def parameter_bytes(profile: LayerProfile, layout: Partition) -> list[int]:
    """Parameter bytes on each device."""
    held = [profile.spread.parameter_bytes if profile.spread else 0] * layout.devices
    for device, layers in zip(layout.placement, layout.cut(profile.each_layer), strict=True):
        held[device] += sum(layer.parameter_bytes for layer in layers)
    return held


_CUT = re.compile(r", cut (\d+(?:,\d+)*)$")
_PREDICTED = re.compile(r", mtp(\d{1,3})(?=,|$)", re.ASCII)


def stage_sizes(profile: LayerProfile, layout: Partition) -> list[int]:
    """Layers of each stage. A head whose rows lie on all devices counts in the last, where its module is."""
    return [*layout.sizes[:-1], layout.sizes[-1] + (profile.spread is not None)]


def name_with_cut(profile: LayerProfile, layout: Partition) -> str:
    """Name of the problem of a model that is cut so."""
    return name_with_sizes(profile.name, stage_sizes(profile, layout))


def name_with_sizes(name: str, sizes: Sequence[int]) -> str:
    """Name of the problem of a model with so many layers in its stages; its own where that is too long."""
    full = f"{name}, cut {','.join(map(str, sizes))}"
    return full if name and len(full) <= MAX_NAME else name


def cut_in_name(name: str) -> str | None:
    """The cut in the name of a planned problem, such as "2,3"; None where it has none."""
    found = _CUT.search(name)
    return found[1] if found else None


def name_with_predicted(name: str, predicted: int) -> str:
    """Name of the layers of a model with so many layers of multi-token prediction in front of its head."""
    return f"{name}, mtp{predicted}" if predicted else name


def predicted_in_name(name: str) -> int:
    """Layers of multi-token prediction in the name of layers, or of a problem made of them; 0 where it has none."""
    found = _PREDICTED.search(name)
    return int(found[1]) if found else 0


def build_problem(
    profile: LayerProfile,
    layout: Partition,
    batching: Batching,
    *,
    offload: bool = False,
    modes: Sequence[str] = (),
    objective: Objective = "makespan",
    name: str = "",
    slices: Sequence[int] = (),
    factors: Sequence[Mapping[str, float]] = (),
) -> Problem | None:
    """Build the scheduling problem of a layout; None if parameters alone exceed the memory of a device.

    A stage's times and activations are the sums over its layers, its workspace is the maximum over them. It may offload
    if `offload` is set, the profile has `copies`, and some of its layers can. `modes` names activation modes that
    recompute (`check_layer_modes`); a stage has those by which it saves memory. `slices` are the tokens of each slice
    of a sequence (`slice_lengths`; none or one: whole), `factors` those of microbatches in a free order. Raises
    InputError where the profile has a head on another number of devices.
    """
    budgets = [
        None if profile.memory_bytes is None else profile.memory_bytes - held
        for held in parameter_bytes(profile, layout)
    ]
    if any(budget is not None and budget < 0 for budget in budgets):
        return None
    scale = batching.microbatch_size / profile.microbatch_size
    link = profile.link
    stages = layout.cut(profile.each_layer)
    befores = [None, *(layers[-1] for layers in stages[:-1])]
    data: dict[str, Any] = {
        "format": "optpipe.problem/1",
        "name": name or profile.name,
        "microbatches": batching.microbatches,
        "objective": objective,
        "transfer_us": [
            link.latency_us
            if link.bytes_per_us is None
            else link.latency_us + layers[-1].output_bytes * scale / link.bytes_per_us
            for layers in stages[:-1]
        ]
        or 0,
        "devices": [{"memory_bytes": budget} for budget in budgets],
        "stages": [
            {"device": device}
            | _stage(profile, layers, scale, offload)
            | _modes(profile, layers, scale, received.output_bytes if received else 0, modes)
            for device, layers, received in zip(layout.placement, stages, befores, strict=True)
        ],
        "source": profile.source,
    }
    if len(slices) > 1:
        data |= _in_slices(profile, stages, scale, slices, data)
    elif profile.spread is None and (overlaps := _overlaps(stages, layout.placement, scale, data["stages"])):
        data["overlaps"] = overlaps
    if profile.spread is not None:
        data |= _passes(profile.spread, layout, scale)
    if factors:
        data |= {"microbatch_factors": list(factors), "microbatch_order": "free"}
    if profile.copies:
        data |= {
            "copy_channels": profile.copies.channels.to_data(),
            "host_memory_bytes": profile.copies.host_memory_bytes,
        }
    return Problem.from_data(data)


def _passes(head: SpreadHead, layout: Partition, scale: float) -> dict[str, Any]:
    """Spread passes of a head whose rows lie on all devices, and the gate of the last stage's backward."""
    count, last = layout.devices, len(layout.sizes) - 1
    if count != head.devices:
        detail = f"is {head.devices}, but the pipeline has {count}. Maybe --devices {head.devices}."
        raise InputError([Issue("spread.devices", "other_devices", detail)])
    behind = {"pass": "S", "us": scale * head.reduce_us}
    logits_us, weights_us = ([scaled_us(head, us, scale)] * count for us in (head.logits_us, head.weights_us))
    return {
        "spread": [
            {"name": "S", "us": logits_us, "kept_bytes": [_rounded_up(head.kept_bytes * scale)] * count}
            | {"after": [{"op": "F", "stage": last, "us": scale * head.broadcast_us}]},
            {"name": "T", "us": weights_us, "frees": "S", "after": [behind]},
        ],
        "gates": [{"op": "B", "stage": last, "after": [behind]}],
    }


def parts_us(layer: Layer, scale: float) -> tuple[list[float], list[float]]:
    """Times of attention, dispatch, experts and combine of a layer, in F and in the backward; 0 where it has no parts.

    In a larger microbatch they grow as its passes do.
    """
    if layer.parts is None:
        return [0.0] * 4, [0.0] * 4
    backward_us = sum(scaled_us(layer, own_us, scale) for own_us in (layer.backward_input_us, layer.backward_weight_us))
    forward = scaled_us(layer, layer.forward_us, scale) / layer.forward_us if layer.forward_us else 0.0
    backward = backward_us / layer.backward_us if layer.backward_us else 0.0
    return [us * forward for us in layer.parts.forward_us], [us * backward for us in layer.parts.backward_us]


def _overlaps(
    stages: Sequence[Sequence[Layer]], placement: Sequence[int], scale: float, costs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Blocks that are shorter than their two passes, with their times (field `overlaps` of a problem).

    The first layer with parts of the forward runs with the last one of the backward, and so on. Attention of one pass
    runs while the other combines, experts while it dispatches: of each such pair the longer counts (MindSpeed's order,
    and that of `overlap_moe_expert_parallel_comm` in Megatron-LM). All else runs by itself.
    """
    parts = [[parts_us(layer, scale) for layer in layers if layer.parts] for layers in stages]
    overlaps = []
    for f, b in product(range(len(stages)), repeat=2):
        if placement[f] != placement[b]:
            continue
        saved_us = sum(
            min(mine, others)
            for (forward, _), (_, backward) in zip(parts[f], reversed(parts[b]), strict=False)
            for mine, others in zip(forward, (backward[k] for k in HIDDEN_BY), strict=True)
        )
        forward_us, backward_us = costs[f]["forward_us"], costs[b]["backward_input_us"] + costs[b]["backward_weight_us"]
        if saved_us > 0:
            us = max(forward_us, backward_us, forward_us + backward_us - saved_us)
            overlaps.append({"forward_stage": f, "backward_stage": b, "us": us})
    return overlaps


HIDDEN_BY = (3, 2, 1, 0)
"""Parts of a backward that run while attention, dispatch, experts and combine of a forward do."""


def _stage(profile: LayerProfile, layers: Sequence[Layer], scale: float, offload: bool) -> dict[str, object]:
    """Fields of a stage without its device; `scale` is the microbatch size relative to the profile's."""
    stage: dict[str, object] = {
        f"{kind}_us": sum(scaled_us(layer, getattr(layer, f"{kind}_us"), scale) for layer in layers)
        for kind in ("forward", "backward_input", "backward_weight")
    }
    # Rounded up layer by layer: each layer has tensors of its own, and offloaded bytes never exceed activation bytes.
    for field in ("activation_bytes", "backward_weight_bytes"):
        stage[field] = sum(_rounded_up(getattr(layer, field) * scale) for layer in layers)
    stage["workspace_bytes"] = {
        kind: max(_rounded_up(getattr(layer.workspace_bytes, kind) * scale) for layer in layers)
        for kind in Workspace.model_fields
    }
    moved = sum(_rounded_up(layer.offload_bytes * scale) for layer in layers)
    if offload and moved and profile.copies:
        stage["offload"] = _copies(profile.copies, moved)
    return stage


def _copies(copies: HostCopies, moved_bytes: int) -> dict[str, float]:
    out, back = copies.offload_bytes_per_us, copies.reload_bytes_per_us
    return {"bytes": moved_bytes, "offload_us": moved_bytes / out, "reload_us": moved_bytes / back}


def check_layer_modes(profile: LayerProfile, modes: Sequence[str], field: str) -> None:
    """Raise InputError for a mode that does not follow from the costs of layers: parts of them, or of no layer."""
    blocks = sum(layer.repeat for layer in profile.layers if layer.recomputation)
    for name in modes:
        recomputed = parse_recomputed(name)
        if recomputed is None and not is_shorthand(name):
            detail = f"has {name!r}, but how layers leave in low precision is not known by layer. Maybe offload."
        elif recomputed and recomputed.part:
            detail = f"has {name!r}, but parts of layers have no costs of their own. Maybe selective."
        elif (recomputed is None or not recomputed.whole) and not blocks:
            detail = (
                f"has {name!r}, but no layer says what it keeps if it is recomputed (layers[].recomputation). Maybe "
                "measure them: optpipe profile --format layers --modes selective."
            )
        elif recomputed and max(recomputed.blocks or 0, recomputed.group) > blocks > 0:
            detail = f"has {name!r}, but {count_text(blocks, 'layer')} of the profile can be recomputed. Maybe blocks."
        elif name.endswith(WITH_OFFLOAD) and profile.copies is None:
            detail = f"has {name!r}, but the profile has no rate of copies to the host. Maybe add copies."
        else:
            continue
        raise InputError([Issue(field, "not_by_layers", detail)])


def _modes(
    profile: LayerProfile, layers: Sequence[Layer], scale: float, received_bytes: int, modes: Sequence[str]
) -> dict[str, object]:
    """Activation modes of a stage that receives so many bytes, in a dict unless it has none."""
    blocks = sum(layer.recomputation is not None for layer in layers)
    entries = []
    for name in without_shorthand(modes, blocks):
        recomputed = parse_recomputed(name)
        assert recomputed is not None, "checked before"
        if recomputed.whole:
            entry = _whole_stage(layers, scale, _rounded_up(received_bytes * scale))
        elif blocks and blocks >= max(recomputed.blocks or 0, recomputed.group):
            entry = _blocks(layers, scale, recomputed)
        else:
            continue
        moved = entry.pop("moved_bytes")
        if entry["kept_bytes"] >= sum(_rounded_up(layer.activation_bytes * scale) for layer in layers):
            continue
        if name.endswith(WITH_OFFLOAD):
            if not moved or profile.copies is None:
                continue
            entry |= {"offload": _copies(profile.copies, moved)}
        entries.append({"name": name} | entry)
    return {"modes": entries} if entries else {}


def _whole_stage(layers: Sequence[Layer], scale: float, received_bytes: int) -> dict[str, Any]:
    """A mode that keeps what the stage receives alone, with the bytes that may leave."""
    held = [_rounded_up(layer.activation_bytes * scale) for layer in layers]
    kept = min(received_bytes, sum(held))
    again = sum(held) - kept
    return {
        "kept_bytes": kept,
        "recompute_us": sum(scaled_us(layer, layer.forward_us, scale) for layer in layers),
        "forward_workspace_bytes": min(max(held), again),  # F drops what a layer has made when the next one runs
        "segment_bytes": again,
        "moved_bytes": kept,
    }


def _blocks(layers: Sequence[Layer], scale: float, recomputed: Recomputed) -> dict[str, Any]:
    """A mode in which layers that can be are recomputed, one at a time or in groups.

    While the backward is at a layer, those before it keep what the mode keeps, and those of its own group all; of those
    behind it what W needs is there, if B and W are apart.
    """
    kept: list[int] = []
    made: list[int] = []
    of_group: list[int] = []
    moved, recompute_us, blocks = 0, 0.0, 0
    for before, layer in zip([None, *layers], layers, strict=False):
        again = layer.recomputation if recomputed.blocks is None or blocks < recomputed.blocks else None
        begins = again is None or blocks % recomputed.group == 0
        blocks += again is not None
        held = layer if again is None else again
        stays = held.activation_bytes if isinstance(held, Layer) else held.kept_bytes
        made_anew = 0 if begins or before is None else _rounded_up(before.output_bytes * scale)  # its input
        kept.append(max(0, _rounded_up(stays * scale) - made_anew))
        moved += max(0, _rounded_up(held.offload_bytes * scale) - made_anew)
        made.append(_rounded_up(layer.activation_bytes * scale) - kept[-1])
        of_group.append(made[-1] if begins else of_group[-1] + made[-1])
        if again is not None:
            own_us = layer.forward_us if again.recompute_us is None else again.recompute_us
            recompute_us += scaled_us(layer, own_us, scale)
    segment = workspace = behind_bytes = for_weights = 0
    for layer, stays, own, alive in zip(*map(reversed, (layers, kept, made, of_group)), strict=True):
        segment = max(segment, alive - behind_bytes + for_weights)
        workspace = max(workspace, own - behind_bytes)
        behind_bytes += stays
        for_weights += _rounded_up(layer.backward_weight_bytes * scale)
    return {
        "kept_bytes": sum(kept),
        "recompute_us": recompute_us,
        "forward_workspace_bytes": workspace,
        "segment_bytes": segment,
        "moved_bytes": min(moved, sum(kept)),
    }


def _in_slices(
    profile: LayerProfile, stages: Sequence[Sequence[Layer]], scale: float, lengths: Sequence[int], data: dict[str, Any]
) -> dict[str, Any]:
    """Fields of the problem `data` of whole sequences that change where these are cut into slices.

    Costs become those of a mean slice, with factors. Keys and values stay on the device, since later slices read them:
    no mode discards or offloads them.
    """
    n, sequence = len(lengths), sum(lengths)
    sizes = [round(n * length / sequence, DECIMALS) for length in lengths]
    cut, transfers = [], []
    for s, (stage, layers) in enumerate(zip(data["stages"], stages, strict=True)):
        kv = _rounded_up(sum(layer.attention.key_value_bytes for layer in layers if layer.attention) * scale / n)
        factors: dict[str, list[float]] = {"bytes": sizes}
        one = _scaled_sizes(stage, n)
        for kind in ("forward", "backward_input", "backward_weight"):
            times_us = [
                sum(times) for times in zip(*(_slices_of(layer, kind, scale, lengths) for layer in layers), strict=True)
            ]
            mean_us = sum(times_us) / n
            one[f"{kind}_us"] = mean_us
            factors[kind] = [round(time_us / mean_us, DECIMALS) if mean_us else 1 for time_us in times_us]
        factors["recompute"] = factors["forward"]
        ratio = one["forward_us"] / stage["forward_us"] if stage["forward_us"] else 1 / n
        _keep(one, max(0, one["activation_bytes"] - kv))
        modes = []
        for mode in one.pop("modes", ()):
            mode["recompute_us"] *= ratio
            mode["kept_bytes"] += kv
            leaves = "offload" in mode
            _keep(mode, mode["kept_bytes"] - kv)
            if mode["kept_bytes"] < one["activation_bytes"] and leaves == ("offload" in mode):
                modes.append(mode)
        one |= {"modes": modes} if modes else {}
        sent_bytes = (layers if s < len(stages) - 1 else stages[s - 1])[-1].output_bytes * scale
        latency_us, rate = profile.link.latency_us, profile.link.bytes_per_us
        delays_us = [latency_us + (sent_bytes * length / sequence / rate if rate else 0) for length in lengths]
        mean_us = sum(delays_us) / n
        transfers.append(mean_us)
        factors["transfer"] = [round(delay_us / mean_us, DECIMALS) if mean_us else 1 for delay_us in delays_us]
        own = {name: values for name, values in factors.items() if any(value != 1 for value in values)}
        cut.append(one | {"slice_factors": own, "slice_gradient_bytes": kv})
    common = cut[0]["slice_factors"]
    alike = all(stage["slice_factors"] == common for stage in cut)
    return {
        "transfer_us": transfers[:-1] or 0,
        "stages": [{k: v for k, v in stage.items() if not (alike and k == "slice_factors")} for stage in cut],
        # The runtime cuts sequences by these sizes, whatever stages have beside.
        "slices": {"count": n, "factors": common if alike else {"bytes": sizes}},
    }


def _slices_of(layer: Layer, kind: str, scale: float, lengths: Sequence[int]) -> list[float]:
    """Times of one layer's op for each slice."""
    whole_us = getattr(layer, f"{kind}_us")
    fixed_us = min(layer.fixed_us, whole_us)
    attention_us, slice_us = 0.0, 0.0
    if layer.attention:
        attention_us = scale * getattr(layer.attention, f"{kind}_us")
        slice_us = getattr(layer.attention, f"{kind}_slice_us")
    times_us = slice_times_us(scaled_us(layer, whole_us, scale), fixed_us, attention_us, lengths)
    return [time_us + slice_us for time_us in times_us]


def _scaled_sizes(fields: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """Fields of a stage or a mode with every size a part of what it was, rounded up."""
    scaled: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "modes":
            scaled[name] = [_scaled_sizes(mode, parts) for mode in value]
        elif name == "workspace_bytes" and isinstance(value, Mapping):
            scaled[name] = {kind: -(-size // parts) for kind, size in value.items()}
        elif name == "offload":
            scaled[name] = _fewer_bytes(value, -(-value["bytes"] // parts))
        else:
            scaled[name] = -(-value // parts) if name.endswith("_bytes") else value
    return scaled


def _keep(fields: dict[str, Any], most_bytes: int) -> None:
    """Let at most so many bytes of a stage or a mode leave; without any it has no offload."""
    if "offload" in fields:
        fields["offload"] = _fewer_bytes(fields["offload"], most_bytes)
        if not fields["offload"]["bytes"]:
            del fields["offload"]


def _fewer_bytes(offload: Mapping[str, float], most_bytes: int) -> dict[str, float]:
    """Copies of at most so many bytes, at the same rates."""
    size = min(most_bytes, offload["bytes"])
    return {"bytes": size} | {name: offload[name] * size / offload["bytes"] for name in ("offload_us", "reload_us")}


def _rounded_up(size: float) -> int:
    return -int(-size // 1)
