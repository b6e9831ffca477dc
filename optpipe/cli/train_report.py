"""Output of `optpipe train`: log lines, progress, and the final report."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from optpipe.cli.console import stderr, stdout, table
from optpipe.units import share_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.trace import Trace
    from optpipe.train import CheckResult, StepReport, TrainingResult


def document(result: TrainingResult) -> dict[str, Any]:
    """The result as JSON values; of a trace its figures, for its ops are in the file, and of a schedule its method.

    Numbers that are none are null: the loss of a step that was skipped, an infinite error.
    """
    from optpipe.train.output import finite

    values = asdict(replace(result, trace=None, schedule=None))
    del values["trace"], values["schedule"]
    values["method"] = result.schedule.method if result.schedule else None
    if result.trace is not None:
        from optpipe.cli.trace import document as trace_document
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
    from optpipe.cli.trace import print_short
    from optpipe.trace.compare import compare

    print_short(trace, compare(trace))
    stdout().print(f"wrote {path}; see 'optpipe trace {path}' for every difference", markup=False)


class _Lines(logging.Handler):
    """A line a message; warnings say so."""

    def emit(self, record: logging.LogRecord) -> None:
        name = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        stderr().print(f"{name}{record.getMessage()}")


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Within: what `optpipe.train` logs is shown, in the processes that log it."""
    log, handler = logging.getLogger("optpipe.train"), _Lines()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)  # which also forgets what loggers below it remember
        log.propagate = propagate


@contextmanager
def progress(steps: int, leads: bool) -> Iterator[Callable[[StepReport], None] | None]:
    """Reports steps; nothing in other processes than the first."""
    if not leads:
        yield None
    elif not sys.stderr.isatty():
        yield lambda step: print_step(step, every=max(1, steps // 10))
    else:
        columns = (BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, *times, console=stderr(), expand=True) as bar:
            task = bar.add_task("training", total=steps, figures="")
            yield lambda step: bar.update(task, completed=step.step + 1, figures=figures_text(step))


def figures_text(step: StepReport) -> str:
    """Loss, tokens a second, bubble and memory, as far as they are known."""
    parts = [f"loss {step.loss:.4f}", f"{step.tokens_per_second:,.0f} tokens/s"]
    if step.bubble is not None:
        parts.append(f"bubble {100 * step.bubble:.0f} %")
    if step.peak_memory_bytes:
        parts.append(f"{step.peak_memory_bytes / 2**20:,.0f} MiB")
    return "  ".join(parts)


def print_step(step: StepReport, every: int) -> None:
    """A line on stderr for every so many steps, and for the last."""
    if step.step % every == 0 or step.step + 1 == step.steps:
        stderr().print(f"step {step.step + 1:>4} of {step.steps}  {figures_text(step)}  {step.seconds:.2f} s")
