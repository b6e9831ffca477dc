"""Layer profiles for tests."""

from __future__ import annotations

from typing import Any

from optpipe.layers import LayerProfile

BLOCK: dict[str, Any] = {
    "name": "block",
    "forward_us": 10,
    "backward_input_us": 10,
    "backward_weight_us": 10,
    "activation_bytes": 100,
    "backward_weight_bytes": 50,
    "offload_bytes": 80,
    "parameter_bytes": 1000,
    "output_bytes": 20,
}


ATTENDING: dict[str, Any] = BLOCK | {
    "attention": {"forward_us": 5, "backward_input_us": 5, "key_value_bytes": 20},
}
"""A block of which half of F and B is attention."""


def profile(blocks: int = 8, *, head: int = 1, **more: Any) -> LayerProfile:
    """Equal blocks, and a head that takes `head` times a block's time."""
    times = {key: head * BLOCK[key] for key in ("forward_us", "backward_input_us", "backward_weight_us")}
    layers = [BLOCK | {"repeat": blocks - 1}, BLOCK | times | {"name": "head"}]
    return LayerProfile.from_data({"format": "optpipe.layers/1", "layers": layers} | more)


def tight_profile() -> LayerProfile:
    """A model that no quick schedule proves anything of on four devices along a V: a heavy head and little memory."""
    return profile(14, head=3, link={"latency_us": 9}, memory_bytes=4 * 1100 + 500)
