"""A summary and a picture as HTML, as a table of rich, and as one line of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from optpipe.display import Summary
from optpipe.notebook.pictures import picture_of
from optpipe.notebook.summaries import summary_of
from optpipe.plot.panel import printable

if TYPE_CHECKING:
    from rich.console import Group

MOST_ROWS = 64
"""A longer table shows its beginning and says how much more there is."""

LONGEST_CELL, LONGEST_TITLE = 60, 200

_CELL = "padding:0.15em 0.8em;white-space:nowrap"
_FIRST, _NUMBER = f"{_CELL};text-align:left", f"{_CELL};text-align:right;font-variant-numeric:tabular-nums"


def html_of(shown: object) -> str:
    """A fragment of HTML that stands alone, without scripts and with every name escaped."""
    return f'<div class="optpipe">{"".join(_parts(_clean(summary_of(shown))))}{picture_of(shown)}</div>'


def line_of(shown: object) -> str:
    """The title and the facts."""
    summary = _clean(summary_of(shown))
    return ", ".join([summary.title, *(f"{name} {value}".strip() for name, value in summary.facts)])


def renderable_of(shown: object) -> Group:
    """The same as a table of rich under its headline; names are taken as they are, never as markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    summary = _clean(summary_of(shown))
    lines = [Text(summary.title, style="bold"), Text(_facts(summary))]
    if not summary.rows:
        return Group(*lines)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for k, name in enumerate(summary.head):
        table.add_column(Text(name), justify="left" if k == 0 else "right", no_wrap=k == 0)
    for row in summary.rows:
        table.add_row(*map(Text, row))
    return Group(*lines, table)


def _parts(summary: Summary) -> Iterator[str]:
    yield f'<p style="margin:0.3em 0"><strong>{escape(summary.title)}</strong><br>{escape(_facts(summary))}</p>'
    if summary.rows:
        rows = "".join(f"<tr>{_row(row, 'td')}</tr>" for row in summary.rows)
        yield f"<table><thead><tr>{_row(summary.head, 'th')}</tr></thead><tbody>{rows}</tbody></table>"


def _row(cells: Sequence[str], tag: str) -> str:
    looks = [_FIRST, *[_NUMBER] * (len(cells) - 1)]
    return "".join(f'<{tag} style="{look}">{escape(cell)}</{tag}>' for look, cell in zip(looks, cells, strict=True))


def _facts(summary: Summary) -> str:
    return "   ·   ".join(f"{name} {value}".strip() for name, value in summary.facts)


def _clean(summary: Summary) -> Summary:
    """The summary fit to be shown: one line each without control characters, and no more rows than can be read."""
    rows = [[printable(cell, LONGEST_CELL) for cell in row] for row in summary.rows[:MOST_ROWS]]
    if (more := len(summary.rows) - MOST_ROWS) > 0:
        rows.append([f"... and {more:,} more", *[""] * (len(summary.head) - 1)])
    facts = [(name, printable(value, LONGEST_CELL)) for name, value in summary.facts]
    return summary._replace(title=printable(summary.title, LONGEST_TITLE), facts=facts, rows=rows)
