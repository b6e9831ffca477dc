"""The settings of training as options: one a setting, with its text, in a panel for each table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from optpipe.cli.size import parse_size
from optpipe.train.config.flags import Flag, Place, all_flags

PANELS = {
    "": "Run",
    "model": r"Model \[model]",
    "optimizer": r"Optimizer \[optimizer]",
    "checkpoints": r"Checkpoints \[checkpoints]",
    "online": r"Solving and profiling \[online]",
    "output": r"What is left \[output]",
}

MODE: Place = ("online", "mode")
"""Has two flags of its own, --solve and --online."""


def with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command that takes `**given` an option for every setting."""
    own = [p for p in signature(command, eval_str=True).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [*own, *(_parameter(flag) for flag in all_flags() if flag.place != MODE)]
    options.sort(key=lambda option: [None, *PANELS.values()].index(option.annotation.__metadata__[0].rich_help_panel))
    command.__signature__ = Signature(options, return_annotation=int)  # type: ignore[attr-defined]
    return command


def given_settings(given: Mapping[str, Any]) -> dict[Place, Any]:
    """The settings among the values of options, those that were given."""
    places = {_variable(flag.place): flag.place for flag in all_flags()}
    return {places[name]: value for name, value in given.items() if value is not None}


def _variable(place: Place) -> str:
    return "_".join(filter(None, place))


def _parameter(flag: Flag) -> Parameter:
    names = f"{flag.name}/--no-{flag.name.removeprefix('--')}" if flag.kind.type is bool else flag.name
    option = typer.Option(names, help=_help(flag), rich_help_panel=PANELS[flag.place[0]], **_reading(flag))
    annotation = Annotated[flag.kind.type | None, option]  # type: ignore[name-defined]
    return Parameter(_variable(flag.place), Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _reading(flag: Flag) -> dict[str, Any]:
    """How the option's text is read and what stands for it in the help; limits are checked with the file's."""
    if flag.place[1].endswith("_bytes"):
        return {"parser": parse_size, "metavar": "SIZE"}
    if flag.kind.choices:
        return {"metavar": "|".join(flag.kind.choices)}
    names = {int: "N", float: "X", str: "NAME", Path: "PATH"}
    return {"metavar": names[flag.kind.type]} if flag.kind.type in names else {}


def _help(flag: Flag) -> str:
    """The text with the default, where the text does not tell it and there is one."""
    text, default = flag.setting.text, flag.default
    first = text.split(maxsplit=1)[0]
    if "." not in first and first.rstrip(":") not in flag.kind.choices:
        text = text[0].upper() + text[1:]
    if "default:" in text or default is None or default is False:
        return f"{text}."
    return f"{text}; default: {'yes' if default is True else default}."
