"""`optpipe train`: runs a schedule in PyTorch."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.output import AsJson, check_writable, print_json, stderr, write_whole
from optpipe.cli.train_flags import MODE, PANELS, given_settings, with_settings
from optpipe.errors import InputError, Issue
from optpipe.extras import needs_extra

if TYPE_CHECKING:
    from optpipe.cli.train_solver import ChildSolver
    from optpipe.train import OutputConfig, TrainingConfig


@with_settings
def command(
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="A file with the settings below by their table; flags win over it.", metavar="TRAIN.toml"),
    ] = None,
    schedule: Annotated[
        Path | None,
        typer.Option(help="The schedule to run.", metavar="SCHEDULE.json", rich_help_panel=PANELS[""]),
    ] = None,
    solve: Annotated[
        bool,
        typer.Option("--solve", help="Profile and solve first, then train.", rich_help_panel=PANELS["online"]),
    ] = False,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Train at once, profile and solve beside it, and change to better schedules on the way.",
            rich_help_panel=PANELS["online"],
        ),
    ] = False,
    as_json: AsJson = False,
    **given: Any,
) -> int:
    """Train a model as a schedule says: our small GPT, or stages of your own.

    Under torchrun one process, and on CUDA one GPU, a device of each replica; otherwise all devices in this process.
    With --check nothing is trained and the exit code is 1 if a gradient differs from the plain step's by more than
    rounding (1e-5 of the largest, 1e-12 in float64, 2^-7 with autocast on a GPU), a peak exceeds plan or budget, or
    memory is left alive after a step. With --trace one step is run a few times more and compared with the plan. What
    settings mean: docs/train.md.
    """
    from optpipe.train.config import read_config

    settings = given_settings(given) | _mode(solve, online)
    if schedule is not None:
        settings["schedule"] = schedule
    return _train(read_config(config, settings), as_json)


def _mode(solve: bool, online: bool) -> dict[str, str]:
    if solve and online:
        raise InputError([Issue("--online", "conflict", "solves beside the training, but --solve before it.")])
    return {MODE: "online" if online else "first"} if solve or online else {}


def _train(config: TrainingConfig, as_json: bool) -> int:
    with needs_extra("train", "training"):
        from optpipe.train import leads, train
    from optpipe.cli.train_log import told
    from optpipe.cli.train_progress import progress
    from optpipe.cli.train_report import document, print_result
    from optpipe.schedule_text import schedule_text

    if config.output.trace is None and config.output.trace_step is not None:
        detail = f"is {config.output.trace_step}, but no --trace says where to write it."
        raise InputError([Issue("--trace-step", "no_trace", detail)])
    if leads():
        _check_writable(config.output)
        if config.online.save is not None:
            check_writable(config.online.save)
    with told(), progress(config.steps, leads()) as report:
        result = train(config, report, _solver(config) if leads() else None)
    failures = result.check.failures if result.check else ()
    if leads():
        if config.output.trace and result.trace:
            write_whole(config.output.trace, result.trace.to_json() + "\n")
        if config.online.save and result.schedule:
            write_whole(config.online.save, schedule_text(result.schedule))
        print_json(document(result)) if as_json else print_result(result, config.output.trace)
        if config.output.plot and not result.losses:
            stderr().print(f"no step was run: {config.output.plot} is not drawn", markup=False, highlight=False)
        if result.stopped:
            stderr().print(result.stopped, markup=False, highlight=False)
        for failure in failures:
            print(f"error: the check failed and nothing was trained: {failure}", file=sys.stderr)
    if result.stopped:
        return 130
    return 1 if failures else 0


def _solver(config: TrainingConfig) -> ChildSolver | None:
    """What finds schedules, where that is asked for."""
    if not config.online.on:
        return None
    from optpipe.cli.compiling import compile_once
    from optpipe.cli.train_solver import ChildSolver

    compile_once()
    return ChildSolver()


def _check_writable(output: OutputConfig) -> None:
    """Better now than after an hour of training. Folders of files are made, as that of checkpoints is."""
    for path in (output.trace, output.metrics, output.plot):
        if path is not None:
            with suppress(OSError):  # what is wrong is said next
                path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(path)
