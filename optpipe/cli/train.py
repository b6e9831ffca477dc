"""`optpipe train`: trains with a schedule in PyTorch. Its options are made from the settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import AsJson, compile_once, parse_share, parse_size, print_json, stderr
from optpipe.errors import InputError, Issue, needs_extra, shown
from optpipe.files import check_writable, write_atomically
from optpipe.train.settings import SETTINGS, Setting

if TYPE_CHECKING:
    from optpipe.train import TrainingConfig


PANELS = {
    "": "Run",
    "model": r"Model \[model]",
    "optimizer": r"Optimizer \[optimizer]",
    "checkpoints": r"Checkpoints \[checkpoints]",
    "online": r"Solving and profiling \[online]",
    "output": r"Outputs \[output]",
}

LONGEST_CHOICES = 14
"""Characters of choices that have room next to the flag on a narrow terminal; longer ones stand in the text."""

MODE = "online.mode"
"""Set by two flags, --solve and --online, instead of one option."""


def with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """Add an option for every setting to the signature of a command that takes `**given`."""
    options = [p for p in signature(command, eval_str=True).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    for setting in SETTINGS.values():
        if setting.name == MODE:
            continue
        names = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}" if setting.type is bool else setting.flag
        panel = PANELS[setting.table]
        option = typer.Option(names, help=_help(setting), rich_help_panel=panel, **_parsing(setting))
        annotation = Annotated[setting.type | None, option]  # type: ignore[name-defined]
        parameter = Parameter(_variable(setting.name), Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        options.append(parameter)
    options.sort(key=lambda option: [None, *PANELS.values()].index(option.annotation.__metadata__[0].rich_help_panel))
    command.__signature__ = Signature(options, return_annotation=int)  # type: ignore[attr-defined]
    return command


def _variable(name: str) -> str:
    return name.replace(".", "_")


def _parsing(setting: Setting) -> dict[str, Any]:
    """Parser and metavar of an option. Limits are checked later, together with those of the settings file."""
    if setting.name.endswith("_bytes"):
        return {"parser": parse_size, "metavar": "SIZE"}
    if setting.name.endswith("_margin"):
        return {"parser": parse_share, "metavar": "10%"}
    if setting.choices and len("|".join(setting.choices)) <= LONGEST_CHOICES:
        return {"metavar": "|".join(setting.choices)}
    names = {int: "N", float: "X", str: "NAME", Path: "PATH"}
    return {"metavar": names[setting.type]} if setting.type in names else {}


def _help(setting: Setting) -> str:
    """Help text of a setting, with its default unless the text already states it."""
    text, default = setting.text, setting.default
    first = text.split(maxsplit=1)[0]
    if "." not in first and first.rstrip(":") not in setting.choices:
        text = text[0].upper() + text[1:]
    if not all(choice in text for choice in setting.choices) and len("|".join(setting.choices)) > LONGEST_CHOICES:
        text += f"; one of {', '.join(setting.choices)}"
    if "default:" in text or default is None or default is False:
        return f"{text}."
    return f"{text}; default: {'yes' if default is True else default}."


@with_settings
def command(
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings file (TOML) with the tables named below; flags override it.", metavar="TRAIN.toml"),
    ] = None,
    schedule: Annotated[
        Path | None,
        typer.Option(help="Schedule to run.", metavar="SCHEDULE.json", rich_help_panel=PANELS[""]),
    ] = None,
    solve: Annotated[
        bool,
        typer.Option(
            "--solve", help="Profile the model and solve for a schedule, then train.", rich_help_panel=PANELS["online"]
        ),
    ] = False,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Start training immediately; profile and re-solve in the background and switch schedules between "
            "steps.",
            rich_help_panel=PANELS["online"],
        ),
    ] = False,
    as_json: AsJson = False,
    **given: Any,
) -> int:
    """Train a model with a pipeline schedule: a small GPT, or stages of your own.

    Under torchrun each process runs one device of one replica, on CUDA with its own GPU; otherwise all devices run in
    this process. With --check nothing is trained, and the exit code is 1 if a gradient differs from the reference
    step's by more than rounding (1e-5 of the largest, 1e-12 in float64, 2^-7 with autocast on a GPU), if a memory peak
    exceeds plan or budget, or if memory is still allocated after a step. With --trace one step is repeated a few times
    and compared with the plan. All settings are explained in docs/train.md.
    """
    from optpipe.train.settings import read_config, settings_named_as_given

    setting_names = {_variable(name): name for name in SETTINGS}
    settings = {setting_names[variable]: value for variable, value in given.items() if value is not None}
    if solve and online:
        detail = "solves during the training, but --solve before it. Maybe leave one of them out."
        raise InputError([Issue("--online", "conflict", detail)])
    if solve or online:
        settings[MODE] = "online" if online else "first"
    if schedule is not None:
        settings["schedule"] = schedule
    read = read_config(config, settings)
    with settings_named_as_given(config, settings):
        return _train(read, as_json)


def _train(config: TrainingConfig, as_json: bool) -> int:
    with needs_extra("train", "training"):
        from optpipe.train import leads, train
    from optpipe.cli.background_solver import ChildSolver
    from optpipe.cli.train_report import document, log_to_stderr, print_result, progress
    from optpipe.schedule import schedule_text

    if config.output.trace is None and config.output.trace_step is not None:
        detail = f"is {config.output.trace_step}, but --trace is missing. Maybe --trace trace.json."
        raise InputError([Issue("--trace-step", "no_trace", detail)])
    if leads():
        _check_outputs(config)
    solver = None
    if leads() and config.online.on:
        compile_once()
        solver = ChildSolver()
    with log_to_stderr(), progress(config.steps, leads()) as report:
        result = train(config, report, solver)
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


def _check_outputs(config: TrainingConfig) -> None:
    """Raise InputError before the training if an output could not be written; missing folders are created."""
    output = config.output
    profiles = output.profile_folder if output.profiled_steps else None
    folders = {"checkpoints.folder": config.checkpoints.folder, "output.tensorboard": output.tensorboard}
    for name, folder in (folders | {"output.profile_folder": profiles}).items():
        for place in (folder, *folder.parents) if folder else ():
            if os.path.exists(place) and not os.path.isdir(place):
                detail = f"is {shown(str(folder))}, but {place} is a file. Maybe name another folder."
                raise InputError([Issue(name, "no_folder", detail)])
    for path in (output.trace, output.metrics, output.plot):
        if path is not None:
            with suppress(OSError):  # check_writable reports it
                path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(path)
    if config.online.save is not None:
        check_writable(config.online.save)
