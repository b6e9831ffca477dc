"""Every command with its options, as `--help` says it, in place of a comment on the page of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator

import typer
from sphinx.application import Sphinx

PAGE = "reference/command-line"
PLACE = "<!-- every command -->"


def fill(_app: Sphinx, page: str, source: list[str]) -> None:
    """Put the commands into the text of their page."""
    if page == PAGE:
        source[0] = source[0].replace(PLACE, "\n".join(every_command()))


def every_command() -> Iterator[str]:
    """Markdown: one section a command, in the order of `optpipe --help`."""
    from optpipe.cli.app import command_line

    root = typer.main.get_command(command_line())
    context = typer.Context(root, info_name="optpipe")
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        yield from _section(command, typer.Context(command, parent=context, info_name=name), 2)


def _section(command: typer.core.TyperCommand, context: typer.Context, level: int) -> Iterator[str]:
    yield f"{'#' * level} {context.command_path}\n"
    yield f"{_sentences(command.help or '')}\n"
    for name, below in getattr(command, "commands", {}).items():
        yield from _section(below, typer.Context(below, parent=context, info_name=name), level + 1)
    if not hasattr(command, "commands"):
        yield f"```text\n{' '.join((context.command_path, *command.collect_usage_pieces(context)))}\n```\n"
        yield from _tables(command, context)


def _tables(command: typer.core.TyperCommand, context: typer.Context) -> Iterator[str]:
    """One table of options for each panel of the command's help."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append(record)
    for panel, records in sorted(panels.items(), key=lambda item: bool(item[0])):
        yield f"| {_plain(panel) or 'option'} | |\n|---|---|"
        yield from (f"| `{_row(names)}` | {_row(_plain(text))} |" for names, text in records)
        yield ""


def _sentences(text: str) -> str:
    """A help text without its line breaks, paragraph by paragraph; marks of Typer are left out."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\f", text))
    return "\n\n".join(_plain(paragraph) for paragraph in paragraphs if paragraph)


def _row(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*") if "`" not in text else text


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
