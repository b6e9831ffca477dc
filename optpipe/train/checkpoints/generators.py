"""The states of torch's own generators, for layers that draw from them rather than from `RandomNumbers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def generator_states(hardware: torch.device) -> dict[str, str]:
    """Of this process, by kind of device, in hexadecimal digits."""
    states = {"cpu": torch.default_generator.get_state()}
    if hardware.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(hardware)
    return {kind: bytes(state.tolist()).hex() for kind, state in states.items()}


def as_tensors(states: Sequence[Mapping[str, str]]) -> dict[str, Tensor]:
    """The states of all processes by rank, as tensors of bytes named such as `rank-3.cpu`."""
    return {
        f"rank-{rank}.{kind}": torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
        for rank, kinds in enumerate(states)
        for kind, digits in kinds.items()
    }


def restore_generators(tensors: Mapping[str, Tensor], rank: int, hardware: torch.device) -> None:
    """Let this process's generators go on where that of its rank had come to."""
    torch.default_generator.set_state(tensors[f"rank-{rank}.cpu"])
    if hardware.type == "cuda" and f"rank-{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rank-{rank}.cuda"], hardware)
