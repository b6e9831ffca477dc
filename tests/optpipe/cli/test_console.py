"""Figures are never cut, names are shown as they are, and sizes and shares are parsed."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import typer
from rich.console import Console

from optpipe.cli import compare
from optpipe.cli.console import doing_long, parse_share, parse_size, stderr, stdout, table
from solver.trainer_settings import nearest_settings
from tests.optpipe.cli.conftest import Cli


def test_a_narrow_screen_cuts_no_figure() -> None:
    rows = table("device", "peak bytes", "why")
    rows.columns[-1].no_wrap = False
    rows.add_row("0", "12,345,678,901", "one microbatch needs more")
    screen = io.StringIO()
    Console(file=screen, width=20, soft_wrap=True).print(rows)
    first, *others = screen.getvalue().splitlines()[1:]
    assert "12,345,678,901" in first
    assert "microbatch" in "".join((first, *others))
    assert len(others) == 2, "a text is broken between its words"


def test_names_that_look_like_markup_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("[/name]")
    rows.add_row("[/gpu] :b: [4, no limit]")
    stdout().print("a [b] of :b: [/c]")
    stdout().print(rows)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["a [b] of :b: [/c]", "[/name]", "[/gpu] :b: [4, no limit]"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("8GiB", 8 * 2**30), ("8G", 8 * 2**30), ("1.5 GB", 1_500_000_000), ("512M", 2**29), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "8Gi", "GiB", "1e9", "8 G B", "nan", "\u0661"])
def test_other_things(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is not a size\. Maybe write it as 8GiB"):
        parse_size(text)


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.1", 0.1), ("0", 0.0), ("12.5 %", 0.125), ("90%", 0.9)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "10", "91%", "-1%", "%", "1e-1", "nan"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is not a share from 0% to 90%\. Maybe write it as 10%"):
        parse_share(text)


def wait_until_told() -> None:
    """Wait until what is told after a while has been told."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def test_what_takes_long_is_told_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("optpipe.cli.console.LONG_S", 600.0)
    with doing_long("reading"):
        pass
    assert capsys.readouterr().err == "", "what is soon done is not told"
    monkeypatch.setattr("optpipe.cli.console.LONG_S", 0.01)
    with doing_long("reading"):
        wait_until_told()
    assert capsys.readouterr().err == "reading\n"


def test_settings_that_take_long_to_simulate_are_told(
    cli: Cli, quick_schedule_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: object) -> object:
        wait_until_told()
        return nearest_settings(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("optpipe.cli.console.LONG_S", 0.01)
    monkeypatch.setattr("solver.trainer_settings.nearest_settings", slow)
    run = cli("export", quick_schedule_file, "--to", "megatron", "-o", tmp_path / "flags.txt")
    assert (run.code, run.err.splitlines()[-1]) == (0, "exporting to megatron")


def test_what_compare_does_for_long_is_told(
    cli: Cli, quick_schedule_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that kernels are compiled, before the first of them is called: for the schedule of a file."""

    def slow(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            wait_until_told()
            return function(*arguments)

        return wrapped

    monkeypatch.setattr("optpipe.cli.console.LONG_S", 0.01)
    for name in ("_load", "_given", "_run"):
        monkeypatch.setattr(compare, name, slow(getattr(compare, name)))
    monkeypatch.setattr(compare, "compile_once", lambda: stderr().print("compiling kernels"))
    run = cli("compare", quick_schedule_file, "--methods", "1f1b")
    told = ["reading files", "compiling kernels", "timing schedules of files", "1f1b, up to 30 s"]
    assert run.err.splitlines() == told
    assert run.code == 0


@pytest.mark.parametrize(
    ("command", "module", "name", "told"),
    [
        (("verify",), "optpipe.verify", "verify", "verifying schedule.json"),
        (("plot", "-o", "x.svg"), "optpipe.plot", "draw_schedule", "drawing x.svg"),
    ],
)
def test_what_takes_long_with_a_schedule_is_told(
    cli: Cli,
    quick_schedule_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    module: str,
    name: str,
    told: str,
) -> None:
    monkeypatch.setattr("optpipe.cli.console.LONG_S", 0.01)
    monkeypatch.chdir(tmp_path)
    true = getattr(import_module(module), name)

    def slow(*arguments: object) -> object:
        wait_until_told()
        return true(*arguments)

    monkeypatch.setattr(import_module(module), name, slow)
    run = cli(command[0], quick_schedule_file, *command[1:])
    assert (run.code, run.err) == (0, f"{told}\n")
