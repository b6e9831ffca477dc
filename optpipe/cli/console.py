"""Console input and output of all commands: tables, numbers, sizes, progress and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table
from rich.text import Text

from optpipe.files import check_writable
from optpipe.units import bytes_of

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from solver.limits import Cancel, Limits


FILE_WIDTH = 160
"""Characters in a line when no terminal sets the width."""

MAX_WIDTH = 10_000
"""Wider than any table."""

COLUMN_GAP = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]


def stdout() -> Console:
    """Console for results; wide enough for every table when no terminal sets the width."""
    return _console(stderr=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def stderr() -> Console:
    """Console for progress."""
    return _console(stderr=True, width=None)


def doing(what: str) -> Status:
    """Context manager that shows a spinner with a text on a terminal."""
    return stderr().status(Text(what))


LONG_S = 2.0
"""Seconds after which a command without a terminal says what it is doing."""


POLL_S = 0.1
"""Seconds between two looks at whether kernels are compiled."""


@contextmanager
def doing_long(what: str) -> Iterator[None]:
    """Do as `doing` does; without a terminal print the text once, after `LONG_S`."""
    announced = Timer(LONG_S, stderr().print, [what])
    announced.daemon = True
    if not sys.stderr.isatty():
        announced.start()
    try:
        with doing(what):
            yield
    finally:
        announced.cancel()


def _console(*, stderr: bool, width: int | None) -> Console:
    """Console without markup: names may look like rich's, such as ``[/gpu]`` or ``:b:``."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=2, allow_nan=False))


def answer(data: Any, text: str, as_json: bool) -> int:
    """Print the JSON document of a command that went well, or its text; returns the exit code 0."""
    print_json(data) if as_json else print(text)
    return 0


class _Table(Table):
    """Table that never truncates a cell: on a narrow screen the terminal wraps the lines."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = console.options.update(max_width=MAX_WIDTH)
        width = 0
        for column in self.columns:
            sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
            # a column that may wrap needs its longest word
            width += max(size.maximum if column.no_wrap else size.minimum for size in sizes) + COLUMN_GAP
        return super().__rich_console__(console, options.update(max_width=max(options.max_width, width)))


def table(*columns: str, left: Sequence[int] = (0,), wraps: bool = False) -> Table:
    """Plain table: the columns `left` left-aligned, the others, for numbers, right-aligned.

    `wraps`: the last column is text, left-aligned, which may take several lines.
    """
    result = _Table(box=None, pad_edge=False, header_style="bold")
    for k, column in enumerate(columns):
        is_text = wraps and k == len(columns) - 1
        result.add_column(column, justify="left" if k in left or is_text else "right", no_wrap=not is_text)
    return result


def check_picture(path: Path) -> None:
    """Raise InputError if no picture can be written to `path`: an unknown suffix, or no permission."""
    from optpipe.plot.figure import format_of

    format_of(path)
    check_writable(path)


def names_in(text: str) -> list[str]:
    """Split a list such as ``a, b`` into names, without repetitions."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?(%?)", re.ASCII)
MOST_SHARE = 0.9


def parse_size(text: str) -> int:
    """Bytes of a size such as ``8GiB``, ``512M``, ``1.5 GB`` or ``1000000``: K, M, G, T and KiB are 1024, KB is 1000.

    Raises typer.BadParameter.
    """
    if not (size := bytes_of(text)):
        raise typer.BadParameter(f"{text!r} is not a size. Maybe write it as 8GiB or 512M")
    return size


_WIDTH = re.compile(r"(\d{1,4}(?:\.\d{1,3})?) ?(in|cm|mm|pt)", re.ASCII)
_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
LEAST_WIDTH, MOST_WIDTH = 2.0, 20.0
"""Inches of a picture in print."""


def parse_width(text: str) -> float:
    """Inches of a width such as ``3.3in``, ``8.4cm``, ``84mm`` or ``240pt``. Raises typer.BadParameter."""
    match = _WIDTH.fullmatch(text.strip())
    inches = float(match[1]) * _INCHES[match[2]] if match else 0.0
    if not LEAST_WIDTH <= inches <= MOST_WIDTH:
        most = f"from {LEAST_WIDTH:g}in to {MOST_WIDTH:g}in"
        raise typer.BadParameter(f"{text!r} is not a width {most}. Maybe write it as 3.3in or 84mm")
    return inches


PrintWidth = Annotated[
    float | None,
    typer.Option(
        "--width",
        parser=parse_width,
        metavar="WIDTH",
        help="Draw for print at this width, such as 3.3in or 84mm: small text, no title.",
    ),
]


def parse_share(text: str) -> float:
    """A share such as ``10%`` or ``0.1``, from 0 to 0.9. Raises typer.BadParameter."""
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= MOST_SHARE:
        raise typer.BadParameter(f"{text!r} is not a share from 0% to {MOST_SHARE:.0%}. Maybe write it as 10% or 0.1")
    return share


@contextmanager
def ctrl_c_cancels(cancel: Cancel) -> Iterator[None]:
    """Let the first Ctrl-C request `cancel`; the next one raises KeyboardInterrupt.

    An ignored SIGINT stays ignored, as in a script's background jobs.
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
    """Compile all kernels unless this installation has them compiled already.

    The compiler runs in a session of its own: a terminal's Ctrl-C reaches only this process, which then ends it.
    """
    from solver.warm_up import is_warm, warm_up_in_child

    if is_warm():
        return
    what = "compiling kernels: once for an installation, up to a minute or two"
    if not sys.stderr.isatty():
        stderr().print(what)
    with doing(what):
        warm_up_in_child(start_new_session=True)


def compile_within(limits: Limits) -> None:
    """Let kernels be compiled in the background, and wait for them within the limits."""
    from solver.kernels import are_being_compiled
    from solver.warm_up import is_warm, warm_up_in_background

    if not warm_up_in_background():
        return
    what = "compiling kernels, once for an installation, up to a minute or two: the search begins when they are ready"
    if not sys.stderr.isatty():
        stderr().print(what)
    with doing(what):
        while are_being_compiled() and limits.seconds < limits.time_limit_s and not limits.cancel.requested:
            time.sleep(POLL_S)
    if not is_warm() and not limits.cancel.requested:
        stderr().print("kernels are still being compiled, so nothing is searched. Maybe run again in a minute.")


def compile_meanwhile(problem: Problem) -> None:
    """Compile kernels in the background while a solve makes published schedules; a search starts once its are ready."""
    from solver.process.parent import load_uncompiled
    from solver.warm_up import warm_up_in_background

    if warm_up_in_background():
        stderr().print("compiling kernels in the background, once for an installation: searches join as they are ready")
        load_uncompiled(problem, "optpipe.simulate", "optpipe.worst_case_memory")
