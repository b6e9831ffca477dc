"""Figures are never cut, names are shown as they are, and a file is there whole or not at all."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
import typer
from rich.console import Console

from optpipe.cli.console import check_writable, parse_share, parse_size, stdout, table, write_whole
from optpipe.errors import InputError


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


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "schedule.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [file.name for file in target.parent.iterdir()] == ["schedule.json"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe)
    write_whole(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_write_that_fails_names_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "schedule.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "gone.json").symlink_to(tmp_path / "none" / "schedule.json")
    for path, why in (
        (tmp_path, "it is a folder. Maybe"),
        (tmp_path / "none" / "schedule.json", "none is not a folder. Maybe"),
        (tmp_path / "gone.json", "none is not a folder. Maybe"),
    ):
        with pytest.raises(InputError, match=why) as caught:
            check_writable(path)
        assert caught.value.source == str(path)


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
