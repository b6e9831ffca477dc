"""The commands put together, their exit codes, and one message per error."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from optpipe.cli import bench, compare, export, plan, profile, serve, solve, trace, train, verify
from optpipe.cli.console import print_json
from optpipe.document import shown
from optpipe.errors import InfeasibleError, InputError, MissingExtraError, NoSolutionError, OptPipeError, TrainingError

EXIT_NO = 1
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_NOTHING_FOUND = 4
EXIT_INTERRUPTED = 130

Failure = TyperException | OptPipeError | OSError | KeyboardInterrupt | typer.Abort


def run(arguments: list[str]) -> int:
    """Run a command line; returns its exit code (see `optpipe.cli`)."""
    try:
        result = app(args=arguments, standalone_mode=False, prog_name="optpipe")
        sys.stdout.flush()  # what cannot be written is said here, and not as Python ends
        return result if isinstance(result, int) else 0
    except (TyperException, OptPipeError, OSError, KeyboardInterrupt, typer.Abort) as error:
        _say(error, as_json="--json" in arguments)  # which may not have been parsed
        return _exit_code(error)


def _exit_code(error: Failure) -> int:
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


def _say(error: Failure, as_json: bool) -> None:
    """Print what went wrong, under torchrun by rank 0 alone; nothing where nobody reads it any more."""
    kind, text = _kind_and_text(error)
    with suppress(OSError):
        if text and os.environ.get("RANK", "0") == "0":
            for line in text.splitlines():
                print(f"error: {line}", file=sys.stderr)
            if as_json:
                print_json({"error": {"type": kind, "message": text} | _particulars(error)})
        sys.stdout.flush()
        return
    # Stdout is unread or full: Python would try the rest once more as it ends, and complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _kind_and_text(error: Failure) -> tuple[str, str]:
    """The type that JSON names and the message; none where typer has printed the help instead, or nobody reads."""
    match error:
        case TyperException():
            return "UsageError", _usage_text(error)
        case KeyboardInterrupt() | typer.Abort():
            return "KeyboardInterrupt", "interrupted."
        case BrokenPipeError():
            return "BrokenPipeError", ""
        case OSError():
            return type(error).__name__, f"{error.filename or 'the system'}: {error.strerror}."
        case _:
            source = getattr(error, "source", "")
            lines = (f"{source}: {line}" if source else line for line in str(error).splitlines())
            return type(error).__name__, "\n".join(lines)


def _particulars(error: Failure) -> dict[str, Any]:
    if isinstance(error, InputError):
        return {"issues": [{"pointer": i.pointer, "code": i.code, "detail": i.detail} for i in error.issues]}
    return {"budgets_bytes": error.budgets_bytes} if isinstance(error, InfeasibleError) else {}


def _usage_text(error: TyperException) -> str:
    """What is wrong with the command line, and where to read on."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "optpipe"
    text = " ".join(error.format_message().split()).rstrip(".")
    if not text:
        return ""
    text = text.replace("Invalid value for", f"Invalid value{_refused_value(error)} for", 1)
    return f"{text}." if "Maybe " in text else f"{text}. Maybe see '{command} --help'."


def _refused_value(error: TyperException) -> str:
    """The value that an option's type refused, which typer's message leaves out; else nothing."""
    from pydantic import ValidationError

    cause = error.__cause__
    return f" {shown(cause.errors()[0]['input'])}" if isinstance(cause, ValidationError) else ""


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


for name, command in (
    ("solve", solve.command),
    ("profile", profile.command),
    ("plan", plan.command),
    ("methods", solve.methods),
    ("verify", verify.command),
    ("compare", compare.command),
    ("plot", verify.plot),
    ("export", export.command),
    ("train", train.command),
    ("trace", trace.command),
    ("bench", bench.command),
    ("serve", serve.command),
    ("worker", serve.worker),
):
    app.command(name=name, help=_help(command))(command)
app.add_typer(serve.keys, name="keys")
