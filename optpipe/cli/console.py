"""Console input and output of all commands: tables, numbers, sizes, progress and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from solver.limits import Cancel


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


def names_in(text: str) -> list[str]:
    """The names in a list such as ``a, b``, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?(%?)", re.ASCII)
MOST_SHARE = 0.9
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``8GiB``, ``512M``, ``1.5 GB`` or ``1000000``: K, M, G, T and KiB are 1024, KB is 1000.

    Raises typer.BadParameter.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not a size. Maybe write it as 8GiB or 512M")
    return size


def parse_share(text: str) -> float:
    """A share such as ``10%`` or ``0.1``, from 0 to 0.9. Raises typer.BadParameter."""
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= MOST_SHARE:
        raise typer.BadParameter(f"{text!r} is not a share from 0% to {MOST_SHARE:.0%}. Maybe write it as 10% or 0.1")
    return share


@contextmanager
def ctrl_c_cancels(cancel: Cancel) -> Iterator[None]:
    """Within this context the first Ctrl-C requests `cancel`; the next one is a KeyboardInterrupt.

    Where SIGINT is ignored, as in what a script runs in the background, it stays ignored.
    """

    def handle(_number: int, _frame: object) -> None:
        if cancel.requested:
            raise KeyboardInterrupt
        cancel.request()

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def compile_once() -> None:
    """Compile all kernels where that has not been done for this installation.

    In a process of its own, and out of reach of Ctrl-C: on an interrupt this process ends it, which says so itself.
    """
    from solver.warm_up import is_warm, warm_up_in_child

    if is_warm():
        return
    with doing("compiling kernels: once for an installation, up to a minute or two"):
        warm_up_in_child(start_new_session=True)


def compile_meanwhile(problem: Problem) -> None:
    """Have the kernels compiled while a solve makes published schedules; its searches join as theirs are ready."""
    from solver.process.parent import load_uncompiled
    from solver.warm_up import warm_up_in_background

    if warm_up_in_background():
        stderr().print("compiling kernels meanwhile, once for an installation: searches join as theirs are ready")
        load_uncompiled(problem, "optpipe.simulate", "optpipe.worst_case_memory")
