"""How a training run shows its steps while it goes: a bar on a terminal, about ten lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from optpipe.cli.output import stderr

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.train import StepReport


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
