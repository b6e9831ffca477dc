"""Orders as compact JSON: one string of op names a stream. Between processes, and on disk."""

from __future__ import annotations

from typing import Any

from optpipe.orders import DeviceOrders, Op, OpArray, Orders


def orders_data(orders: Orders) -> dict[str, Any]:
    """Orders as JSON values, such as ``{"devices": [["F0.0 B0.0 W0.0", "", ""]], "waits": {}, "channels": []}``."""
    return {
        "devices": [[OpArray.of(stream).names for stream in device.streams()] for device in orders.devices],
        "waits": {str(op): " ".join(map(str, before)) for op, before in orders.waits.items()},
        "channels": [OpArray.of(channel).names for channel in orders.channels],
    }


def read_orders(data: dict[str, Any]) -> Orders:
    """Orders from their JSON values. Raises ValueError, TypeError or KeyError where they are something else.

    Whether they are orders of some problem is for `simulate` to say.
    """
    return Orders(
        [DeviceOrders(*map(OpArray.parse, streams)) for streams in data["devices"]],
        {Op.parse(name): [Op.parse(other) for other in others.split()] for name, others in data["waits"].items()},
        [OpArray.parse(channel) for channel in data["channels"]],
    )
