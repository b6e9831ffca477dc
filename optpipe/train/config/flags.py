"""The names that settings have on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from optpipe.train.config.checkpoints import CheckpointConfig
from optpipe.train.config.model import ModelConfig
from optpipe.train.config.online import OnlineConfig
from optpipe.train.config.optimizer import OptimizerConfig
from optpipe.train.config.output import OutputConfig
from optpipe.train.config.setting import Group, Kind, Setting, kind_of, settings_of
from optpipe.train.config.training import TrainingConfig

GROUPS: Mapping[str, type[Group]] = {
    group.table: group
    for group in (TrainingConfig, ModelConfig, OptimizerConfig, CheckpointConfig, OnlineConfig, OutputConfig)
}
"""All groups by the name of their table."""

Place = tuple[str, str]
"""A setting: its table ("" for the top of the file) and its field."""

SCHEDULE: Place = ("", "schedule")
"""In a file and as a flag a path, in the configuration what is read there."""


class Flag(NamedTuple):
    """A setting as the command line has it; `default` is what holds where it is not given."""

    place: Place
    name: str
    setting: Setting
    kind: Kind
    default: object


def all_flags() -> Iterator[Flag]:
    """Every setting, in the order of the groups."""
    for table, group in GROUPS.items():
        defaults = {f.name: f.default for f in fields(group)}
        for field, setting in settings_of(group).items():
            yield Flag((table, field), flag_of((table, field)), setting, kind_of(group, field), defaults[field])


def flag_of(place: Place) -> str:
    """The flag of a setting, such as ``--learning-rate``."""
    table, field = place
    setting = settings_of(GROUPS[table]).get(field)
    name = setting.flag if setting and setting.flag else field
    return f"--{name.replace('_', '-')}"
