"""The help of every command, as a terminal of 80 columns shows it."""

from __future__ import annotations

import pytest

from optpipe.cli.app import COMMANDS, command_line
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
