"""`optpipe train`: runs a schedule in PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from optpipe.cli.output import AsJson, check_writable, print_json, stderr, stdout, table, write_whole
from optpipe.errors import InputError, Issue, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.trace import Trace
    from optpipe.train import CheckResult, StepReport, TrainingResult

GRADIENT_LIMITS = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2.0**-7}
"""A check fails beyond these: what re-ordered sums of a precision can differ by.

Under autocast on a GPU that is two roundings to bfloat16, of 2^-8 each, where it sums in another order before them.
"""

AUTOCAST_LIMIT_ON_CPU = 1e-5
"""There the order is the same: the error was below 1e-6, and a step that left autocast out is 0.006 away."""

WARM_UP_STEPS = 3
"""Trained before a step is recorded, where there are so many."""


class Precision(StrEnum):
    """Precision of weights and activations."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Autocast(StrEnum):
    """What torch.autocast computes matrix products in."""

    BFLOAT16 = "bfloat16"


class Device(StrEnum):
    """What to compute on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def command(
    schedule: Annotated[Path, typer.Option("--schedule", help="The schedule file to run.", metavar="SCHEDULE.json")],
    model: Annotated[str, typer.Option(help="Size of the GPT: tiny, small or medium.")] = "small",
    steps: Annotated[int, typer.Option(min=1, max=10**9, help="Optimizer steps.")] = 20,
    check: Annotated[bool, typer.Option("--check", help="Compare gradients and memory with the plain step.")] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks of the model; default: one a stage.")] = None,
    microbatch_size: Annotated[int, typer.Option(min=1, max=4096, help="Sequences in a microbatch.")] = 4,
    sequence: Annotated[int | None, typer.Option(min=1, help="Bytes of text in a sequence.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3,
    dtype: Annotated[Precision, typer.Option(help="Precision of weights and activations.")] = Precision.FLOAT32,
    autocast: Annotated[
        Autocast | None, typer.Option(help="Compute matrix products in it; weights stay float32.")
    ] = None,
    device: Annotated[Device, typer.Option(help="What to compute on; auto: CUDA where there is any.")] = Device.AUTO,
    data_parallel: Annotated[int, typer.Option(min=1, max=4096, help="Replicas of the pipeline, under torchrun.")] = 1,
    tied: Annotated[bool, typer.Option("--tied", help="The output head uses the embedding's weights.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the order of the data.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Record what one step does, for 'optpipe trace'.", metavar="TRACE.json")
    ] = None,
    trace_step: Annotated[
        int | None, typer.Option(min=0, help="The step to record, counted from 0; default: one after warm-up.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train a small GPT on the Python standard library's sources, as a schedule says.

    Under torchrun one process, and on CUDA one GPU, a device of each replica; otherwise all devices in this process.
    With --check the exit code is 1 if a gradient differs from the plain step's by more than rounding (1e-5 of the
    largest, 1e-12 in float64, 2^-7 with autocast on a GPU), or memory is left alive after a step.
    With --trace one step is run a few times more and compared with the plan.
    """
    from optpipe.schedule import Schedule

    try:
        from optpipe.train import TrainingConfig, leads, train
        from optpipe.train.hardware import own_device
    except ModuleNotFoundError as error:
        raise TrainingError(f"training needs {error.name}. Maybe pip install 'optpipe[train]'.") from None

    config = TrainingConfig(
        Schedule.load(schedule),
        model=model,
        steps=steps,
        check=check,
        layers=layers,
        microbatch_size=microbatch_size,
        sequence=sequence,
        learning_rate=learning_rate,
        dtype=dtype.value,
        autocast=autocast.value if autocast else None,
        device=device.value,
        seed=seed,
        data_parallel=data_parallel,
        tied=tied,
        trace_step=_trace_step(trace, trace_step, steps),
    )
    if trace and leads():
        check_writable(trace)
    with _progress(steps, leads()) as report:
        result = train(config, report)
    if leads():
        print_json(_document(result)) if as_json else print_result(result)
        if trace and result.trace:
            _hand_over(result.trace, trace, as_json)
    limit = GRADIENT_LIMITS[(autocast or dtype).value]
    if autocast and own_device(device.value).type == "cpu":
        limit = AUTOCAST_LIMIT_ON_CPU
    return 0 if result.check is None or _passed(result.check, limit) else 1


def _trace_step(trace: Path | None, step: int | None, steps: int) -> int | None:
    """The step to record, if any. The first ones of a process take longer: threads start, memory is got."""
    if trace is None and step is not None:
        raise InputError([Issue("--trace-step", "no_trace", f"is {step}, but no --trace says where to write it.")])
    return None if trace is None else min(WARM_UP_STEPS, steps - 1) if step is None else step


def _document(result: TrainingResult) -> dict[str, Any]:
    """The result as JSON values; of a trace its figures, for its ops are in the file."""
    values = asdict(replace(result, trace=None))
    del values["trace"]
    if result.trace is None:
        return values
    from optpipe.cli.trace_report import document
    from optpipe.trace.compare import compare

    return values | {"trace": document(compare(result.trace))}


def _hand_over(trace: Trace, path: Path, as_json: bool) -> None:
    """Write a trace and say in short how it compares."""
    from optpipe.cli.trace_report import print_short
    from optpipe.trace.compare import compare

    write_whole(path, trace.to_json() + "\n")
    if not as_json:
        print_short(trace, compare(trace))
        stdout().print(f"wrote {path}; see 'optpipe trace {path}' for every difference", markup=False)


@contextmanager
def _progress(steps: int, leads: bool) -> Iterator[Callable[[StepReport], None] | None]:
    """Reports the loss: a bar on a terminal, about ten lines elsewhere, nothing in other processes than the first."""
    if not leads:
        yield None
    elif not sys.stderr.isatty():
        yield lambda step: print_step(step, every=max(1, steps // 10))
    else:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
        with Progress(*columns, TimeElapsedColumn(), console=stderr()) as bar:
            task = bar.add_task("training", total=steps, loss="")
            yield lambda step: bar.update(task, completed=step.step + 1, loss=f"loss {step.loss:.4f}")


def print_step(step: StepReport, every: int) -> None:
    """A line on stderr for every so many steps, and for the last."""
    if step.step % every == 0 or step.step + 1 == step.steps:
        stderr().print(f"step {step.step + 1:>4} of {step.steps}  loss {step.loss:.4f}  {step.seconds:.2f} s")


def _passed(check: CheckResult, limit: float) -> bool:
    clean = all(left == 0 for device in check.devices for left in device.live_bytes)
    return clean and check.max_gradient_error <= limit


def print_result(result: TrainingResult) -> None:
    """Loss and, of a check, the gradient error and each device's memory, measured and planned."""
    console = stdout()
    seconds = sorted(result.step_seconds)[len(result.step_seconds) // 2]
    console.print(
        f"{len(result.losses)} steps of {result.parameters:,} parameters in {result.processes} process(es): "
        f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} nats a byte, median {seconds:.2f} s a step"
    )
    if result.check is not None:
        _print_check(result.check)


def _print_check(check: CheckResult) -> None:
    rows = table("device", "peak bytes", "planned", "measured / planned", "host bytes", "left after a step")
    for d, device in enumerate(check.devices):
        share = device.peak_bytes / device.planned_peak_bytes if device.planned_peak_bytes else 1.0
        left = max(device.live_bytes, default=0)
        sizes = (f"{device.peak_bytes:,}", f"{device.planned_peak_bytes:,}", f"{share:.4f}")
        rows.add_row(str(d), *sizes, f"{device.host_peak_bytes:,}", f"{left:,}")
    stdout().print(rows)
    stdout().print(f"largest gradient error against the plain step: {check.max_gradient_error:.2e}")
