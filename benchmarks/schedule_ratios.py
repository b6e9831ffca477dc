"""Schedules one against another: throughput measured on GPUs, and simulated with the costs that papers profiled."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import instances
from optpipe.problem import Problem
from solver.solve import solve

FOLDER = Path(__file__).parent / "published"
BASE = "1f1b"
METHODS: Mapping[str, tuple[str, float]] = {"1f1b": ("1f1b", 1), "zb-1p": ("zb-auto", 1), "zb-2p": ("zb-auto", 2)}
"""Method and memory, in that of 1F1B, of the schedules of Zero Bubble (2401.10241, section 5)."""

PROFILES: Mapping[tuple[str, int, int], tuple[str, bool]] = {
    ("zb-1.5b", 8, 6): ("zb-1.5b-p8-m24-mem1", False),
    ("zb-6.2b", 8, 3): ("zb-6.2b-p8-m24-mem1", False),
    ("zb-6.2b", 16, 6): ("zbv-6.2b-p16-m48-mem1", True),
    ("zb-14.6b", 24, 2): ("zbv-14.6b-p24-m72-mem1", True),
}
"""Profile of a model, number of devices and microbatch size; True where it is of half a device's layers."""


@dataclass(frozen=True)
class Ratio:
    """Throughput of a schedule over that of 1F1B, on the same model, devices and microbatches."""

    model: str
    devices: int
    microbatches: int
    schedule: str
    measured: float
    predicted: float


def ratios(most_devices: int = 32) -> Iterator[Ratio]:
    """All pairs that were measured with a profiled microbatch size, on at most so many devices."""
    measured: dict[tuple[str, int, int, int], dict[str, float]] = defaultdict(dict)
    with (FOLDER / "steps.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["group"] == "zero-bubble" and row["microbatch"]:
                key = row["model"], int(row["pp"]), int(row["microbatch"]), int(row["microbatches"])
                measured[key][row["schedule"]] = float(
                    row["tokens_per_s_per_gpu"] or row["tokens_per_s_per_gpu_derived"]
                )
    for (model, devices, size, microbatches), found in sorted(measured.items()):
        if BASE not in found or (model, devices, size) not in PROFILES or devices > most_devices:
            continue
        base_us = _value_us(model, devices, size, microbatches, BASE)
        for schedule in sorted(set(found) & set(METHODS) - {BASE}):
            predicted = base_us / _value_us(model, devices, size, microbatches, schedule)
            yield Ratio(model, devices, microbatches, schedule, found[schedule] / found[BASE], predicted)


def _value_us(model: str, devices: int, size: int, microbatches: int, schedule: str) -> float:
    """Longest time of a device, as the optimizer's step of Zero Bubble waits for no other device."""
    name, halves = PROFILES[model, devices, size]
    method, memory = METHODS[schedule]
    profile = Problem.load(Path(instances.__file__).with_name(f"{name}.json"))
    stage = profile.stages[0].to_data() | {"device": 0}
    if halves:
        stage |= {key: 2 * value for key, value in stage.items() if key.endswith(("_us", "_bytes"))}
    budget = int(memory * devices * stage["activation_bytes"])
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "objective": "device_span",
            "transfer_us": profile.to_data()["transfer_us"],
            "devices": [{"memory_bytes": budget}] * devices,
            "stages": [stage | {"device": device} for device in range(devices)],
        }
    )
    return solve(problem, method).value_us
