"""Layers as those of measured models are, drawn at random: small enough that every cut of them can be tried."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random
from typing import Any

from optpipe.layers import LayerProfile
from optpipe.placement import parse_placement, placement


def drawn_model(seed: int) -> tuple[LayerProfile, tuple[int, ...], int]:
    """A model as they are measured: uneven layers, a light or large embedding, a heavy head, and often tight memory."""
    rng = Random(seed)
    kind, chunks = parse_placement(rng.choice(["linear", "linear", "linear", "v", "interleaved-2"]))
    devices = rng.randint(3, 5) if kind == "linear" else rng.randint(2, 3)
    count, uneven = rng.randint(chunks * devices + 1, 11), rng.random() < 0.6
    each: list[dict[str, Any]] = []
    for _ in range(count - 2):
        time = rng.randint(500, 2000) if uneven else 1000
        sizes = {"activation_bytes": rng.randint(80, 120), "backward_weight_bytes": rng.randint(30, 70)}
        times = {"forward_us": time, "backward_input_us": round(1.1 * time), "backward_weight_us": round(0.9 * time)}
        each.append(times | sizes | {"parameter_bytes": rng.randint(800, 1200), "output_bytes": 20})
        if seed % 4 == 3:  # layers of experts, which hide their exchanges in blocks
            moved = time * rng.uniform(0.05, 0.25)
            parts = {
                "forward_us": [0.4 * time, moved, 0.1 * time, moved],
                "backward_us": [time, moved, time / 2, moved],
            }
            each[-1]["parts"] = parts
    zero = {"forward_us": rng.randint(0, 100), "backward_input_us": 0, "backward_weight_us": rng.randint(0, 100)}
    more = {"activation_bytes": 5, "backward_weight_bytes": 2, "parameter_bytes": rng.randint(500, 3000)}
    each.insert(0, zero | more | {"output_bytes": 20})
    head = dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), rng.randint(500, 3000))
    more = {"activation_bytes": rng.randint(50, 300), "backward_weight_bytes": 50}
    each.append(head | more | {"parameter_bytes": rng.randint(500, 3000)})
    data: dict[str, Any] = {"format": "optpipe.layers/1", "layers": each}
    data["link"] = {"latency_us": rng.choice([0, 50, 200]), "bytes_per_us": rng.choice([None, 1])}
    if rng.random() < 0.6:
        parameters, held = (sum(one[name] for one in each) for name in ("parameter_bytes", "activation_bytes"))
        room = rng.uniform(1.5, devices + 1)
        data["memory_bytes"] = int((1.15 * parameters + room * held) / devices) + 300
    microbatches = devices * rng.randint(1, 4)
    if seed % 5 == 4:  # a head whose rows lie on all devices
        times = {name: rng.randint(100, 600) for name in ("logits_us", "weights_us", "reduce_us", "broadcast_us")}
        data["spread"] = times | {"devices": devices, "kept_bytes": rng.randint(0, 40), "parameter_bytes": 50}
    return LayerProfile.from_data(data), placement(kind, devices, chunks), microbatches


def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All numbers of layers of the stages."""
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *inner, layers)))
