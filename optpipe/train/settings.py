"""Settings of a training run as the command line has them: by flag, with their texts, and a file that flags override.

Imports no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from optpipe.document import read_toml
from optpipe.document_kinds import TRAINING_SETTINGS
from optpipe.errors import InputError, Issue, shown
from optpipe.train import config as groups
from optpipe.train.config import GROUPS, TrainingConfig, issues_of, kind_of

MAX_CONFIG_BYTES = 2**16

FLAGS = {
    "model.name": "--model",
    "optimizer.name": "--optimizer",
    "checkpoints.folder": "--checkpoint",
    "checkpoints.every_steps": "--checkpoint-every",
    "checkpoints.asynchronous": "--checkpoint-async",
    "online.memory_bytes": "--memory",
    "online.time_limit_s": "--time-limit",
    "online.save": "--save-schedule",
}
"""Flags that are not named after the field."""


class Setting(NamedTuple):
    """A field as the command line needs it; `name` is its place in the file, such as ``model.layers``."""

    name: str
    table: str
    flag: str
    text: str
    type: type
    choices: tuple[str, ...]
    default: object


def _texts() -> dict[tuple[str, str], str]:
    """The docstrings under fields, by class and field: pydantic would read their file again for each class."""
    found = {}
    for group in ast.parse(Path(groups.__file__).read_bytes()).body:
        if isinstance(group, ast.ClassDef):
            for field, under in pairwise(group.body):
                match field, under:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[group.name, name] = " ".join(text.split())
    return found


def _setting(table: str, field: str, text: str, info: FieldInfo) -> Setting:
    name = f"{table}.{field}" if table else field
    flag = FLAGS.get(name, f"--{field.replace('_', '-')}")
    return Setting(name, table, flag, text, *kind_of(info), info.default)


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for texts in [_texts()]
    for table, group in GROUPS.items()
    for field, info in group.__pydantic_fields__.items()
    if field != "schedule" and field not in GROUPS
    for setting in [_setting(table, field, texts[group.__name__, field], info)]
}
"""Every setting by its name, in the order of the groups. The schedule is none: it is given as a path."""


def read_config(path: Path | None, flags: Mapping[str, Any]) -> TrainingConfig:
    """The configuration in `path`, if any; `flags`, settings by their names, win over it.

    Paths in the file are relative to its folder. Raises InputError that names each wrong setting as it was given: by
    its place in the file, or by its flag.
    """
    folder = path.parent if path else Path()
    issues = []
    with _named_as_given(path, flags):
        data = read_toml(path, MAX_CONFIG_BYTES, TRAINING_SETTINGS) if path else {}
        for name, value in flags.items():
            table, _, field = name.rpartition(".")
            values = data.setdefault(table, {}) if table else data
            if isinstance(values, dict):
                values[field] = value
        schedule = data.pop("schedule", None)
        if schedule is not None and not isinstance(schedule, str | Path):
            issues.append(Issue("schedule", "wrong_type", f"is {shown(schedule)} but must be a path."))
        try:
            config = TypeAdapter(TrainingConfig).validate_python(data, context=folder)
        except ValidationError as error:
            issues += issues_of(TrainingConfig, error)
        else:
            if schedule is not None and config.online.mode == "first":
                detail = "is given, but --solve has one found before training. Maybe --online, which begins with it."
                issues.append(Issue("schedule", "conflict", detail))
        if issues:
            raise InputError(issues)
    loaded = None
    if schedule is not None:  # its own errors name its file
        from optpipe.schedule import Schedule

        loaded = Schedule.load(folder / schedule if isinstance(schedule, str) else schedule)
    with _named_as_given(path, flags):
        return replace(config, schedule=loaded)


@contextmanager
def _named_as_given(path: Path | None, flags: Mapping[str, Any]) -> Iterator[None]:
    """Name settings in errors by the flag that gave them (without a file: that could), otherwise by the file."""
    names = {name: setting.flag for name, setting in SETTINGS.items()} | {"schedule": "--schedule"}
    try:
        yield
    except InputError as error:
        if error.source:
            raise
        issues = [
            Issue(names.get(i.pointer, i.pointer), i.code, i.detail) if i.pointer in flags or not path else i
            for i in error.issues
        ]
        in_file = path and not any(issue.pointer.startswith("--") for issue in issues)
        raise InputError(issues, str(path) if in_file else "") from None


@contextmanager
def settings_named_as_given(path: Path | None, flags: Mapping[str, Any]) -> Iterator[None]:
    """Name settings as `read_config` does in errors that training raises later, when it uses them.

    Errors of anything else are left as they are. A part of training that commands share names a flag, such as
    ``--memory``: where that is not among `flags`, the file gave the setting.
    """
    in_file = {setting.flag: setting for name, setting in SETTINGS.items() if path and name not in flags}
    try:
        yield
    except InputError as error:
        if not error.issues:
            raise
        pointers = [issue.pointer for issue in error.issues]
        named = [in_file[pointer].name if pointer in in_file else pointer for pointer in pointers]
        if error.source or not set(named) <= SETTINGS.keys():
            raise
        with _named_as_given(path, flags):
            issues = [Issue(name, i.code, i.detail) for name, i in zip(named, error.issues, strict=True)]
            raise InputError(issues) from None
