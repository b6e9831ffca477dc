"""What a setting is: a field of a frozen dataclass that knows its text, its limits and its flag.

Nothing here or in the groups imports torch: the command line reads them for its help, whatever is asked of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from optpipe.errors import InputError, Issue

T = TypeVar("T")

MAX_NUMBER = 1e30
"""Of settings without a limit of their own: far above all that means something, far below where floats end."""

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}


@dataclass(frozen=True)
class Setting:
    """The metadata of a field.

    `least` and `most` are allowed themselves, `above` is not. `flag` is its name on the command line where that is
    not the field's own.
    """

    text: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    flag: str | None = None


class Kind(NamedTuple):
    """What a field holds: a type, one of a few words if `choices` has any, and perhaps None."""

    type: type
    choices: tuple[str, ...]
    optional: bool


def setting(
    default: T,
    text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    flag: str | None = None,
) -> T:
    """A dataclass field with this default; the rest is as in `Setting`."""
    found: T = field(default=default, metadata={"setting": Setting(text, least, most, above, flag)})
    return found


@dataclass(frozen=True)
class Group:
    """Settings that belong together: a table of the TOML file, a panel of `--help`.

    Raises InputError that lists every field that is wrong, with its value and limit.
    """

    table: ClassVar[str] = ""
    """the name of its TOML table; "": the top of the file"""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in settings_of(type(self))}
        issues = wrong_settings(type(self), values) or list(self.conflicts())
        if issues:
            raise InputError(issues)

    def to_data(self) -> dict[str, Any]:
        """All settings as JSON values, those of groups in it under their names."""
        found: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Group):
                found[f.name] = value.to_data()
            elif "setting" in f.metadata:
                found[f.name] = str(value) if isinstance(value, Path) else value
        return found

    def conflicts(self) -> Iterator[Issue]:
        """What is wrong between fields that are right each by itself."""
        yield from ()


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What `to_data` gave, by names such as `optimizer.beta1`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def settings_of(group: type[Group]) -> Mapping[str, Setting]:
    """The settings of a group by the name of the field."""
    return {f.name: f.metadata["setting"] for f in fields(group) if "setting" in f.metadata}


def kind_of(group: type[Group], name: str) -> Kind:
    """What a setting of a group holds."""
    # One annotation at a time: those of other fields may name classes that are imported for the type checker alone.
    alone = type("alone", (), {"__annotations__": {name: group.__annotations__[name]}, "__module__": group.__module__})
    hint = get_type_hints(alone)[name]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    [kind] = [part for part in parts if part is not type(None)]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return Kind(str if choices else kind, choices, len(parts) > 1)


def wrong_settings(group: type[Group], values: Mapping[str, Any]) -> list[Issue]:
    """What is wrong with these values of a group, each taken by itself."""
    known = [name for name in settings_of(group) if name in values]
    return [issue for name in known for issue in _wrong(group, name, values[name])]


def _wrong(group: type[Group], name: str, value: Any) -> Iterator[Issue]:
    kind = kind_of(group, name)
    if value is None and kind.optional:
        return
    if kind.choices:
        if value not in kind.choices:
            yield Issue(name, "unknown", f"is {_shown(value)} but must be one of {', '.join(kind.choices)}.")
    elif not _is(kind.type, value):
        yield Issue(name, "wrong_type", f"is {_shown(value)} but must be {KINDS[kind.type]}.")
    elif kind.type in (int, float):
        yield from _outside(settings_of(group)[name], name, value)


def _is(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _shown(value: Any) -> str:
    from optpipe.document import shown

    return shown(value)


def _outside(limits: Setting, name: str, value: float) -> Iterator[Issue]:
    if isinstance(value, float) and not math.isfinite(value):
        yield Issue(name, "not_finite", f"is {value} but must be finite.")
    elif limits.above is not None and value <= limits.above:
        yield Issue(name, "out_of_range", f"is {_shown(value)} but must be above {limits.above:g}.")
    elif (limits.least is not None and value < limits.least) or (limits.most is not None and value > limits.most):
        yield Issue(name, "out_of_range", f"is {_shown(value)} but must be {_range(limits)}.")
    elif value > MAX_NUMBER:
        yield Issue(name, "out_of_range", f"is {_shown(value)} but must be at most {MAX_NUMBER:g}.")


def _range(limits: Setting) -> str:
    if limits.most is None:
        return f"at least {limits.least}"
    return f"at most {limits.most}" if limits.least is None else f"from {limits.least} to {limits.most}"
