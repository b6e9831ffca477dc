"""The help of every command, as a terminal of 80 columns shows it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from optpipe.cli.app import COMMANDS, GROUPS, command_line
from tests.optpipe.cli.conftest import Cli


@pytest.mark.parametrize("group", [(), ("keys",)])
def test_no_command_shows_what_there_is(cli: Cli, group: tuple[str, ...]) -> None:
    run = cli(*group)
    assert run.code == 2
    assert "Usage: optpipe" in run.out
    assert run.err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_cut(cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = cli(command, "--help")
    assert run.code == 0
    assert "…" not in run.out


def test_paragraphs_are_broken_by_the_terminal_alone() -> None:
    for command in command_line().registered_commands:
        assert not any("\n" in paragraph for paragraph in str(command.help).split("\n\n")), command.name


def test_commands_are_listed_as_they_are_without_being_loaded() -> None:
    listed, loaded = ([(c.name, c.help) for c in command_line(names).registered_commands] for names in ((), COMMANDS))
    assert listed == loaded
    assert all(text for _, text in listed)


HEAVY = {"numpy", "scipy", "numba", "ortools", "torch", "fastapi", "sqlalchemy", "matplotlib", "optpipe.schedule"}
"""Modules that take longer to import than the rest of a command's help together."""

HELP_OF_ALL = f"""
import sys
from optpipe.cli.app import COMMANDS, GROUPS, run
for command in [*COMMANDS, *GROUPS]:
    assert run([command, "--help"]) == 0
    print("loaded:", command, *{HEAVY} & sys.modules.keys(), file=sys.stderr)
"""


def test_help_loads_nothing_that_takes_long() -> None:
    """It is read before anything is run: what a command needs, it imports when it runs."""
    run = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=True, timeout=300)
    assert run.stderr.splitlines() == [f"loaded: {command}" for command in [*COMMANDS, *GROUPS]]
