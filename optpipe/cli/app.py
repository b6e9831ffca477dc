"""Application of all commands: exit codes, and one message per error."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from optpipe.cli.console import print_json
from optpipe.errors import (
    InfeasibleError,
    InputError,
    Issue,
    MissingExtraError,
    NoSolutionError,
    OptPipeError,
    OrderError,
    TrainingError,
    shown,
)

EXIT_NO = 1
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_NOTHING_FOUND = 4
EXIT_INTERRUPTED = 130

Failure = TyperException | OptPipeError | OSError | KeyboardInterrupt | typer.Abort


def run(arguments: list[str]) -> int:
    """Run a command line; returns its exit code (see `optpipe.cli`)."""
    named = [word for word in arguments if not word.startswith("-")][:1]
    alone = {*arguments[:1]} & {*_ALL}  # then nothing asks for the other commands
    app = command_line(loaded=named, listed=alone or _ALL)
    try:
        _refuse_empty(arguments)
        result = app(args=arguments, standalone_mode=False, prog_name="optpipe")
        sys.stdout.flush()  # a failed write is reported here, not by Python at exit
        return result if isinstance(result, int) else 0
    except (TyperException, OptPipeError, OSError, KeyboardInterrupt, typer.Abort) as error:
        _print_error(error, as_json="--json" in arguments)  # the options may not have been parsed
        match error:
            case InfeasibleError():
                return EXIT_INFEASIBLE
            case NoSolutionError():
                return EXIT_NOTHING_FOUND
            case InputError() | MissingExtraError() | TrainingError() | TyperException():
                return EXIT_BAD_INPUT
            case KeyboardInterrupt() | typer.Abort():
                return EXIT_INTERRUPTED
            case _:
                return EXIT_NO


def _refuse_empty(arguments: list[str]) -> None:
    """Raise InputError for an empty argument: as a path it is the current folder, as a name often a default."""
    for before, word in pairwise(("", *arguments)):
        option = word[:-1] if word.startswith("--") and word.endswith("=") else before if not word else ""
        if option or not word:
            name = option if option.startswith("-") else "an argument"
            raise InputError([Issue(name, "empty", "is ''. Maybe a variable of the shell is not set.")])


def _print_error(error: Failure, as_json: bool) -> None:
    """Print an error to stderr and, for JSON, to stdout; nothing if stdout is closed.

    Under torchrun rank 0 prints its own, and another rank to stderr what it alone may know.
    """
    kind, text = _kind_and_text(error)
    details: dict[str, Any] = {}
    if isinstance(error, InputError):
        details["issues"] = [{"pointer": i.pointer, "code": i.code, "detail": i.detail} for i in error.issues]
    elif isinstance(error, InfeasibleError):
        details["budgets_bytes"] = error.budgets_bytes
    with suppress(OSError):
        rank = os.environ.get("RANK", "0")
        if text and (rank == "0" or getattr(error, "only_here", isinstance(error, OSError))):
            for line in text.splitlines():
                print(f"error: {line}" if rank == "0" else f"error: rank {rank}: {line}", file=sys.stderr)
            if as_json and rank == "0":
                print_json({"error": {"type": kind, "message": text} | details})
        sys.stdout.flush()
        return
    # Stdout is closed or full. Python flushes it once more at exit and would print a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _kind_and_text(error: Failure) -> tuple[str, str]:
    """Return the type for JSON and the message; the message is empty if help was printed, or if stdout is closed."""
    match error:
        case TyperException():
            return "UsageError", _usage_text(error)
        case KeyboardInterrupt() | typer.Abort():
            return "KeyboardInterrupt", "interrupted."
        case BrokenPipeError():
            return "BrokenPipeError", ""
        case OSError():
            return type(error).__name__, f"{error.filename or 'the system'}: {error.strerror}."
        case OrderError():
            maybe = "Maybe the schedule was edited: 'optpipe verify' names every fault."
            return "OrderError", f"{str(error).rstrip('.')}. {maybe}"
        case _:
            source = getattr(error, "source", "")
            lines = (f"{source}: {line}" if source else line for line in str(error).splitlines())
            return type(error).__name__, "\n".join(lines)


def _usage_text(error: TyperException) -> str:
    """The error in a command line, with the refused value, which typer's message lacks, and a hint."""
    from pydantic import ValidationError

    context = getattr(error, "ctx", None)
    command = context.command_path if context else "optpipe"
    text = " ".join(error.format_message().split()).rstrip(".")
    text = re.sub(r"Did you mean (.*)\?", r"Maybe you meant \1", text)
    if not text:
        return ""
    if isinstance(error.__cause__, ValidationError):
        refused = shown(error.__cause__.errors()[0]["input"])
        text = text.replace("Invalid value for", f"Invalid value {refused} for", 1)
    return f"{text}." if "Maybe " in text else f"{text}. Maybe see '{command} --help'."


class _Commands(TyperGroup):
    """Command group that passes on an interrupt as Abort: typer turns a KeyboardInterrupt into an exit code."""

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


COMMANDS = {
    "solve": "solve:command",
    "profile": "profile:command",
    "plan": "plan:command",
    "methods": "solve:methods",
    "models": "models:command",
    "machines": "machines:command",
    "fits": "fits:command",
    "calibrate": "calibrate:command",
    "verify": "verify:command",
    "compare": "compare:command",
    "plot": "verify:plot",
    "export": "export:command",
    "train": "train:command",
    "trace": "trace:command",
    "bench": "bench:command",
    "serve": "serve:command",
    "worker": "serve:worker",
}
"""Module of each command in `optpipe.cli`, and its function there."""

GROUPS = {"keys": "serve:keys", "database": "database:database", "checkpoint": "checkpoint:checkpoint"}
"""Module of each group of commands, and its application there."""


_ALL = (*COMMANDS, *GROUPS)


def command_line(loaded: Collection[str] = COMMANDS, listed: Collection[str] = _ALL) -> typer.Typer:
    """The application with the commands that are `listed`: of those not `loaded`, the name and the help text alone."""
    app = typer.Typer(
        name="optpipe",
        cls=_Commands,
        help="Schedules for pipeline-parallel training: solved, proved, compared, and run as planned.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    for name in listed:
        if name in GROUPS:
            app.add_typer(_at(GROUPS[name]), name=name)
            continue
        home = COMMANDS[name]
        command = _at(home) if name in loaded else _listed
        help_text = inspect.getdoc(command) if name in loaded else _docstring(home)
        # Each paragraph on one line: typer would keep the line breaks of the source.
        app.command(name=name, help=re.sub(r"(?<!\n)\n(?!\n)", " ", help_text or ""))(command)
    return app


def _at(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(import_module(f"optpipe.cli.{module}"), name)


def _docstring(home: str) -> str | None:
    """The docstring of a function in a module that is not loaded: loading all of them takes a second."""
    module, _, name = home.partition(":")
    functions = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")).body
    return next(ast.get_docstring(f) for f in functions if isinstance(f, ast.FunctionDef) and f.name == name)


def _listed() -> None:
    raise AssertionError("a command that was not loaded")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"optpipe {version('optpipe')}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
