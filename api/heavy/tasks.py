"""What the processes beside the server can be asked for: bytes in, bytes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from api.analysis import analysis
from api.comparison import comparison
from api.documents import read_document
from api.submissions import Caps, ProblemBody, read_submission
from optpipe.export.chrome_trace import chrome_trace
from optpipe.export.torch_csv import torch_csv
from optpipe.schedule import Schedule


def check_submission(body: bytes, caps: Mapping[str, Any]) -> bytes:
    """Nothing, if the body is a submission within the caps."""
    read_submission(body, Caps(**caps))
    return b""


def analyze(body: bytes, max_ops: int) -> bytes:
    """The analysis of a schedule."""
    return _json(analysis(read_document(Schedule, body), max_ops))


def compare(body: bytes, caps: Mapping[str, Any], schedules: bool) -> bytes:
    """The published schedules of a problem, side by side; whole where `schedules`."""
    problem = read_document(ProblemBody, body).problem
    Caps(**caps).check_problem(problem)
    return _json(comparison(problem, schedules))


def to_torch_csv(body: bytes, drop_offload: bool) -> bytes:
    """A schedule for torch's runtime."""
    return torch_csv(Schedule.from_json(body), drop_offload=drop_offload).encode()


def to_chrome_trace(body: bytes) -> bytes:
    """A schedule for trace viewers."""
    return _json(chrome_trace(Schedule.from_json(body)))


def to_picture(body: bytes, picture_format: str) -> bytes:
    """A schedule as a Gantt chart."""
    from optpipe.plot import render_schedule  # slow to load, and not every process draws

    return render_schedule(Schedule.from_json(body), picture_format)


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


TASKS: Mapping[str, Callable[..., bytes]] = {
    task.__name__: task for task in (check_submission, analyze, compare, to_torch_csv, to_chrome_trace, to_picture)
}
