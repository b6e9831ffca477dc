"""The command line: one file a command. The only place that knows all three packages.

Exit codes: 0 done; 1 it ran and the answer is no; 2 bad usage or bad input; 3 proved infeasible; 4 time ran out with
nothing found; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

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
from optpipe.cli.output import print_error, wants_json
from optpipe.errors import InfeasibleError, InputError, MissingExtraError, NoSolutionError, OptPipeError, TrainingError


class _Commands(TyperGroup):
    """Typer answers an interrupt with a bare exit code, which leaves nothing to print; an Abort comes through."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
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


for module in (solve, profile, plan, methods, verify, compare, plot, export, train, trace, bench, serve, worker):
    app.command(name=module.__name__.rsplit(".", 1)[-1])(module.command)
app.add_typer(keys.app, name="keys")

EXIT_NO = 1
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_NOTHING_FOUND = 4
EXIT_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code of its outcome; errors become one message, never a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    as_json = wants_json(arguments)
    try:
        result = app(args=arguments, standalone_mode=False, prog_name="optpipe")
        return result if isinstance(result, int) else 0
    except TyperException as error:
        print_error(_usage_text(error), as_json)
        return EXIT_BAD_INPUT
    except OptPipeError as error:
        print_error(error, as_json)
        return _exit_code(error)
    except (KeyboardInterrupt, typer.Abort):
        print_error(KeyboardInterrupt("interrupted."), as_json)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout went away: nothing is left to say, and to nobody
        return EXIT_NO
    except OSError as error:
        print_error(f"{error.filename or 'the system'}: {error.strerror}.", as_json)
        return EXIT_NO


def _usage_text(error: TyperException) -> str:
    """What is wrong with the command line, and where to read on."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "optpipe"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"{message.rstrip('.')}. Maybe see '{command} --help'."


def _exit_code(error: OptPipeError) -> int:
    if isinstance(error, InfeasibleError):
        return EXIT_INFEASIBLE
    if isinstance(error, NoSolutionError):
        return EXIT_NOTHING_FOUND
    return EXIT_BAD_INPUT if isinstance(error, InputError | MissingExtraError | TrainingError) else EXIT_NO
