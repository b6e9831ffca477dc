"""Configurations of all models of torchtitan, by name, that follow a planned schedule: what `--config` finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from torchtitan.models import _supported_models

from optpipe.torchtitan import with_planned_schedule

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """The configuration `name` of the model that has one. Raises AttributeError where none has."""
    for model in sorted(_supported_models):
        if name.startswith(model):
            made = getattr(import_module(f"torchtitan.models.{model}.config_registry"), name, None)
            if made is not None:
                return partial(_planned, made)
    raise AttributeError(f"no model of torchtitan has a configuration {name!r}")


def _planned(made: Callable[[], Trainer.Config]) -> Trainer.Config:
    return with_planned_schedule(made())
