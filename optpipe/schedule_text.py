"""A schedule as JSON, one op a line, so that two schedules can be compared line by line."""

from __future__ import annotations

import json
from typing import Any

from optpipe.orders import KINDS
from optpipe.planned_ops import PlannedOps
from optpipe.schedule import DevicePlan, Schedule


def schedule_text(schedule: Schedule) -> str:
    """The document as text that `Schedule.load` reads back to an equal schedule."""
    data = schedule.model_dump(mode="json", exclude_unset=True, exclude={"devices"})
    head = ",\n".join(f"  {_line(key)}: {_line(value)}" for key, value in data.items())
    devices = ",\n".join(_device_text(device) for device in schedule.devices)
    return f'{{\n{head},\n  "devices": [\n{devices}\n  ]\n}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "), allow_nan=False)


def _device_text(device: DevicePlan) -> str:
    given = (name for name in DevicePlan.model_fields if name in device.model_fields_set)
    parts = (f"      {_line(name)}: {_value_text(getattr(device, name))}" for name in given)
    return "    {\n" + ",\n".join(parts) + "\n    }"


def _value_text(value: Any) -> str:
    if not isinstance(value, PlannedOps):
        return _line(value)
    ops = ",\n".join(_op_lines(value))
    return f"[\n{ops}\n      ]" if ops else "[]"


def _op_lines(planned: PlannedOps) -> list[str]:
    """Each op on its line. Finite floats and integers are written by `repr`, as `json` does."""
    ops = planned.ops
    columns = ([KINDS[code] for code in ops.kind.tolist()], ops.stage.tolist(), ops.microbatch.tolist())
    rows = zip(*columns, planned.starts, planned.ends, strict=True)
    lines = [
        f'        {{"op": "{kind}", "stage": {stage}, "microbatch": {microbatch}, '
        f'"start_us": {start!r}, "end_us": {end!r}, "waits": []}}'
        for kind, stage, microbatch, start, end in rows
    ]
    for place, names in planned.waits.items():
        lines[place] = lines[place].removesuffix("[]}") + f"{_line(list(names))}}}"
    for place in planned.silent:
        lines[place] = lines[place].removesuffix(', "waits": []}') + "}"
    return lines
