"""The commands and their help, put together: what `optpipe --help` shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from optpipe.cli import (
    bench,
    compare,
    export,
    keys,
    methods,
    plan,
    plot,
    profile,
    serve,
    solve,
    trace,
    train,
    verify,
    worker,
)


class _Commands(TyperGroup):
    """Typer answers an interrupt with a bare exit code, which leaves nothing to print; an Abort comes through."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        with _interrupt_aborts():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: Any) -> Any:
        with _interrupt_aborts():
            return super().invoke(ctx)


@contextmanager
def _interrupt_aborts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise typer.Abort from interrupt


app = typer.Typer(
    name="optpipe",
    cls=_Commands,
    help="Schedules for pipeline-parallel training: solved, proved, compared, and run as planned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"optpipe {version('optpipe')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _help(command: Callable[..., int]) -> str:
    """Its docstring, each paragraph one line for the terminal to break: typer would keep the breaks of the source."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")


for module in (solve, profile, plan, methods, verify, compare, plot, export, train, trace, bench, serve, worker):
    app.command(name=module.__name__.rsplit(".", 1)[-1], help=_help(module.command))(module.command)
app.add_typer(keys.app, name="keys")
