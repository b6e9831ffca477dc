"""What the commands print: results on stdout, progress and errors on stderr, JSON documents on request."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table
from rich.text import Text

from optpipe.errors import InputError, Issue

FILE_WIDTH = 160
"""Characters of a line where no terminal sets the width."""

MOST_WIDTH = 10_000
"""More than any table needs."""

COLUMN_GAP = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]


def stdout() -> Console:
    """Where results go; wide enough for every table where no terminal sets the width."""
    return _console(stderr=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def stderr() -> Console:
    """Where progress goes."""
    return _console(stderr=True, width=None)


def doing(what: str) -> Status:
    """As a context: says on a terminal what takes its time."""
    return stderr().status(Text(what))


def _console(*, stderr: bool, width: int | None) -> Console:
    """Prints text as it is: names may look like rich's markup, such as ``[/gpu]`` or ``:b:``."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2, allow_nan=False))


class _Table(Table):
    """Cuts no figure off: where the screen is too narrow for its columns, the screen breaks the lines."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = max(options.max_width, self._least_width(console))
        return super().__rich_console__(console, options.update(max_width=least))

    def _least_width(self, console: Console) -> int:
        """Columns that may wrap count with their longest word."""
        wide = console.options.update(max_width=MOST_WIDTH)
        width = 0
        for column in self.columns:
            sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
            width += max(size.maximum if column.no_wrap else size.minimum for size in sizes) + COLUMN_GAP
        return width


def table(*columns: str) -> Table:
    """A plain table: the first column to the left, numbers to the right."""
    result = _Table(box=None, pad_edge=False, header_style="bold")
    for k, column in enumerate(columns):
        result.add_column(column, justify="left" if k == 0 else "right", no_wrap=True)
    return result


def check_writable(path: Path) -> None:
    """Raise InputError if a file could not be written at `path`: better now than after an hour's search."""
    target = path if _stays(path) else _followed(path)
    folder = target.parent
    why = ""
    if os.path.isdir(target):
        why = "it is a folder. Maybe name a file in it."
    elif not os.path.isdir(folder):
        exists = os.path.exists(folder)
        why = f"{folder} is {'a file, not a folder' if exists else 'not a folder. Maybe make it first'}."
    elif os.path.exists(target) and not os.access(target, os.W_OK):
        why = "no permission."
    elif not _stays(target) and not os.access(folder, os.W_OK):
        why = f"no permission to write in {folder}."
    if why:
        raise InputError([Issue("", "not_writable", f"cannot be written: {why}")], str(path))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all.

    A link stays one, and what it leads to is replaced. What is no file, such as /dev/stdout or a pipe, is written to.
    Raises OSError that names `path`, and leaves the old file.
    """
    try:
        if _stays(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(_followed(path), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _stays(path: Path) -> bool:
    """Whether it is there and nothing that a file may take the place of: a device, a pipe, a folder."""
    return os.path.exists(path) and not os.path.isfile(path)


def _followed(path: Path) -> Path:
    """Where links lead."""
    return Path(os.path.realpath(path))


def _replace(target: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=".optpipe-", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
