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
from optpipe.units import bytes_text, share_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.train import CheckResult, StepReport, TrainingResult


def document(result: TrainingResult) -> dict[str, Any]:
    """The result as JSON values, with the figures of a trace but not its ops, and the method of a schedule.

    Numbers that are not finite are null: the loss of a skipped step, an infinite error.
    """
    from optpipe.train.output import finite

    values = asdict(replace(result, trace=None, schedule=None))
    del values["trace"], values["schedule"]
    values["method"] = result.schedule.method if result.schedule else None
    if result.trace is not None:
        from optpipe.cli.trace import document as trace_document
        from optpipe.trace.compare import compare

        values["trace"] = trace_document(compare(result.trace))
    document: dict[str, Any] = finite(values)
    return document


def print_result(result: TrainingResult, trace_path: Path | None = None) -> None:
    """Print loss, speed and bubbles; gradient error and memory of a check; the figures of a trace at `trace_path`."""
    console = stdout()
    begun = f", from step {result.first_step} on" if result.first_step else ""
    text = f"{len(result.losses)} steps{begun} of {result.parameters:,} parameters in {result.processes} process(es)"
    if result.losses:
        took = f"median {time_text(1e6 * median(result.step_seconds))} a step, "
        took += _speed_text(result.tokens_per_second, result.utilization, result.processes)
        terms = [f"{name} {values[0]:.4f} -> {values[-1]:.4f}" for name, values in result.loss_terms.items()]
        of_terms = f" ({', '.join(terms)})" if terms else ""
        text += f": loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}{of_terms}, {took}"
    console.print(text)
    if result.evaluation_loss is not None:
        console.print(f"evaluation loss: {result.evaluation_loss:.4f}")
    if result.bubbles:
        bubbles = ", ".join(f"device {d} {share_text(share)}" for d, share in enumerate(result.bubbles))
        planned = f"; planned {share_text(result.schedule.bubble)}" if result.schedule else ""
        processes, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.cpu_count() or 1
        shared = f" ({processes} processes share {cores} cores: waiting for a core counts as bubble)"
        console.print(f"bubble measured: {bubbles}{planned}{shared if processes > cores else ''}")
    if result.check is not None:
        _print_check(result.check)
    if result.trace is not None and trace_path is not None:
        from optpipe.cli.trace import print_short
        from optpipe.trace.compare import compare

        print_short(result.trace, compare(result.trace))
        console.print(f"wrote {trace_path}; see 'optpipe trace {trace_path}' for every difference")


def _print_check(check: CheckResult) -> None:
    budgets = any(device.budget_bytes is not None for device in check.devices)
    columns = ("device", "peak", "planned", "measured / planned", "on the host", "left after a step")
    rows = table(*columns, *(["budget, with messages"] if budgets else []))
    for d, device in enumerate(check.devices):
        share = device.peak_bytes / device.planned_peak_bytes if device.planned_peak_bytes else 1.0
        sizes = (bytes_text(device.peak_bytes), bytes_text(device.planned_peak_bytes), f"{share:.4f}")
        more = [bytes_text(device.host_peak_bytes), bytes_text(device.left_bytes)]
        if budgets:
            more.append("-" if device.budget_bytes is None else bytes_text(device.budget_bytes))
        rows.add_row(str(d), *sizes, *more)
    stdout().print(rows)
    stdout().print(f"largest gradient error against the reference step: {check.max_gradient_error:.2e}")


class _Lines(logging.Handler):
    """Log handler that prints a line per message on stderr, with the level of warnings and errors."""

    def emit(self, record: logging.LogRecord) -> None:
        name = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        stderr().print(f"{name}{record.getMessage()}")


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Show the log of `optpipe.train` on stderr within this context."""
    log, handler = logging.getLogger("optpipe.train"), _Lines()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)  # also clears the levels that child loggers have cached
        log.propagate = propagate


@contextmanager
def progress(steps: int, leads: bool) -> Iterator[Callable[[StepReport], None] | None]:
    """Yield a callback that shows each step: a bar on a terminal, else about ten lines; None except on rank 0."""
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


def _speed_text(tokens_per_second: float, utilization: float | None, processes: int) -> str:
    """Tokens a second, of each device where each has a process, and the utilization (MFU) where it is known."""
    each = f" ({tokens_per_second / processes:,.0f} a device)" if processes > 1 else ""
    used = "" if utilization is None else f", MFU {share_text(utilization)}"
    return f"{tokens_per_second:,.0f} tokens/s{each}{used}"


def figures_text(step: StepReport) -> str:
    """Loss with its terms, tokens per second, and bubble and memory if they were measured."""
    terms = ", ".join(f"{name} {value:.4f}" for name, value in step.loss_terms.items())
    speed = _speed_text(step.tokens_per_second, step.utilization, int(os.environ.get("WORLD_SIZE", "1")))
    parts = [f"loss {step.loss:.4f}" + (f" ({terms})" if terms else ""), speed]
    if step.bubble is not None:
        parts.append(f"bubble {100 * step.bubble:.0f} %")
    if step.peak_memory_bytes:
        parts.append(bytes_text(step.peak_memory_bytes))
    return "  ".join(parts)


def print_step(step: StepReport, every: int) -> None:
    """Print a line on stderr for every `every` steps, and for the last."""
    if step.step % every == 0 or step.step + 1 == step.steps:
        took = time_text(1e6 * step.seconds)
        stderr().print(f"step {step.step + 1:>4} of {step.steps}  {figures_text(step)}  {took}")
