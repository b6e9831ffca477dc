"""Schedules one against another: throughput measured on GPUs, and simulated with the costs that papers profiled."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import instances
from optpipe.problem import Problem
from solver.solve import solve

FOLDER = Path(__file__).parent / "published"
METHODS: Mapping[str, tuple[str, float]] = {
    "1f1b": ("1f1b", 1),
    "zb-1p": ("zb-auto", 1),
    "zb-2p": ("zb-auto", 2),
    "zb-v": ("zb-v", 1),
}
"""Method and memory, in that of 1F1B, of the schedules of Zero Bubble (2401.10241, section 5)."""

PROFILES: Mapping[tuple[str, int, int], tuple[str, bool]] = {
    ("zb-1.5b", 8, 6): ("zb-1.5b-p8-m24-mem1", False),
    ("zb-6.2b", 8, 3): ("zb-6.2b-p8-m24-mem1", False),
    ("zb-6.2b", 16, 6): ("zbv-6.2b-p16-m48-mem1", True),
    ("zb-14.6b", 24, 2): ("zbv-14.6b-p24-m72-mem1", True),
}
"""Profile of a model, number of devices and microbatch size; True where it is of half a device's layers."""

OFFLOADING: Mapping[tuple[str, int, int], str] = {
    ("po-10.5b", 8, 4096): "po-10.5b-4k-d8-v5-m64-mem0.5",
    ("po-10.5b", 8, 16384): "po-10.5b-16k-d8-v5-m64-mem0.5",
    ("po-18.1b", 16, 4096): "po-18.1b-4k-d16-v3-m128-mem0.5",
    ("po-18.1b", 16, 16384): "po-18.1b-16k-d16-v3-m128-mem0.5",
}
"""Profile of a model, number of devices and sequence of PipeOffload."""

VOCABULARY_DEVICES, VOCABULARY_LAYERS, VOCABULARY_MICROBATCHES = 8, 4, 128
SLOWED = {2048: (1.087, 1.074), 4096: (1.10, 1.07)}
"""F and B of layers under vocabulary parallelism over those without, at a vocabulary of 262,144 (by sequence)."""
LARGEST_VOCABULARY = 262_144


@dataclass(frozen=True)
class Ratio:
    """Throughput of a schedule over that of `base`, on the same model, devices and microbatches."""

    source: str
    model: str
    devices: int
    microbatches: int
    base: str
    schedule: str
    measured: float
    predicted: float


def ratios(most_devices: int = 32) -> Iterator[Ratio]:
    """All pairs that were measured with profiled costs, on at most so many devices."""
    yield from _zero_bubble(most_devices)
    yield from _pipe_offload(most_devices)
    yield from _vocabulary_parallelism()


def _steps(group: str) -> Iterator[dict[str, str]]:
    with (FOLDER / "steps.csv").open(encoding="utf-8", newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["group"] == group)


def _zero_bubble(most_devices: int) -> Iterator[Ratio]:
    measured: dict[tuple[str, int, int, int], dict[str, float]] = defaultdict(dict)
    for row in _steps("zero-bubble"):
        if row["microbatch"]:
            key = row["model"], int(row["pp"]), int(row["microbatch"]), int(row["microbatches"])
            measured[key][row["schedule"]] = float(row["tokens_per_s_per_gpu"] or row["tokens_per_s_per_gpu_derived"])
    for (model, devices, size, microbatches), found in sorted(measured.items()):
        if "1f1b" not in found or (model, devices, size) not in PROFILES or devices > most_devices:
            continue
        base_us = _zero_bubble_us(model, devices, size, microbatches, "1f1b")
        for schedule in sorted(set(found) & set(METHODS) - {"1f1b"}):
            predicted = base_us / _zero_bubble_us(model, devices, size, microbatches, schedule)
            gain = found[schedule] / found["1f1b"]
            yield Ratio("Zero Bubble", model, devices, microbatches, "1f1b", schedule, gain, predicted)


def _zero_bubble_us(model: str, devices: int, size: int, microbatches: int, schedule: str) -> float:
    """Longest time of a device, as the optimizer's step of Zero Bubble waits for no other device."""
    name, halves = PROFILES[model, devices, size]
    method, memory = METHODS[schedule]
    profile = _instance(name)
    stage = profile.stages[0].to_data() | {"device": 0}
    on_a_v = schedule == "zb-v"
    placement = [*range(devices)] + ([*range(devices)][::-1] if on_a_v else [])
    factor = (2 if halves else 1) / (2 if on_a_v else 1)
    stage |= {key: factor * stage[key] for key in ("forward_us", "backward_input_us", "backward_weight_us")}
    stage |= {key: int(factor * stage[key]) for key in ("activation_bytes", "backward_weight_bytes")}
    budget = int(memory * len(placement) * stage["activation_bytes"])
    return _value_us(profile, microbatches, [stage | {"device": device} for device in placement], budget, method)


def _pipe_offload(most_devices: int) -> Iterator[Ratio]:
    """Over PO-H, which half of all activations leave: it alone was measured with every profile."""
    measured: dict[tuple[str, int, int], dict[str, float]] = defaultdict(dict)
    for row in _steps("pipeoffload"):
        measured[row["model"], int(row["pp"]), int(row["sequence"])][row["schedule"]] = float(row["mfu"])
    for key, name in OFFLOADING.items():
        model, devices, sequence = key
        if devices > most_devices:
            continue
        profile = _instance(name)
        stages = [stage.to_data() for stage in profile.stages]
        base_us = _value_us(profile, profile.microbatches, stages, None, "po-h")
        for schedule in sorted(set(measured[key]) & {"gis", "gis-h", "po-f"}):
            predicted = base_us / _value_us(profile, profile.microbatches, stages, None, schedule)
            gain = measured[key][schedule] / measured[key]["po-h"]
            model_text = f"{model}, {sequence} tokens"
            yield Ratio("PipeOffload", model_text, devices, profile.microbatches, "po-h", schedule, gain, predicted)


def _vocabulary_parallelism() -> Iterator[Ratio]:
    """Over 1F1B with the head on the last of its stages, all of which have as many layers."""
    with (FOLDER / "vocabulary_passes.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            ms = {name: float(value) for name, value in row.items()}
            vocabulary, sequence = int(row["vocabulary"]), int(row["sequence"])
            base_ms = _one_f_one_b_ms(ms, [VOCABULARY_LAYERS] * VOCABULARY_DEVICES)
            found = {}
            if vocabulary == LARGEST_VOCABULARY:  # the head is more than five layers, and has a device to itself
                found["redistributed"] = _one_f_one_b_ms(ms, [5, 5, 5, 5, 4, 4, 4, 0])
            for algorithm in (1, 2):
                found[f"vocab-{algorithm}"] = _vocabulary_ms(ms, algorithm, vocabulary, sequence)
            for schedule, predicted_ms in found.items():
                gain = ms["step_base_ms"] / ms[f"step_{schedule.removeprefix('vocab-')}_ms"]
                model = f"vp-4b, {sequence} tokens, vocabulary {vocabulary // 1024}k"
                counts = VOCABULARY_DEVICES, VOCABULARY_MICROBATCHES
                yield Ratio("Vocabulary Parallelism", model, *counts, "1f1b", schedule, gain, base_ms / predicted_ms)


def _one_f_one_b_ms(ms: Mapping[str, float], layers: list[int]) -> float:
    stages = []
    for device, count in enumerate(layers):
        head = device == VOCABULARY_DEVICES - 1
        forward = count * ms["layer_forward_ms"] + head * ms["head_forward_ms"]
        backward = count * ms["layer_backward_ms"] + head * ms["head_backward_ms"]
        passes = {"forward_us": 1e3 * forward, "backward_input_us": 1e3 * backward, "backward_weight_us": 0}
        stages.append({"device": device, "activation_bytes": 1, "backward_weight_bytes": 0} | passes)
    data = {"stages": stages, "devices": [{"memory_bytes": None}] * len(stages), "transfer_us": 1e3 * ms["hop_ms"]}
    data |= {"format": "optpipe.problem/1", "microbatches": VOCABULARY_MICROBATCHES}
    return solve(Problem.from_data(data), "1f1b").value_us / 1e3


def _vocabulary_ms(ms: Mapping[str, float], algorithm: int, vocabulary: int, sequence: int) -> float:
    """The closed form of 1F1B with vocabulary passes: they are in each interval, and not in warm-up and drain.

    The simulator has no passes over all devices. Of the second algorithm the last pass, a third, may wait.
    """
    slowed = SLOWED[sequence] if vocabulary == LARGEST_VOCABULARY else (1.0, 1.0)
    stage = VOCABULARY_LAYERS * (slowed[0] * ms["layer_forward_ms"] + slowed[1] * ms["layer_backward_ms"])
    passes = ms[f"passes_{algorithm}_ms"]
    saved = passes / 3 if algorithm == 2 else 0.0
    interval = stage + passes + ms["input_ms"]
    return VOCABULARY_MICROBATCHES * interval + (VOCABULARY_DEVICES - 1) * stage - saved


def _instance(name: str) -> Problem:
    return Problem.load(Path(instances.__file__).with_name(f"{name}.json"))


def _value_us(
    profile: Problem, microbatches: int, stages: list[dict[str, Any]], budget: int | None, method: str
) -> float:
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "objective": "device_span",
            "transfer_us": profile.to_data()["transfer_us"],
            "devices": [{"memory_bytes": budget}] * len({stage["device"] for stage in stages}),
            "stages": stages,
        }
    )
    return solve(problem, method).value_us
