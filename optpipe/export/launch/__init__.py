"""Launch files: a plan for a cluster as files that start other trainers.

A trainer is one file here with one function under `trainer`: it takes a `Launch` and returns the files with what they
lose. The command line (`optpipe export plan/ --to NAME`) and the service read them from `TRAINERS`. No function here
reads or writes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe.export.launch.reading import Launch

TRAINERS: Mapping[str, str] = {
    "megatron": "Megatron-LM: a shell script that starts pretrain_gpt.py",
    "bridge": "Megatron Bridge: a program with its configuration",
    "torchtitan": "torchtitan: a shell script that starts it with the plan's schedule",
    "automodel": "NeMo AutoModel: its YAML",
}
"""Trainers that a plan can be launched with; each is a module here, with `files`."""


@dataclass(frozen=True)
class LaunchFiles:
    """Files by name, the first of which is started; what they lose against the plan.

    `runs_schedule`: the plan's schedule file is put next to them. `seconds`: predicted of a step.
    """

    files: Mapping[str, str]
    lost: Sequence[str]
    seconds: float
    runs_schedule: bool = False


def launch_files(plan: Mapping[str, Any], trainer: str, source: str = "") -> LaunchFiles:
    """Files that start a plan (`optpipe.plan/1`, parsed) in a trainer of `TRAINERS`.

    Raises InputError for what is no plan, and where the trainer cannot run it.
    """
    from optpipe.export.launch.reading import Launch

    make: Callable[[Launch], LaunchFiles] = import_module(f"optpipe.export.launch.{trainer}").files
    return make(Launch.of(plan, source))
