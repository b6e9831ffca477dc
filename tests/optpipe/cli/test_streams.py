"""No command fails because of where its output goes: closed, full, unread, or in an encoding that lacks a character."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe.cli import main

OPTPIPE = (sys.executable, "-m", "optpipe")


def run(*arguments: object) -> object:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_leads_nowhere(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, name, None)
    try:
        assert run("methods", "--json") == 0
        assert run("verify", tmp_path / "none.json", "--json") == 2
    finally:
        getattr(sys, name).close()


def test_a_character_that_the_encoding_lacks(
    quick_schedule_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert run("export", quick_schedule_file, "--to", "torch-csv", "-o", tmp_path / "zürich.csv") == 0
    assert b"z\\xfcrich.csv" in ascii_only.buffer.getvalue()  # type: ignore[attr-defined]


MUCH_AND_LITTLE = [("methods", "--json"), ("--version",)]


@pytest.mark.parametrize("arguments", MUCH_AND_LITTLE)
def test_a_full_disk_is_said_once(arguments: tuple[str, ...]) -> None:
    command = (*OPTPIPE, *arguments)
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "error: the system: No space left on device.\n")


@pytest.mark.parametrize("arguments", MUCH_AND_LITTLE)
def test_nothing_is_said_to_a_reader_who_went_away(arguments: tuple[str, ...]) -> None:
    command = (*OPTPIPE, *arguments)
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
