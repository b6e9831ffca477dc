"""What the commands print: results on stdout, progress and errors on stderr, JSON documents on request."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from optpipe.errors import InfeasibleError, InputError, Issue, OptPipeError

FILE_WIDTH = 160

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the arguments (needed before they are parsed, for errors)."""
    return "--json" in arguments


def stdout() -> Console:
    """Where results go; wide enough for every table where no terminal sets the width."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else FILE_WIDTH)


def stderr() -> Console:
    """Where progress goes."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2, allow_nan=False))


def print_error(error: OptPipeError | KeyboardInterrupt | str, as_json: bool) -> None:
    """One message on stderr (and as a document on stdout where JSON was asked for); under torchrun by rank 0 alone."""
    if os.environ.get("RANK", "0") != "0":
        return
    source = getattr(error, "source", "")
    lines = [f"{source}: {line}" if source else line for line in str(error).splitlines()]
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    if as_json:
        document: dict[str, Any] = {
            "error": {
                "type": "UsageError" if isinstance(error, str) else type(error).__name__,
                "message": "\n".join(lines),
            }
        }
        if isinstance(error, InputError):
            document["error"]["issues"] = [vars(issue) for issue in error.issues]
        if isinstance(error, InfeasibleError):
            document["error"]["budgets_bytes"] = error.budgets_bytes
        print_json(document)


def table(*columns: str) -> Table:
    """A plain table: the first column to the left, numbers to the right."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for k, column in enumerate(columns):
        result.add_column(column, justify="left" if k == 0 else "right", no_wrap=True)
    return result


def time_text(time_us: float) -> str:
    """A time in microseconds, with thousands separated and no digits that say nothing."""
    return f"{time_us:,.0f} us" if float(time_us).is_integer() else f"{time_us:,.3f} us"


def share_text(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.2f} %"


def check_writable(path: Path) -> None:
    """Raise InputError if a file could not be written at `path`: better now than after an hour's search."""
    folder = path.parent
    if not folder.is_dir():
        raise InputError([Issue("", "no_folder", f"cannot be written: {folder} is not a folder.")], str(path))
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError([Issue("", "not_writable", "cannot be written: no permission, or a folder.")], str(path))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as f:
        f.write(text)
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(f.name, 0o666 & ~umask)
    os.replace(f.name, path)
