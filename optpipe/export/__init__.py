"""Schedules in the formats of other tools.

A format is one function under `exporter`: the command line (`optpipe export`), the service (`?format=`) and the page's
downloads read them from `EXPORTERS`. Functions import what they need when they are called, since commands start fast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optpipe.units import budget_text

if TYPE_CHECKING:
    from optpipe.schedule import Schedule
    from optpipe.trace.document import Trace


@dataclass(frozen=True)
class Exported:
    """Content of a file, and what the command says of it.

    `facts`: fields of its JSON answer. `summary`: the end of the line that it prints. `notes`: lines on stderr. `rows`:
    a table, its header first. `error`: the reason why the answer is no, though a file is written.
    """

    content: str | bytes
    facts: Mapping[str, object] = field(default_factory=dict)
    summary: str = ""
    notes: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    error: str = ""


@dataclass(frozen=True)
class Exporter:
    """A format: what it is for, how its files end, and the function that writes one.

    `media_type`: empty where only the command line offers it. `title`: on the page. `document`: what else than a
    schedule the function takes, "trace" or "problem". `options`: the names of its keywords. `picture`: one that the
    command line draws with `optpipe plot`.
    """

    name: str
    use: str
    export: Callable[..., Exported]
    title: str = ""
    ending: str = ""
    media_type: str = ""
    document: str = ""
    options: Sequence[str] = ()
    picture: bool = False


EXPORTERS: dict[str, Exporter] = {}
"""All formats by name, in the order in which they are offered."""


def exporter(name: str, use: str, **fields: Any) -> Callable[[Callable[..., Exported]], Callable[..., Exported]]:
    """Register a function as the exporter of a format; `fields` are those of `Exporter`."""

    def register(export: Callable[..., Exported]) -> Callable[..., Exported]:
        EXPORTERS[name] = Exporter(name, use, export, **fields)
        return export

    return register


@exporter(
    "torch-csv",
    "for torch's own pipelining runtime, torchtitan and NeMo AutoModel",
    title="Torch CSV",
    ending="torch.csv",
    media_type="text/csv",
    options=("drop_offload",),
)
def _torch_csv(schedule: Schedule, *, drop_offload: bool = False) -> Exported:
    from optpipe.export.torch_csv import checkpointed_stages, peak_bytes_without_offload, torch_csv

    content, facts, summary = torch_csv(schedule, drop_offload=drop_offload), dict[str, object](), ""
    if modes := checkpointed_stages(schedule):
        facts["checkpoint"] = [{"stage": s, "mode": mode} for s, mode in modes.items()]
        summary = "; stages to checkpoint, with their modes: " + ", ".join(f"{s} ({m})" for s, m in modes.items())
    if not drop_offload:
        return Exported(content, facts, summary)
    budgets = [device.memory_bytes for device in schedule.problem.devices]
    needs = [*zip(peak_bytes_without_offload(schedule), budgets, strict=True)]
    facts["devices"] = [{"peak_bytes_any_timing": need, "memory_bytes": budget} for need, budget in needs]
    return Exported(content, facts, summary, [_need(d, *bytes_) for d, bytes_ in enumerate(needs)])


def _need(device: int, need: int, budget: int | None) -> str:
    """Sentence on the memory that a device needs without offload."""
    return f"device {device} without offload: {budget_text(need, budget)}"


@exporter(
    "chrome-trace",
    "for Perfetto and chrome://tracing",
    title="Chrome trace",
    ending="trace.json",
    media_type="application/json",
    document="trace",
)
def _chrome_trace(document: Schedule | Trace) -> Exported:
    from optpipe.export.chrome_trace import chrome_trace, measured_chrome_trace
    from optpipe.schedule import Schedule

    events = chrome_trace(document) if isinstance(document, Schedule) else measured_chrome_trace(document)
    return Exported(json.dumps(events, separators=(",", ":"), allow_nan=False))


_CHART = "a Gantt chart with memory curves"


@exporter("svg", _CHART, title="SVG", ending="svg", media_type="image/svg+xml", picture=True)
def _svg(schedule: Schedule) -> Exported:
    from optpipe.plot import render_schedule

    return Exported(render_schedule(schedule, "svg"))


@exporter("png", _CHART, title="PNG", ending="png", media_type="image/png", picture=True)
def _png(schedule: Schedule) -> Exported:
    from optpipe.plot import render_schedule

    return Exported(render_schedule(schedule, "png"))
