"""Orders as compact JSON: one string of op names a stream. Between processes, and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optpipe.orders import DeviceOrders, Op, Orders


def orders_data(orders: Orders) -> dict[str, Any]:
    """Orders as JSON values, such as ``{"devices": [["F0.0 B0.0 W0.0", "", ""]], "waits": {}, "channels": []}``."""
    return {
        "devices": [[_text(stream) for stream in device.streams()] for device in orders.devices],
        "waits": {str(op): _text(before) for op, before in orders.waits.items()},
        "channels": [_text(channel) for channel in orders.channels],
    }


def read_orders(data: dict[str, Any]) -> Orders:
    """Orders from their JSON values. Raises ValueError, TypeError or KeyError where they are something else.

    Whether they are orders of some problem is for `simulate` to say.
    """
    return Orders(
        [DeviceOrders(*(_ops(text) for text in streams)) for streams in data["devices"]],
        {Op.parse(name): _ops(text) for name, text in data["waits"].items()},
        [_ops(text) for text in data["channels"]],
    )


def _text(ops: Sequence[Op]) -> str:
    return " ".join(map(str, ops))


def _ops(text: str) -> list[Op]:
    return [Op.parse(name) for name in text.split()]
