"""An output file is there whole or not at all, and is checked before a long run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from optpipe.errors import InputError
from optpipe.files import check_writable, write_atomically


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "schedule.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [file.name for file in target.parent.iterdir()] == ["schedule.json"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe)
    write_atomically(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_atomically(tmp_path / "picture.png", b"\x89PNG\r\n")
    assert (tmp_path / "picture.png").read_bytes() == b"\x89PNG\r\n"


def test_a_write_that_fails_names_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "schedule.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "gone.json").symlink_to(tmp_path / "none" / "schedule.json")
    for path, why in (
        (tmp_path, "it is a folder. Maybe"),
        (tmp_path / "none" / "schedule.json", "none is not a folder. Maybe"),
        (tmp_path / "gone.json", "none is not a folder. Maybe"),
        (tmp_path / ("é" * 130), "its name has more than 255 bytes. Maybe a shorter one."),
    ):
        with pytest.raises(InputError, match=why) as caught:
            check_writable(path)
        assert caught.value.source == str(path)


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "problem.json", tmp_path / "link.json"
    path.write_text("{}")
    link.symlink_to(path)
    for output, source in ((path, path), (path, link), (link, path)):
        with pytest.raises(InputError, match="it is what is read, and would be lost"):
            check_writable(output, None, source)
    check_writable(tmp_path / "other.json", path, link, tmp_path / "none.json")
