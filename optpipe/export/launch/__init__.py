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

from optpipe.errors import InputError, Issue

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

    launch = Launch.of(plan, source)
    try:
        return _maker(trainer)(launch)
    except InputError as error:
        others = [f"--to {name}" for name in TRAINERS if name != trainer and _takes(launch, name)]
        raise InputError([_advised(issue, others) for issue in error.issues], source) from None


def _maker(trainer: str) -> Callable[[Launch], LaunchFiles]:
    make: Callable[[Launch], LaunchFiles] = import_module(f"optpipe.export.launch.{trainer}").files
    return make


def _takes(launch: Launch, trainer: str) -> bool:
    try:
        _maker(trainer)(launch)
    except InputError:
        return False
    return True


def _advised(issue: Issue, others: Sequence[str]) -> Issue:
    """A refusal that names the trainers which take the plan, after what its own advice is."""
    detail, maybe, advice = issue.detail.rstrip(".").partition(" Maybe ")
    if not (maybe or others):  # it refuses the model: this one builds all that have a config.json
        others = ["another plan for --to automodel, which says what it needs"]
    choices = [*([advice] if maybe else []), *([" or ".join(others)] if others else [])]
    return Issue(issue.loc, issue.code, f"{detail.rstrip('.')}. Maybe {', or '.join(choices)}.")
