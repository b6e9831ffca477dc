"""A schedule as JSON text for people and tools: one op a line, so that two schedules can be compared line by line."""

from __future__ import annotations

import json
from typing import Any

from optpipe.orders import STREAMS
from optpipe.schedule import Schedule


def schedule_text(schedule: Schedule) -> str:
    """The document as text that `Schedule.load` reads back to an equal schedule."""
    data = schedule.to_data()
    head = ",\n".join(f"  {_line(key)}: {_line(value)}" for key, value in data.items() if key != "devices")
    devices = ",\n".join(_device_text(device) for device in data["devices"])
    return f'{{\n{head},\n  "devices": [\n{devices}\n  ]\n}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "), allow_nan=False)


def _device_text(device: dict[str, Any]) -> str:
    parts = []
    for key, value in device.items():
        if key in STREAMS and value:
            ops = ",\n".join(f"        {_line(op)}" for op in value)
            parts.append(f"      {_line(key)}: [\n{ops}\n      ]")
        else:
            parts.append(f"      {_line(key)}: {_line(value)}")
    return "    {\n" + ",\n".join(parts) + "\n    }"
