"""Family of small problems, 4 devices and 8 microbatches, one drawn from each seed.

Placement, budget, op times, transfers, speed and share of the offload, channels and objective all vary. `python -m
instances.four_by_eight` writes the problems that `optpipe bench four-by-eight` solves.
"""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

from instances import INSTANCES
from optpipe.problem import Problem

DEVICES, MICROBATCHES, SEEDS = 4, 8, range(100)

PLACEMENTS = {
    "linear": [0, 1, 2, 3],
    "vshape": [0, 1, 2, 3, 3, 2, 1, 0],
    "interleaved2": [0, 1, 2, 3] * 2,
    "interleaved4": [0, 1, 2, 3] * 4,
}
"""Device of each stage."""

FILES = INSTANCES / "suites" / "problems" / "four-by-eight"


def four_by_eight(seed: int) -> Problem:
    """Draw the problem of a seed.

    Each device has F, B and W of about 120 us a microbatch, and activations of 48 bytes. Budgets are from one whole
    microbatch to all that 1F1B needs on the first device. A copy takes from a quarter of the time of F to 2.5 times as
    long, in each direction.
    """
    random = Random(f"4 x 8, {seed}")
    placement = random.choice(list(PLACEMENTS))
    devices = PLACEMENTS[placement]
    chunks = len(devices) // DEVICES
    chunk_us, chunk_bytes = 120 // chunks, 48 // chunks
    costs = random.choice(["equal", "by kind", "by stage"])
    kinds_us = [random.choice([0.7, 0.9, 1.1, 1.4]) if costs == "by kind" else 1.0 for _ in "FBW"]
    weight_share = random.choice([0.25, 0.5, 1])
    moved_share, copy_share = random.choice([0, 0.5, 1, 1]), random.choice([0.25, 0.5, 1, 1.5, 2.5])
    stages = []
    for s, device in enumerate(devices):
        of_stage = random.choice([0.8, 1.0, 1.2, 1.5]) if costs == "by stage" else 1.0
        forward_us, backward_us, weight_us = (round(chunk_us * share * of_stage) for share in kinds_us)
        copy_us, moved_bytes = round(copy_share * forward_us), round(moved_share * chunk_bytes)
        offload = {"bytes": moved_bytes, "offload_us": copy_us, "reload_us": copy_us}
        stage: dict[str, Any] = {
            "device": device,
            "forward_us": forward_us,
            "backward_input_us": backward_us,
            "backward_weight_us": weight_us,
            "activation_bytes": chunk_bytes,
            "backward_weight_bytes": round(weight_share * chunk_bytes),
            "offload": offload if moved_bytes and s < len(devices) - 1 else None,
        }
        stages.append(stage)
    share = random.choice([0.25, 0.375, 0.5, 0.75, 1])
    transfer_us = random.choice([0, 0, 6, 24])
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "name": f"{placement}-{seed}",
            "microbatches": MICROBATCHES,
            "objective": random.choice(["makespan", "device_span"]),
            "transfer_us": [0 if a == b else transfer_us for a, b in pairwise(devices)],
            "devices": [{"memory_bytes": round(share * DEVICES * chunks * chunk_bytes)}] * DEVICES,
            "stages": stages,
            "copy_channels": random.choice(
                [{"duplex": True}, {"duplex": False}, {"duplex": False, "shared_by": [[0, 1], [2, 3]]}]
            ),
        }
    )


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for seed in SEEDS:
        (FILES / f"{seed:02}.json").write_text(json.dumps(four_by_eight(seed).to_data()) + "\n")
