"""What `optpipe train` says at the end: losses and times, and of a check gradients and memory."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from optpipe.cli.output import stdout, table
from optpipe.units import share_text

if TYPE_CHECKING:
    from optpipe.trace import Trace
    from optpipe.train import CheckResult, TrainingResult


def document(result: TrainingResult) -> dict[str, Any]:
    """The result as JSON values; of a trace its figures, for its ops are in the file, and of a schedule its method.

    Numbers that are none are null: the loss of a step that was skipped, an infinite error.
    """
    from optpipe.train.output.metrics import finite

    values = asdict(replace(result, trace=None, schedule=None))
    del values["trace"], values["schedule"]
    values["method"] = result.schedule.method if result.schedule else None
    if result.trace is not None:
        from optpipe.cli.trace_report import document as trace_document
        from optpipe.trace.compare import compare

        values["trace"] = trace_document(compare(result.trace))
    found: dict[str, Any] = finite(values)
    return found


def print_result(result: TrainingResult, trace_path: Path | None = None) -> None:
    """Loss, what was measured on the way, and of a check the gradient error and each device's memory.

    Of a trace, which has been written to `trace_path`, how it compares.
    """
    console = stdout()
    console.print(_steps_text(result))
    if result.evaluation_loss is not None:
        console.print(f"loss of the batches evaluated at the end: {result.evaluation_loss:.4f}")
    if result.bubbles:
        waited = ", ".join(f"device {d} {share_text(share)}" for d, share in enumerate(result.bubbles))
        planned = f"; planned {share_text(result.schedule.bubble)}" if result.schedule else ""
        console.print(f"bubble measured: {waited}{planned}{_shared_cores()}")
    if result.check is not None:
        _print_check(result.check)
    if result.trace is not None and trace_path is not None:
        _print_trace(result.trace, trace_path)


def _shared_cores() -> str:
    """Processes that have no core each wait for one another's, which is no bubble of the schedule."""
    processes, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.cpu_count() or 1
    return f" ({processes} processes share {cores} cores: waits for a core count too)" if processes > cores else ""


def _steps_text(result: TrainingResult) -> str:
    begun = f", from step {result.first_step} on" if result.first_step else ""
    text = f"{len(result.losses)} steps{begun} of {result.parameters:,} parameters in {result.processes} process(es)"
    if not result.losses:
        return text
    took = f"median {median(result.step_seconds):.2f} s a step"
    return f"{text}: loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}, {took}"


def _print_check(check: CheckResult) -> None:
    budgets = any(device.budget_bytes is not None for device in check.devices)
    columns = ("device", "peak bytes", "planned", "measured / planned", "host bytes", "left after a step")
    rows = table(*columns, *(["budget, with messages"] if budgets else []))
    for d, device in enumerate(check.devices):
        share = device.peak_bytes / device.planned_peak_bytes if device.planned_peak_bytes else 1.0
        left = max(device.live_bytes, default=0)
        sizes = (f"{device.peak_bytes:,}", f"{device.planned_peak_bytes:,}", f"{share:.4f}")
        budget = "-" if device.budget_bytes is None else f"{device.budget_bytes:,}"
        rows.add_row(str(d), *sizes, f"{device.host_peak_bytes:,}", f"{left:,}", *([budget] if budgets else []))
    stdout().print(rows)
    stdout().print(f"largest gradient error against the plain step: {check.max_gradient_error:.2e}")


def _print_trace(trace: Trace, path: Path) -> None:
    from optpipe.cli.trace_report import print_short
    from optpipe.trace.compare import compare

    print_short(trace, compare(trace))
    stdout().print(f"wrote {path}; see 'optpipe trace {path}' for every difference", markup=False)
