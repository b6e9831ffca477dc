"""`TrainingConfig` from a TOML file and flags, which win over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from optpipe.document import shown
from optpipe.errors import InputError, Issue
from optpipe.schedule import Schedule
from optpipe.toml_file import read_toml
from optpipe.train.config.flags import GROUPS, SCHEDULE, Place, flag_of
from optpipe.train.config.setting import Group, kind_of, settings_of, wrong_settings
from optpipe.train.config.training import TrainingConfig

MAX_CONFIG_BYTES = 2**16

Values = Mapping[Place, Any]
"""Settings that were given; paths are Path."""


def read_config(path: Path | None, flags: Values) -> TrainingConfig:
    """The configuration in `path`, if any, with what `flags` say.

    Paths in the file are seen from its folder. Raises InputError that names each wrong setting as it was given: by its
    place in the file, or by its flag.
    """
    with _named_as_given(path, flags):
        given = {**(_in_file(path) if path else {}), **flags}
        _refuse([issue for table, group in GROUPS.items() for issue in _wrong(table, group, given)])
        groups = {table: _group(table, group, given) for table, group in GROUPS.items() if table}
        top = _of_table(given, "")
        schedule = top.pop("schedule", None)
    # A schedule's own errors name its file.
    loaded = None if schedule is None else Schedule.load(schedule)
    with _named_as_given(path, flags):
        return TrainingConfig(loaded, **groups, **top)  # type: ignore[arg-type]


def _in_file(path: Path) -> dict[Place, Any]:
    """What a file says, with its paths. Raises InputError about keys that are no settings."""
    data = read_toml(path, MAX_CONFIG_BYTES, "Maybe it is the schedule, which --schedule takes.")
    tables = GROUPS.keys() - {""}
    found: dict[Place, Any] = {}
    issues = []
    for key, value in data.items():
        if key in tables and isinstance(value, dict):
            issues += [_unknown(key, field) for field in value if not _is_setting(key, field)]
            found |= {(key, field): entry for field, entry in value.items()}
        elif key in tables:
            maybe = f" Maybe {key}.name is meant." if _is_setting(key, "name") else ""
            issues.append(Issue(key, "no_table", f"is {shown(value)} but must be a table.{maybe}"))
        elif _is_setting("", key):
            found["", key] = value
        else:
            issues.append(_unknown("", key))
    _refuse(issues)
    return {place: _seen_from(path.parent, place, value) for place, value in found.items()}


def _is_setting(table: str, field: str) -> bool:
    return (table, field) == SCHEDULE or field in settings_of(GROUPS[table])


def _unknown(table: str, key: str) -> Issue:
    """The key is none; perhaps it is misspelt, or in the wrong table."""
    names = [*settings_of(GROUPS[table]), *((*GROUPS, "schedule") if not table else ())]
    close = get_close_matches(key, [name for name in names if name], n=1)
    elsewhere = [other for other, group in GROUPS.items() if key in settings_of(group)]
    maybe = ""
    if close:
        maybe = f" Maybe you meant {close[0]}."
    elif elsewhere:
        home = f"in [{elsewhere[0]}]" if elsewhere[0] else "before the first table"
        maybe = f" Maybe it belongs {home}."
    return Issue(_pointer(table, key), "unknown_field", f"is not a setting.{maybe}")


def _seen_from(folder: Path, place: Place, value: Any) -> Any:
    """A path is seen from the file's folder; another value stays."""
    if isinstance(value, str) and (place == SCHEDULE or kind_of(GROUPS[place[0]], place[1]).type is Path):
        return folder / value
    return value


def _wrong(table: str, group: type[Group], given: Values) -> list[Issue]:
    """What is wrong with single settings of a group."""
    values = _of_table(given, table)
    issues = [_moved(issue, table) for issue in wrong_settings(group, values)]
    if not table and "schedule" in values:
        issues += _wrong_schedule(values["schedule"], given)
    return issues


def _wrong_schedule(value: Any, given: Values) -> Iterator[Issue]:
    if not isinstance(value, Path):
        yield Issue("schedule", "wrong_type", f"is {shown(value)} but must be a path.")
    elif given.get(("online", "mode")) == "first":
        detail = "is given, but --solve has one found before training. Maybe --online, which begins with it."
        yield Issue("schedule", "conflict", detail)


def _group(table: str, group: type[Group], given: Values) -> Group:
    try:
        return group(**_of_table(given, table))
    except InputError as error:
        raise InputError([_moved(issue, table) for issue in error.issues]) from None


def _of_table(given: Values, table: str) -> dict[str, Any]:
    return {field: value for (home, field), value in given.items() if home == table}


def _moved(issue: Issue, table: str) -> Issue:
    return Issue(_pointer(table, issue.pointer), issue.code, issue.detail)


def _pointer(table: str, field: str) -> str:
    return f"{table}.{field}" if table else field


def _refuse(issues: list[Issue]) -> None:
    if issues:
        raise InputError(issues)


@contextmanager
def _named_as_given(path: Path | None, flags: Values) -> Iterator[None]:
    """Within: errors name what came from a flag by the flag, and otherwise the file."""
    by_flag = {_pointer(*place): flag_of(place) for place in flags}
    try:
        yield
    except InputError as error:
        if error.source:
            raise
        issues = [Issue(_name(issue.pointer, path, by_flag), issue.code, issue.detail) for issue in error.issues]
        in_file = path and not any(issue.pointer.startswith("--") for issue in issues)
        raise InputError(issues, str(path) if in_file else "") from None


def _name(pointer: str, path: Path | None, by_flag: Mapping[str, str]) -> str:
    """A setting as its giver knows it; one that nobody gave is named as it would be given."""
    if pointer in by_flag or path:
        return by_flag.get(pointer, pointer)
    table, _, field = pointer.rpartition(".")
    return flag_of((table, field)) if _is_setting(table, field) else pointer
