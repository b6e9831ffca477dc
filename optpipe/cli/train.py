"""`optpipe train`: runs a schedule in PyTorch; its settings as options, and its background solver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import Parameter, Signature, signature
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import AsJson, parse_share, parse_size, print_json, stderr
from optpipe.errors import InputError, Issue, OptPipeError, needs_extra
from optpipe.files import check_writable, write_atomically
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.train.config import SETTINGS, Setting
from solver.limits import Limits
from solver.process import ChildResult, solve_in_child
from solver.serial import known_budgets_bytes
from solver.solve import solve

if TYPE_CHECKING:
    from optpipe.train import OutputConfig, TrainingConfig


PANELS = {
    "": "Run",
    "model": r"Model \[model]",
    "optimizer": r"Optimizer \[optimizer]",
    "checkpoints": r"Checkpoints \[checkpoints]",
    "online": r"Solving and profiling \[online]",
    "output": r"What is left \[output]",
}

MODE = "online.mode"
"""Has two flags of its own, --solve and --online."""


def with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command that takes `**given` an option for every setting."""
    own = [p for p in signature(command, eval_str=True).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [*own, *(_parameter(setting) for setting in SETTINGS.values() if setting.name != MODE)]
    options.sort(key=lambda option: [None, *PANELS.values()].index(option.annotation.__metadata__[0].rich_help_panel))
    command.__signature__ = Signature(options, return_annotation=int)  # type: ignore[attr-defined]
    return command


def given_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the values of options by their names, those that were given."""
    names = {_variable(name): name for name in SETTINGS}
    return {names[variable]: value for variable, value in given.items() if value is not None}


def _variable(name: str) -> str:
    return name.replace(".", "_")


def _parameter(setting: Setting) -> Parameter:
    names = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}" if setting.type is bool else setting.flag
    option = typer.Option(names, help=_help(setting), rich_help_panel=PANELS[setting.table], **_reading(setting))
    annotation = Annotated[setting.type | None, option]  # type: ignore[name-defined]
    return Parameter(_variable(setting.name), Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _reading(setting: Setting) -> dict[str, Any]:
    """How the option's text is read and what stands for it in the help; limits are checked with the file's."""
    if setting.name.endswith("_bytes"):
        return {"parser": parse_size, "metavar": "SIZE"}
    if setting.name.endswith("_margin"):
        return {"parser": parse_share, "metavar": "10%"}
    if setting.choices:
        return {"metavar": "|".join(setting.choices)}
    names = {int: "N", float: "X", str: "NAME", Path: "PATH"}
    return {"metavar": names[setting.type]} if setting.type in names else {}


def _help(setting: Setting) -> str:
    """The text with the default, where the text does not tell it and there is one."""
    text, default = setting.text, setting.default
    first = text.split(maxsplit=1)[0]
    if "." not in first and first.rstrip(":") not in setting.choices:
        text = text[0].upper() + text[1:]
    if "default:" in text or default is None or default is False:
        return f"{text}."
    return f"{text}; default: {'yes' if default is True else default}."


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
    from optpipe.cli.train_report import document, log_to_stderr, print_result, progress
    from optpipe.schedule import schedule_text

    if config.output.trace is None and config.output.trace_step is not None:
        detail = f"is {config.output.trace_step}, but no --trace says where to write it."
        raise InputError([Issue("--trace-step", "no_trace", detail)])
    if leads():
        _check_outputs(config.output)
        if config.online.save is not None:
            check_writable(config.online.save)
    with log_to_stderr(), progress(config.steps, leads()) as report:
        result = train(config, report, _solver(config) if leads() else None)
    failures = result.check.failures if result.check else ()
    if leads():
        if config.output.trace and result.trace:
            write_atomically(config.output.trace, result.trace.to_json() + "\n")
        if config.online.save and result.schedule:
            write_atomically(config.online.save, schedule_text(result.schedule))
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
    from optpipe.cli.console import compile_once

    compile_once()
    return ChildSolver()


def _check_outputs(output: OutputConfig) -> None:
    """Better now than after an hour of training. Folders of files are made, as that of checkpoints is."""
    for path in (output.trace, output.metrics, output.plot):
        if path is not None:
            with suppress(OSError):  # what is wrong is said next
                path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(path)


class ChildSolver:
    """`optpipe.train.resolve.search.Solver` by the portfolio."""

    def quick(self, problem: Problem) -> Schedule:
        """By `ada-offload`, in this process."""
        return solve(problem, "ada-offload")

    def least_budgets_bytes(self, problem: Problem) -> Sequence[int]:
        """Those of the floor, which `ada-offload` tries too."""
        return known_budgets_bytes(problem)

    def begin(self, problem: Problem, start: Schedule | None, time_limit_s: float, workers: int) -> ChildSolve:
        """By `auto`, which begins where the schedule in use is."""
        return ChildSolve(problem, Limits(time_limit_s, 0.0, workers), [start.orders] if start else [])


@dataclass
class ChildSolve:
    """One search, from its begin."""

    problem: Problem
    limits: Limits
    starts: list[Orders]
    _found: ChildResult | None = None
    _error: OptPipeError | None = None
    _thread: Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = Thread(target=self._run, name="solve", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Whether it is over."""
        return not self._thread.is_alive()

    def result(self) -> Schedule | None:
        """The schedule, None where there is none. Waits. Raises what ended the search otherwise."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found.schedule if self._found else None

    def cancel(self) -> None:
        """End the search within a second."""
        self.limits.cancel.request()
        self._thread.join()

    def _run(self) -> None:
        """In the thread that makes the child, which must outlive it."""
        try:
            self._found = solve_in_child(self.problem, "auto", self.limits, starts=self.starts)
        except OptPipeError as error:
            self._error = error
