"""The settings of training as options: one a setting, with its text, in a panel for each table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from optpipe.cli.size import parse_share, parse_size
from optpipe.train.config import SETTINGS, Setting

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
